"""Benchmarks and the tools that they need; each runs as ``python -m bench.NAME``."""
