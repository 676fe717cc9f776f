"""The benchmarks one after another, and a report of them: what ``make bench`` runs.

``python -m bench.all [--folder DIR] [--full] [--only NAME …] [--resume] [--seed S]`` runs each
benchmark in a process of its own with ``--json DIR/NAME.json``, small sizes unless ``--full``, and
writes ``DIR/report.html``. After an interruption ``--resume`` goes on with what the folder lacks.
What cannot run here is named with its reason. A benchmark that fails is named at the end (exit
status 1); the others still run. The default folder is ``build/bench``.

Not among them: ``bench.side_by_side``, which needs another work tree, ``bench.step_cost``, which it
runs, ``bench.exactness``, which needs the JSON Schema Test Suite, and ``bench.check``, which holds
the records of the :data:`USUAL` to what is expected.
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
    "embedded", "drafters", "traces", "simulated_device", "six_machines", "gpu",
)  # fmt: skip


def run_all(options: argparse.Namespace) -> list[str]:
    """Run everything that is asked for; names of those that failed."""
    failed = []
    for name in options.only or USUAL + OTHERS:
        path: Path = options.folder / f"{name}.json"
        if name == "gpu" and not torch.cuda.is_available():
            print(f"{name}: left out: needs a CUDA device", file=sys.stderr)
            continue
        if options.resume and path.exists():
            print(f"{name}: there already", file=sys.stderr)
            continue
        # A record of an earlier run must not stand for one that fails.
        path.unlink(missing_ok=True)
        print(f"\n{name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        words = [sys.executable, "-m", f"bench.{name}", "--json", str(path)]
        words += ["--seed", str(options.seed), *([] if options.full else ["--quick"])]
        status = subprocess.run(words, cwd=ROOT).returncode
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
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    failed = run_all(options)
    if any(options.folder.glob("*.json")):
        report.main([str(options.folder)])
    if failed:
        fail(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
