"""What a CUDA device is asked first: how near its limits a step comes, and what grammars cost it.

``python -m bench.gpu [--only PART …] [--model NAME | --model DIR --draft DIR] [--work DIR] [--data
FILE] [--quick] [--json PATH] [--seed S] [--rehearse]`` runs, on one device of 80 GB, the parts

- ``verify``: a verify of 16 nodes at batch 1, its share of what the memory's copy rate allows;
- ``roofline``: verifies by themselves: 16 and 64 nodes, batches of 1 and 32, contexts to 32k;
- ``host``: a step's time outside waits, under JSON schemas of ``--data``;
- ``constrained``: TPOT with a grammar over TPOT without. Requests are extraction cases of which the
  model says the same, token by token, with its grammar and without (which ones is found first), so
  that both sides accept the same lengths; a pair of runs where they do not is left out and counted.
  Beside it: ms per step under schemas, where accept lengths differ.

The target is the embedded model padded to the cost of ``llama-3.1-8b`` (16 GB, written once to
``--work``) unless ``--model`` says otherwise. A part that fails is told, and the others still run;
the record is written after each of them. The exit status is 1 where a part failed, 2 without a CUDA
device. What else is asked of a GPU, other benchmarks tell of any device: ``bench.kernels``,
``bench.overlap`` and ``bench.peers`` with ``--model llama-3.1-8b`` (docs/gpu.md has the order).
``--rehearse`` runs the same on the CPU at tiny sizes, to see that it works: its figures say nothing
and are marked.

Fields of the last line, beside those of every record (``bench.common``):
    figures: Name → ``value``, ``target``, ``goal`` (``at least`` or ``at most``), ``met``,
        ``unit`` and ``by`` (label → value: all that was measured of it). ``value`` is the worst
        batch's where the grammar's cost is judged, else that of batch 1.
    parts: Name → ``seconds``, ``error`` (null where it went well) and what else the part tells.
    like: The target's name. rehearsal: Whether this was one.

The record is ``bench/results/GPU-DATE.json`` unless ``--json`` says otherwise.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import gpu_roofline, gpu_steps
from bench.common import ROOT, Run, fail, flags, machine, rounded
from bench.gpu_context import Context, Result
from bench.targets import (
    add_model_flags,
    check_model_flags,
    model_settings,
    padded_target,
    work_folder,
)
from overlap_spec.errors import OverlapSpecError

RESULTS = ROOT / "bench" / "results"
LIKE = "llama-3.1-8b"
REHEARSAL_VOCABULARY = 4096
# What says most of the design comes first.
PARTS: dict[str, Callable[[Context], Result]] = {
    "verify": gpu_steps.verify,
    "roofline": gpu_roofline.roofline,
    "host": gpu_steps.host,
    "constrained": gpu_steps.constrained,
}


def run_parts(
    names: Sequence[str], context: Context, run: Run, record: dict[str, Any], repetitions: int
) -> None:
    """Each part in turn, into ``record``, which is written after each of them."""
    for name in names:
        print(f"{name} …", file=sys.stderr)
        start = time.monotonic()
        try:
            found, error = PARTS[name](context), None
        except Exception as raised:
            found, error = Result(), f"{type(raised).__name__}: {raised}"
        for sample in found.samples:
            run.sample(part=name, **sample)
        record["figures"] |= found.figures
        row = {"seconds": time.monotonic() - start, "error": error, **found.details}
        record["parts"][name] = row
        print(f"{name}: {row['seconds']:.0f} s {error or ''}", file=sys.stderr)
        run.write(repetitions, **rounded(record))


def default_path(device: str, date: str) -> Path:
    """Where a run's record goes: the device's name and the day."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return RESULTS / f"{slug}-{date[:10]}.json"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("gpu", "How near its limits a CUDA device's step comes.")
    add_model_flags(parser, f"that of {LIKE}")
    parser.add_argument("--data", type=Path, help="schemas, as rows of JSONSchemaBench")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    options = parser.parse_args(arguments)
    check_model_flags(parser, options)
    if options.rehearse and options.json is not None and RESULTS in options.json.resolve().parents:
        parser.error("--json must not be in bench/results: a rehearsal measures nothing")
    return options


def weights_of(options: argparse.Namespace, run: Run) -> tuple[Path, Path]:
    """Folders of the target and of its head."""
    if options.rehearse:
        return padded_target(work_folder(options.work), run.console, REHEARSAL_VOCABULARY)
    options.model = options.model or LIKE
    settings = model_settings(options, run.console)
    return Path(settings["model"]), Path(settings["draft"])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    if not (options.rehearse or torch.cuda.is_available()):
        print("error: bench.gpu needs a CUDA device; --rehearse runs on the CPU", file=sys.stderr)
        sys.exit(2)
    if options.json is None and not options.rehearse:
        options.json = default_path(machine()["device"], datetime.now(UTC).isoformat())
    run = Run("gpu", options, arguments)
    try:
        target, draft = weights_of(options, run)
    except OverlapSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    context = Context(options, target, draft)
    record: dict[str, Any] = {"figures": {}, "parts": {}}
    record |= {"like": Path(options.model or "").name, "rehearsal": options.rehearse}
    try:
        run_parts(options.only or list(PARTS), context, run, record, context.size.repetitions)
    finally:
        context.engines()
    run.finish(context.size.repetitions, **rounded(record))
    wrong = [f"{name}: {row['error']}" for name, row in record["parts"].items() if row["error"]]
    if wrong:
        fail("\n".join(wrong))


if __name__ == "__main__":
    main()
