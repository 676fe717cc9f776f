"""The benchmarks one after another, and a report of them: what ``make bench`` runs.

``python -m bench.all [--folder DIR] [--full] [--only NAME …] [--resume] [--seed S] [--gsm8k FILE]
[--schemas FILE] [--suite DIR]`` runs each benchmark in a process of its own with ``--json
DIR/NAME.json``, small sizes unless ``--full``, and writes ``DIR/report.html``. After an
interruption ``--resume`` goes on with what the folder lacks. What cannot run here is named with its
reason. A benchmark that fails is named at the end (exit status 1); the others still run. The
default folder is ``build/bench``.

Not among them: ``bench.side_by_side``, which needs another work tree, ``bench.step_cost``, which it
runs, and ``bench.check``, which holds the records of the :data:`USUAL` to what is expected.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import report
from bench.common import ROOT, fail

USUAL = ("counts", "overlap", "adaptive", "gsm8k", "json_schema", "peers", "maskbench")
OTHERS = (
    "embedded", "drafters", "traces", "attack", "exactness", "whole", "simulated_device",
    "six_machines", "gpu",
)  # fmt: skip


def lacking(name: str, options: argparse.Namespace) -> str | None:
    """What a benchmark needs that is not here, in words."""
    if name == "exactness" and options.suite is None:
        return "needs --suite, a folder of the JSON Schema Test Suite"
    device = name == "gpu"
    return "needs a CUDA device" if device and not torch.cuda.is_available() else None


def command(name: str, options: argparse.Namespace) -> list[str]:
    """The command line of one benchmark."""
    words = [sys.executable, "-m", f"bench.{name}", "--json", str(record_path(name, options))]
    words += ["--seed", str(options.seed)]
    if not options.full:
        words.append("--quick")
    if options.gsm8k is not None and name in ("gsm8k", "embedded"):
        words += ["--data", str(options.gsm8k)]
    if options.gsm8k is not None and name == "drafters":
        words += ["--gsm8k", str(options.gsm8k)]
    if options.schemas is not None and name in ("overlap", "json_schema", "maskbench", "whole"):
        words += ["--data", str(options.schemas)]
    if name == "exactness":
        words += ["--data", str(options.suite)]
    return words


def record_path(name: str, options: argparse.Namespace) -> Path:
    """Where the record of a benchmark is written."""
    folder: Path = options.folder
    return folder / f"{name}.json"


def run_all(options: argparse.Namespace) -> list[str]:
    """Run everything that is asked for; names of those that failed."""
    failed = []
    for name in options.only or USUAL + OTHERS:
        path = record_path(name, options)
        if reason := lacking(name, options):
            print(f"{name}: left out: {reason}", file=sys.stderr)
            continue
        if options.resume and path.exists():
            print(f"{name}: there already", file=sys.stderr)
            continue
        # A record of an earlier run must not stand for one that fails.
        path.unlink(missing_ok=True)
        print(f"\n{name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        status = subprocess.run(command(name, options), cwd=ROOT).returncode
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        if status:
            failed.append(f"{name} (exit status {status})")
    return failed


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.all", description="All benchmarks.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--full", action="store_true", help="full sizes, which take hours")
    parser.add_argument("--only", nargs="+", choices=USUAL + OTHERS, help="these alone")
    parser.add_argument("--resume", action="store_true", help="keep the records that are there")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn (default 0)")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test split, .jsonl")
    parser.add_argument("--schemas", type=Path, help="rows of schemas, .jsonl")
    parser.add_argument("--suite", type=Path, help="the JSON Schema Test Suite's folder")
    options = parser.parse_args(arguments)
    for name in ("folder", "gsm8k", "schemas", "suite"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).resolve())
    failed = run_all(options)
    if any(options.folder.glob("*.json")):
        report.main([str(options.folder)])
    if failed:
        fail(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
