"""Ranks of tensor parallelism: their processes, and what they send each other."""
