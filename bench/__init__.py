"""Benchmarks and the tools that they need; each runs as ``python -m bench.NAME``."""

import os

# Systems that are compared share this process. oneDNN keeps 1,024 compiled products, and another's
# shapes would evict ours: a prompt then took half a second more to compile them again.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
