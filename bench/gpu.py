"""Everything that needs a GPU, in one command and within nine minutes.

``python -m bench.gpu [--quick] [--json PATH] [--seed S] [--like llama-3.1-8b] [--data FILE]
[--budget-s 540] [--only PART ...] [--rehearse]`` runs, on a machine with one CUDA device of 80 GB,
in this order:

- ``tests``: ``pytest -m gpu``;
- ``kernels``: every kernel's share of the roofline (``bench.kernels``);
- ``checkpoint``: waits for the embedded model padded to the cost of ``--like`` in bfloat16
  (``bench.padded``), which is written to the folder for temporary files from the start on, beside
  the two before: 16 GB for an 8B model, removed at the end;
- ``verify``: a verify of 16 nodes at batch 1, its share of what the memory's copy rate allows;
- ``constrained``: TPOT with a grammar over TPOT without. Requests are extraction cases of which
  the model says the same, token by token, with its grammar and without (which ones is found
  first), so that both sides accept the same lengths; a pair of runs where they do not is left out
  and counted. Beside it: ms per step under JSON schemas of ``--data``, where accept lengths differ;
- ``host``: a step's time outside waits, under these schemas;
- ``eagle3``: EAGLE-3 as a chain of 5 and as a tree of 16 against plain decoding. The embedded head
  drafts from 2,048 tokens, one of that size from 32,000: each of its passes reads 0.25 GB less;
- ``transformers``: against ``transformers``' ``generate`` with xgrammar's logits processor;
- ``overlap``: the three overlap modes (``bench.overlap``): what is exposed, and what is saved.

Parts run in a process of their own, which is replaced where one fails, hangs, or ends it: the
others still run. What a part had told by then is kept: of ``kernels``, each one that was measured.
A part for which too little of the budget is left is ``skipped: time``, and another run may have it
``--only``. The record is rewritten after every part. The exit status is 1 where a part failed or
outputs differ (in bfloat16: by more than rounding, see ``bench.gpu_compare``), 2 without a CUDA
device.

``--rehearse`` runs the same on the CPU at tiny sizes, to see that it works. Its figures say
nothing, are marked, and are written nowhere but to ``--json``, not into ``bench/results``.

To run it: install the project with its ``dev`` extra, or, on a machine that reaches no registry,
put wheels on the PYTHONPATH. What a part lacks is named in its error. Python 3.11 or later, and:

1. torch 2.11, triton 3.6, numpy, rich, safetensors, tokenizers, jinja2, pydantic, jsonschema (with
   referencing and rpds-py), xgrammar (with apache-tvm-ffi) and llguidance for all parts;
2. pytest for ``tests``, transformers for ``transformers``, matplotlib for the plot;
3. in the project's folder, ``python -m bench.gpu --data schemas.jsonl --json out/gpu.json``
   (schemas as in JSONSchemaBench; without ``--data``, the project's own).

Fields of the last line, beside those of every record (``bench.common``):
    figures: Name → ``value``, ``target``, ``goal`` (``at least`` or ``at most``), ``met``,
        ``unit``, ``by`` (label → value: all that was measured of it) and, in a rehearsal,
        ``rehearsal``. ``value`` is the worst batch's where the grammar's cost is judged, else that
        of batch 1, and the better of chain and tree.
    parts: Name → ``status`` (``ok``, ``failed``, ``skipped: time``, ``skipped: no device``,
        ``skipped: no checkpoint``), ``seconds``, ``error`` and what else the part tells.
    equal: No outputs differ; None where none were compared.
    complete: All parts that were asked for have had their turn.
    like, budget_s, seconds, rehearsal, plot.

The record is ``bench/results/GPU-DATE.json`` unless ``--json`` says otherwise, the plot beside it
with the suffix ``.svg``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import plots
from bench.common import ROOT, Run, fail, flags, machine, rounded, strict_json
from bench.gpu_child import Child, PartFailed, describe
from bench.gpu_setup import Result, Setup
from bench.padding.sizes import PRESETS
from overlap_spec.errors import ConfigError

RESULTS = ROOT / "bench" / "results"
LIKE = "llama-3.1-8b"
REHEARSAL_SIZES = ("--vocab", "4096")
# Kept back for the plot and the record.
CLOSING_S = 10.0
MOST_TOLD = 10


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        work: Its function, ``module:name``.
        needs_s: With less time left it is not begun.
        most_s: It is ended after this time.
        device: Whether it means nothing without a CUDA device.
    """

    name: str
    work: str
    needs_s: float
    most_s: float
    device: bool = False


BEFORE = (
    Part("tests", "bench.gpu_device:tests", 20, 180, device=True),
    Part("kernels", "bench.gpu_device:kernels", 20, 120, device=True),
)
AFTER = (
    Part("verify", "bench.gpu_decode:verify", 25, 150),
    Part("constrained", "bench.gpu_decode:constrained", 40, 150),
    Part("host", "bench.gpu_decode:host", 15, 60),
    Part("eagle3", "bench.gpu_compare:eagle3", 40, 150),
    Part("transformers", "bench.gpu_compare:transformers", 50, 180),
    # Last, since its three engines leave no room for the others.
    Part("overlap", "bench.gpu_compare:modes", 50, 180),
)


class Clock:
    """Seconds since now, and what is left of a budget."""

    def __init__(self, budget_s: float) -> None:
        self._start, self._budget_s = time.monotonic(), budget_s

    @property
    def gone_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Seconds that parts may still take."""
        return self._budget_s - CLOSING_S - self.gone_s


class Build:
    """A checkpoint that is being written by a process of its own.

    Args:
        folder: Where it is written.
        words: More arguments of ``bench.padded``.
    """

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.folder, self._told_s = folder, time.monotonic()
        command = [sys.executable, "-m", "bench.padded", str(folder), *words]
        with (folder.parent / "build.log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def tell(self) -> None:
        """Say now and then how far it is."""
        if self._process.poll() is None and time.monotonic() - self._told_s > 10:
            self._told_s = time.monotonic()
            size = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
            print(f"checkpoint: {size / 1e9:.1f} GB written", file=sys.stderr)

    def wait(self, most_s: float) -> Result:
        """The finished checkpoint's figures.

        Raises:
            PartFailed: it could not be written, or not in this time.
        """
        end = time.monotonic() + most_s
        while self._process.poll() is None:
            if time.monotonic() >= end:
                raise PartFailed(f"not written within {most_s:.0f} s")
            time.sleep(0.2)
            self.tell()
        said = (self.folder.parent / "build.log").read_text(encoding="utf-8")
        if self._process.returncode:
            raise PartFailed(f"bench.padded failed: {said[-1000:]}")
        written = json.loads(said.splitlines()[-1])
        return Result(details={"write_s": written.pop("seconds"), **written})

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class Report:
    """The record, written again after every part.

    Args:
        run: Its head and samples.
        fields: Its own fields.
    """

    def __init__(self, run: Run, **fields: Any) -> None:
        self.run = run
        self.record: dict[str, Any] = {
            "figures": {}, "parts": {}, "equal": None, "complete": False, **fields
        }  # fmt: skip

    def skip(self, name: str, why: str) -> None:
        """Enter a part that was not begun."""
        self._enter(name, {"status": f"skipped: {why}"})

    def attempt(self, name: str, work: Callable[[], Result]) -> bool:
        """Run a part and enter it; whether it went well."""
        print(f"{name} …", file=sys.stderr)
        start = time.monotonic()
        try:
            result = work()
            strict_json([result.figures, result.details, result.samples])
        except PartFailed as error:
            result = error.so_far or Result()
            result.faults = [str(error), *result.faults]
        except Exception as error:
            result = Result(faults=[describe(error)])
        wrong = [*result.faults, *(result.differences or ())]
        seconds = time.monotonic() - start
        row = {**result.details, "status": "failed" if wrong else "ok", "seconds": seconds}
        if wrong:
            row["error"] = "; ".join(wrong[:MOST_TOLD])
        if result.differences is not None:
            self.record["equal"] = self.record["equal"] is not False and not result.differences
        mark = {"rehearsal": True} if self.record["rehearsal"] else {}
        self.record["figures"] |= {key: value | mark for key, value in result.figures.items()}
        for sample in result.samples:
            self.run.sample(part=name, **sample)
        self._enter(name, row)
        return not wrong

    def _enter(self, name: str, row: dict[str, Any]) -> None:
        self.record["parts"][name] = row
        print(f"{name}: {row['status']} {row.get('error', '')}", file=sys.stderr)
        path = self.run.options.json
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(strict_json(rounded(self.record | self.run.head)) + "\n")


def run_parts(
    parts: Sequence[Part], report: Report, child: Child, clock: Clock, tell: Callable[[], None]
) -> None:
    """Each part in turn, where there is a device for it, and time."""
    for part in parts:
        left_s = clock.left_s
        if part.device and report.record["rehearsal"]:
            report.skip(part.name, "no device")
        elif left_s < part.needs_s:
            report.skip(part.name, "time")
        else:
            work = partial(child.call, part.work, min(part.most_s, left_s), tell)
            if not report.attempt(part.name, work):
                # What made it fail may be in the process still.
                child.close()


def build_checkpoint(setup: Setup) -> Build:
    """Begin to write the checkpoint."""
    sizes = REHEARSAL_SIZES if setup.rehearse else ("--like", setup.like)
    return Build(setup.folder, [*sizes, "--dtype", "bfloat16", "--seed", str(setup.seed)])


def run_around(
    build: Build,
    before: Sequence[Part],
    after: Sequence[Part],
    report: Report,
    child: Child,
    clock: Clock,
) -> None:
    """Parts that run while the checkpoint is written, and those that need it."""
    try:
        run_parts(before, report, child, clock, build.tell)
        if report.attempt("checkpoint", lambda: build.wait(clock.left_s)):
            run_parts(after, report, child, clock, build.tell)
        else:
            for part in after:
                report.skip(part.name, "no checkpoint")
    finally:
        child.close()
        build.close()


def run_all(report: Report, setup: Setup, clock: Clock, only: Sequence[str] = ()) -> None:
    """Everything, or the parts ``only``, around one checkpoint."""
    before, after = (
        [part for part in parts if not only or part.name in only] for parts in (BEFORE, AFTER)
    )
    child = Child(setup)
    if not after:
        try:
            run_parts(before, report, child, clock, lambda: None)
        finally:
            child.close()
    else:
        run_around(build_checkpoint(setup), before, after, report, child, clock)
    report.record["complete"] = True


def default_path(device: str, date: str) -> Path:
    """Where a run's record goes: the device's name and the day."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return RESULTS / f"{slug}-{date[:10]}.json"


def table(figures: dict[str, dict[str, Any]]) -> Table:
    """The figures beside their targets."""
    found = Table("figure", "value", "target", "met")
    for name, figure in figures.items():
        goal = "-" if figure["goal"] is None else f"{figure['goal']} {figure['target']}"
        met = "-" if figure["met"] is None else "yes" if figure["met"] else "no"
        found.add_row(name, f"{figure['value']:.4g} {figure['unit']}", goal, met)
    return found


def faults(record: dict[str, Any]) -> Iterator[str]:
    """Parts that failed, in words."""
    for name, row in record["parts"].items():
        if row["status"] == "failed":
            yield f"{name}: {row['error']}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("gpu", "Everything that needs a GPU, within a budget of time.")
    parser.add_argument("--like", choices=sorted(PRESETS), default=LIKE, help="cost to pad to")
    parser.add_argument("--data", type=Path, help="schemas, as rows of JSONSchemaBench")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds in all (540)")
    names = [part.name for part in (*BEFORE, *AFTER)]
    parser.add_argument("--only", nargs="+", choices=names, default=(), help="these parts alone")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    options = parser.parse_args(arguments)
    if options.rehearse and options.json is not None and RESULTS in options.json.resolve().parents:
        parser.error("--json must not be in bench/results: a rehearsal measures nothing")
    if options.budget_s <= 0:
        parser.error("--budget-s must be over 0")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    clock = Clock(options.budget_s)
    if not (options.rehearse or torch.cuda.is_available()):
        print("error: bench.gpu needs a CUDA device; --rehearse runs on the CPU", file=sys.stderr)
        sys.exit(2)
    if options.json is None and not options.rehearse:
        options.json = default_path(machine()["device"], datetime.now(UTC).isoformat())
    run = Run("gpu", options, arguments)
    report = Report(
        run, rehearsal=options.rehearse, like=options.like, budget_s=options.budget_s, plot=None
    )
    record = report.record
    with tempfile.TemporaryDirectory(prefix="overlap-spec-gpu-") as work:
        folder = Path(work) / "checkpoint"
        data = options.data.resolve() if options.data is not None else None
        setup = Setup(options.rehearse, options.quick, options.seed, options.like, folder, data)
        run_all(report, setup, clock, options.only)
    if options.json is not None:
        plot = options.json.with_suffix(".svg")
        try:
            plots.write_svg(plots.targets(record | run.head), plot)
            record["plot"] = plot.name
        except ConfigError as error:
            print(f"no plot: {error}", file=sys.stderr)
    run.console.print(table(record["figures"]))
    run.finish(setup.size.repetitions, **rounded(record), seconds=round(clock.gone_s, 1))
    wrong = list(faults(record))
    if wrong:
        fail("\n".join(wrong))


if __name__ == "__main__":
    main()
