"""Everything that needs a GPU, the most telling first, in calls of at most ten minutes.

``python -m bench.gpu [--continue] [--state FOLDER] [--only PART ...] [--budget-s 540] [--quick]
[--json PATH] [--seed S] [--like llama-3.1-8b] [--data FILE] [--rehearse]`` runs, on a machine with
one CUDA device of 80 GB, in this order:

- ``first tests``: whether a step waits for the device, and whether graphs replay what was computed;
- ``attention``: the share of the roofline of attention's kernels (``bench.kernels``);
- ``checkpoint``: waits for the embedded model padded to the cost of ``--like`` and 131,072 tokens
  in bfloat16 (``bench.padded``), which is written from the start on, beside the two before: 16 GB
  for an 8B model, kept in the state's folder;
- ``verify``: a verify of 16 nodes at batch 1, its share of what the memory's copy rate allows;
- ``roofline``: verifies by themselves: 16 and 64 nodes, batches of 1 and 32, contexts to 32k;
- ``host``: a step's time outside waits, under JSON schemas of ``--data``;
- ``constrained``: TPOT with a grammar over TPOT without, at 131,072 tokens. Requests are extraction
  cases of which the model says the same, token by token, with its grammar and without (which ones
  is found first), so that both sides accept the same lengths; a pair of runs where they do not is
  left out and counted. Beside it: ms per step under schemas, where accept lengths differ;
- ``overlap``: the three overlap modes (``bench.overlap``), a grammar of unions among the kinds of
  traffic: what is exposed, and what is saved;
- ``eagle3``: EAGLE-3 as a chain of 5 and as a tree of 16 against plain decoding. The embedded head
  drafts from 2,048 tokens, one of that size from 32,000: each of its passes reads 0.25 GB less;
- ``transformers``: against ``transformers``' ``generate`` with xgrammar's logits processor, as it
  is and with a static cache, for which it compiles its step;
- ``servers``: against vLLM and SGLang, each where it is installed, which serve the same target;
- ``kernels``: all other kernels' share of the roofline;
- ``tests``: ``pytest -m gpu``, file by file.

Parts run in a process of their own, which is replaced where one fails, hangs, or ends it: the
others still run. The record is rewritten whenever a part tells something, so that a call which is
ended, even killed, keeps all figures that were there. ``--continue`` goes on in the same folder
(``--state``; ``build/gpu`` by default): with what was never begun and what was under way, in order,
then with what failed. ``first tests``, ``attention``, ``roofline``, ``constrained``, ``kernels``
and ``tests`` begin where they were ended, the others anew. ``--only`` runs the named parts,
whatever became of them before. A part for which too little of the budget is left is ``skipped:
time``. The exit status is 1 where a part failed or outputs differ (in bfloat16: by more than
rounding, see ``bench.gpu_compare``), 2 without a CUDA device or without a run to go on with.

``--rehearse`` runs the same on the CPU at tiny sizes, to see that it works. Its figures say
nothing, are marked, and are written nowhere but to ``--json``, not into ``bench/results``; without
``--state`` it leaves nothing to go on with.

To run it: install the project with its ``dev`` extra, or, on a machine that reaches no registry,
put wheels on the PYTHONPATH. What a part lacks is named in its error. Python 3.11 or later, and:

1. torch 2.11, triton 3.6, numpy, rich, safetensors, tokenizers, jinja2, pydantic, jsonschema (with
   referencing and rpds-py), xgrammar (with apache-tvm-ffi) and llguidance for all parts;
2. pytest for the tests, transformers for ``transformers``, httpx and the servers' own packages for
   ``servers``, matplotlib for the plot;
3. in the project's folder, ``python -m bench.gpu --data schemas.jsonl``, then as often as wanted
   ``python -m bench.gpu --data schemas.jsonl --continue`` (schemas as in JSONSchemaBench; without
   ``--data``, the project's own).

Fields of the last line, beside those of every record (``bench.common``):
    figures: Name → ``value``, ``target``, ``goal`` (``at least`` or ``at most``), ``met``,
        ``unit``, ``by`` (label → value: all that was measured of it) and, in a rehearsal,
        ``rehearsal``. ``value`` is the worst batch's where the grammar's cost is judged, else that
        of batch 1, and the better of chain and tree.
    parts: Name → ``status`` (``ok``, ``failed``, ``running`` where its call was ended, ``skipped:
        time``, ``skipped: no device``, ``skipped: no checkpoint``), ``seconds`` over its ``calls``,
        ``error`` and what else the part tells.
    equal: No outputs differ; None where none were compared.
    complete: All parts have had their turn.
    calls, like, budget_s, seconds, rehearsal, plot.

The record is ``bench/results/GPU-DATE.json`` unless ``--json`` says otherwise, the plot beside it
with the suffix ``.svg``.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import plots
from bench.common import ROOT, fail, flags, machine, rounded
from bench.gpu_build import Build
from bench.gpu_child import Child
from bench.gpu_report import Keep, Report, State, faults
from bench.gpu_setup import Result, Setup
from bench.padding.sizes import PRESETS
from overlap_spec.errors import ConfigError

RESULTS = ROOT / "bench" / "results"
STATE = ROOT / "build" / "gpu"
LIKE = "llama-3.1-8b"
# Kept back for the plot and the record.
CLOSING_S = 10.0


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        work: Its function, ``module:name``; None: the checkpoint, for which is waited.
        needs_s: With less time left it is not begun.
        most_s: It is ended after this time.
        device: Whether it means nothing without a CUDA device.
        weights: Whether it needs the checkpoint.
    """

    name: str
    work: str | None
    needs_s: float
    most_s: float
    device: bool = False
    weights: bool = False


CHECKPOINT = Part("checkpoint", None, 0, 540)
# What says most of the design comes first.
PARTS = (
    Part("first tests", "bench.gpu_device:first_tests", 45, 150, device=True),
    Part("attention", "bench.gpu_device:attention_kernels", 20, 150, device=True),
    CHECKPOINT,
    Part("verify", "bench.gpu_decode:verify", 25, 150, weights=True),
    Part("roofline", "bench.gpu_roofline:roofline", 40, 180, weights=True),
    Part("host", "bench.gpu_decode:host", 15, 60, weights=True),
    Part("constrained", "bench.gpu_decode:constrained", 40, 150, weights=True),
    Part("overlap", "bench.gpu_compare:modes", 50, 180, weights=True),
    Part("eagle3", "bench.gpu_compare:eagle3", 40, 150, weights=True),
    Part("transformers", "bench.gpu_compare:transformers", 90, 360, weights=True),
    Part("servers", "bench.gpu_servers:servers", 150, 480, device=True, weights=True),
    Part("kernels", "bench.gpu_device:kernels", 20, 240, device=True),
    Part("tests", "bench.gpu_device:tests", 45, 540, device=True),
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


def in_order(parts: Sequence[Part], report: Report, only: Sequence[str]) -> list[Part]:
    """The parts of a call: those ``only``, or what is not done, failed ones after the others.

    The checkpoint is among them where any of them needs it.
    """
    if only:
        wanted = [part for part in parts if part.name in only]
    else:
        left = [part for part in parts if part.work and report.status(part.name) != "ok"]
        failed = [part for part in left if report.status(part.name) == "failed"]
        wanted = [part for part in left if part not in failed] + failed
    first = next((i for i, part in enumerate(wanted) if part.weights), None)
    if first is not None and CHECKPOINT not in wanted:
        wanted.insert(first, CHECKPOINT)
    return wanted


def run_parts(
    parts: Sequence[Part], report: Report, child: Child, clock: Clock, build: Build | None
) -> None:
    """Each part in turn, where there is a device for it, what it needs, and time."""
    tell: Callable[[], object] = build.tell if build is not None else lambda: None
    there = True
    for part in parts:
        name, left_s = part.name, clock.left_s
        if part.device and report.record["rehearsal"]:
            report.skip(name, "no device")
        elif part.weights and not there:
            report.skip(name, "no checkpoint")
        elif left_s < part.needs_s:
            report.skip(name, "time")
        elif part.work is None:
            assert build is not None
            there = report.attempt(name, partial(_wait, build, left_s))
        else:
            # A rehearsal measures nothing, and may be on a machine that does much else.
            most_s = left_s if report.record["rehearsal"] else min(part.most_s, left_s)
            asked = part.work, most_s, report.before(name)
            if not report.attempt(name, partial(_call, child, asked, tell)):
                # What made it fail may be in the process still.
                child.close()


def _wait(build: Build, most_s: float, _: Keep) -> Result:
    return build.wait(most_s)


def _call(
    child: Child, asked: tuple[str, float, dict[str, Any]], tell: Callable[[], object], keep: Keep
) -> Result:
    return child.call(*asked, keep, tell)


def run_all(
    report: Report,
    setup: Setup,
    clock: Clock,
    only: Sequence[str] = (),
    parts: Sequence[Part] = PARTS,
) -> None:
    """All parts, or those ``only``, around one checkpoint."""
    wanted = in_order(parts, report, only)
    with ExitStack() as stack:
        child = Child(setup)
        stack.callback(child.close)
        build = None
        if CHECKPOINT in wanted:
            build = Build(setup)
            stack.callback(build.close)
        run_parts(wanted, report, child, clock, build)
    named = [part.name for part in parts]
    report.record["parts"] = {
        name: report.record["parts"][name] for name in named if report.status(name) is not None
    }
    # A part that was skipped, or under way when a call was ended, has not had its turn.
    turns = ("ok", "failed", "skipped: no device")
    report.record["complete"] = all(report.status(name) in turns for name in named)


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("gpu", "Everything that needs a GPU, in calls of at most ten minutes.")
    parser.add_argument("--continue", action="store_true", dest="go_on",
                        help="go on with the run in --state")  # fmt: skip
    parser.add_argument("--state", type=Path, help="folder of what calls share (build/gpu)")
    parser.add_argument("--like", choices=sorted(PRESETS), default=LIKE, help="cost to pad to")
    parser.add_argument("--data", type=Path, help="schemas, as rows of JSONSchemaBench")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds of this call (540)")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=(), metavar="PART",
                        help=f"these parts alone: {', '.join(names)}")  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    options = parser.parse_args(arguments)
    if options.rehearse and options.json is not None and RESULTS in options.json.resolve().parents:
        parser.error("--json must not be in bench/results: a rehearsal measures nothing")
    if options.budget_s <= 0:
        parser.error("--budget-s must be over 0")
    if options.rehearse and options.go_on and options.state is None:
        parser.error("--continue of a rehearsal needs the --state of the one before")
    return options


def settled(options: argparse.Namespace) -> list[str]:
    """Arguments in which the calls of one run may not differ."""
    found = ["--like", options.like, "--seed", str(options.seed)]
    found += [f"--{name}" for name in ("quick", "rehearse") if getattr(options, name)]
    return [*found, "--data", str(options.data.resolve())] if options.data is not None else found


def end_on_request() -> None:
    """Let a polite end close what was started, as an error would."""

    def end(*_: Any) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, end)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    clock = Clock(options.budget_s)
    if not (options.rehearse or torch.cuda.is_available()):
        print("error: bench.gpu needs a CUDA device; --rehearse runs on the CPU", file=sys.stderr)
        sys.exit(2)
    path: Path | None = options.json
    if path is None and not options.rehearse:
        path = default_path(machine()["device"], datetime.now(UTC).isoformat())
    with ExitStack() as stack:
        folder: Path | None = options.state
        if folder is None and options.rehearse:
            made = tempfile.TemporaryDirectory(prefix="overlap-spec-gpu-")
            folder = Path(stack.enter_context(made))
        state = State((folder or STATE).resolve())
        run = state.open(options, settled(options))
        report = Report(
            run, rehearsal=options.rehearse, like=options.like, budget_s=options.budget_s, plot=None
        )
        if options.go_on:
            report.take_up(state.read())
        data = options.data.resolve() if options.data is not None else None
        setup = Setup(
            options.rehearse, options.quick, options.seed, options.like, state.checkpoint, data
        )
        record = report.record
        run_all(report, setup, clock, options.only)
        if path is not None:
            record["plot"] = draw(record | run.head, path.with_suffix(".svg"))
        run.console.print(table(record["figures"]))
        seconds = round(clock.gone_s, 1)
        run.finish(setup.size.repetitions, ended=False, **rounded(record), seconds=seconds)
        if path is not None:
            state.publish(path)
    wrong = list(faults(record))
    if wrong:
        fail("\n".join(wrong))


def draw(record: dict[str, Any], path: Path) -> str | None:
    """Plot the figures; the file's name, or None where there is nothing to plot, or nothing that
    plots."""
    try:
        plots.write_svg(plots.targets(record), path)
    except ConfigError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return None
    return path.name


if __name__ == "__main__":
    end_on_request()
    main()
