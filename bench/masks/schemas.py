"""The schemas of a file, for benchmarks that take one after the other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.workloads import OWN_SCHEMAS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--data`` and ``--limit``."""
    parser.add_argument("--data", type=Path, default=OWN_SCHEMAS, help="schemas, .jsonl")
    parser.add_argument("--limit", type=int, metavar="N", help="only N schemas, evenly spread")


def entries_of(options: argparse.Namespace, quick: int) -> list[dict[str, Any]]:
    """The entries of the file that are asked for: ``quick`` of them with ``--quick``, unless
    ``--limit`` says."""
    lines = options.data.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines if line]
    limit = options.limit or (quick if options.quick else len(entries))
    return entries[:: max(1, len(entries) // limit)][:limit]
