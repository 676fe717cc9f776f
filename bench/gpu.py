"""What a CUDA device is asked first: how near its limits a step comes, and what grammars cost it.

``python -m bench.gpu [--only PART …] [--model NAME | --model DIR --draft DIR] [--work DIR] [--data
FILE] [--quick] [--json PATH] [--seed S] [--rehearse]`` runs, on one device of 80 GB, the parts

- ``roofline``: verifies by themselves (``bench.gpu_roofline``);
- ``host``: a step's time outside waits, under JSON schemas of ``--data``;
- ``constrained``: TPOT with a grammar over TPOT without. Requests are extraction cases of which the
  model says the same, token by token, with its grammar and without (which ones is found first), so
  that both sides accept the same lengths; a pair of runs where they do not is left out and counted.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.common import ROOT, Run, command, fail, flags, machine, mean, median, spread
from bench.gpu_roofline import Result, Setup, figure, roofline
from bench.measure import GREEDY, Measured, measure
from bench.overlap import SETTINGS, accepts
from bench.targets import add_model_flags, model_settings, padded_target, work_folder
from bench.workloads import Ask, choose_samples, json_asks, read_samples
from examples.embedded_model.data import held_out_cases
from overlap_spec.engine import Engine
from overlap_spec.grammar.matching.pool import MatcherPool
from overlap_spec.grammar.spec import Grammar
from overlap_spec.worker.streams import Event

RESULTS = ROOT / "bench" / "results"
LIKE = "llama-3.1-8b"
REHEARSAL_VOCABULARY = 4096
# Requests tried for each one that is wanted: not all outputs are the same.
CANDIDATES = 6


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        batches: Batch sizes of the comparison with and without a grammar.
        repetitions: Of every comparison.
        cases: Extraction cases that are drawn.
        schemas: Schemas that are drawn.
        tokens: Most tokens of an output.
    """

    batches: tuple[int, ...]
    repetitions: int
    cases: int
    schemas: int
    tokens: int


FULL = Size((1, 4, 16, 32), 7, 64, 32, 96)
QUICK = Size((1, 4, 16, 32), 3, 48, 16, 64)
REHEARSAL = Size((1, 2), 1, 4, 1, 16)


def size_of(setup: Setup) -> Size:
    """How much the command line asks for."""
    return REHEARSAL if setup.rehearse else QUICK if setup.options.quick else FULL


def chain_engine(setup: Setup) -> Engine:
    """An engine at a chain of static length."""
    weights = {"model": str(setup.target), "draft": str(setup.draft)}
    return Engine(**weights, **SETTINGS | {"device": setup.device, "grammar_backend": "auto"})


@contextmanager
def waits_timed() -> Iterator[Callable[[], int]]:
    """Nanoseconds that this thread has waited so far: for events of streams, and for the lane."""
    total = 0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any) -> Any:
            nonlocal total
            start = time.perf_counter_ns()
            try:
                return call(*args)
            finally:
                total += time.perf_counter_ns() - start

        return waiting

    with ExitStack() as stack:
        for kind in Event.__subclasses__():
            stack.enter_context(patch.object(kind, "synchronize", timed(kind.synchronize)))
        stack.enter_context(patch.object(MatcherPool, "run", timed(MatcherPool.run)))
        yield lambda: total


def full_steps(
    engine: Engine, asks: Sequence[Ask], waited_ns: Callable[[], int]
) -> list[dict[str, float]]:
    """Of each step through which all requests decode: its time, that time without waits, and the
    stepping thread's own time on a processor, in ms."""
    tickets = [
        engine.submit(a.prompt, a.grammar, {**GREEDY, "max_tokens": a.max_tokens}) for a in asks
    ]
    found = []
    try:
        while any(ticket.output is None for ticket in tickets):
            begun = all(ticket.deltas for ticket in tickets)
            start, waits, cpu = time.perf_counter_ns(), waited_ns(), time.thread_time_ns()
            engine.step()
            if begun and all(ticket.output is None for ticket in tickets):
                wall = time.perf_counter_ns() - start
                taken = wall, wall - waited_ns() + waits, time.thread_time_ns() - cpu
                names = ("step_ms", "host_ms", "thread_ms")
                found.append({name: ns / 1e6 for name, ns in zip(names, taken, strict=True)})
    finally:
        engine.release(tickets)
    if not found or any(ticket.output and ticket.output.error for ticket in tickets):
        raise RuntimeError("requests failed, or no step decoded all of them")
    return found


def host(setup: Setup) -> Result:
    """What a step costs the host under the file's schemas: its time but for waits.

    A wait for an event may spin, so that the thread's time on a processor, which is reported too,
    holds waits too.
    """
    size, result, by = size_of(setup), Result(), dict[str, float]()
    with chain_engine(setup) as engine:
        rows = read_samples(setup.options.data)
        seed = setup.options.seed
        samples = choose_samples(rows, size.schemas, seed, lambda grammar: accepts(engine, grammar))
        for batch in (size.batches[0], size.batches[-1]):
            asks = json_asks(samples, batch, size.tokens)
            measure(engine, asks)
            with waits_timed() as waited_ns:
                runs = [full_steps(engine, asks, waited_ns) for _ in range(size.repetitions)]
                if not waited_ns():
                    raise RuntimeError("no wait was seen: the host's time cannot be told from it")
            steps = [step for run in runs for step in run]
            by[f"batch {batch}"] = median(step["host_ms"] for step in steps)
            result.details[f"batch {batch}"] = {
                name: spread(step[name] for step in steps) for name in steps[0]
            }
            result.samples += [{"batch": batch, "steps": run} for run in runs]
    single, *_ = by.values()
    result.figures["host_ms_per_step"] = figure(single, most=0.5, unit="ms", by=by)
    return result


def free(asks: Sequence[Ask]) -> list[Ask]:
    """The same requests without their grammars."""
    return [replace(ask, grammar=None) for ask in asks]


def alike(engine: Engine, seed: int, size: Size) -> list[Ask]:
    """Extraction requests whose output is the same, token by token, with the grammar and without:
    what the grammar wants is what the model says by itself."""
    cases = held_out_cases(seed, CANDIDATES * size.cases)
    asks = [Ask(c.prompt, Grammar.json_schema(c.schema), size.tokens) for c in cases]
    outputs = zip(measure(engine, asks).outputs, measure(engine, free(asks)).outputs, strict=True)
    found = [
        ask
        for ask, (held, loose) in zip(asks, outputs, strict=True)
        if held.token_ids == loose.token_ids and held.stats.output_tokens > 1
    ]
    if not found:
        raise RuntimeError("no case has the same output with and without its grammar")
    return found[: size.cases]


def constrained(setup: Setup) -> Result:
    """TPOT with a grammar over TPOT without, where both sides emit the same tokens: what it costs
    less what it saves, as drafts that keep to it are longer."""
    size, by = size_of(setup), dict[str, float]()
    with chain_engine(setup) as engine:
        same = alike(engine, setup.options.seed, size)
        result = Result(details={"alike": len(same), "cases": size.cases})
        for batch in size.batches:
            name = f"batch {batch}"
            # The first pair warms up.
            pairs = [_pair(engine, same, batch, n) for n in range(size.repetitions + 1)][1:]
            equal = [p for p in pairs if p["equal"]]
            if not equal:
                raise RuntimeError(f"batch {batch}: outputs never were the same on both sides")
            ratios = spread(p["tpot_ms"][0] / p["tpot_ms"][1] for p in equal)
            by[name] = ratios["median"]
            result.details[name] = {
                "ratio_tpot": ratios,
                "unequal_pairs": len(pairs) - len(equal),
                "accept_lengths": [mean(p["accept_length"][i] for p in equal) for i in (0, 1)],
            }
            result.samples += [{"batch": batch, **pair} for pair in pairs]
    worst = max(by.values())
    result.figures["constrained_tpot_ratio"] = figure(worst, most=1.02, unit="×", by=by)
    return result


def _pair(engine: Engine, same: list[Ask], batch: int, number: int) -> dict[str, Any]:
    """TPOT of some of the requests with their grammars and without, by turns first."""
    asks = list(islice(cycle(same), batch * number, batch * (number + 1)))
    sides: dict[bool, Measured] = {}
    for held in (True, False) if number % 2 else (False, True):
        sides[held] = measure(engine, asks if held else free(asks))
    both = sides[True], sides[False]
    return {
        "tpot_ms": [side.tpot_ms for side in both],
        "accept_length": [side.accept_length for side in both],
        "grammar_ms": both[0].grammar_ms,
        "exposed_ms": both[0].exposed_ms,
        "equal": both[0].sha256 == both[1].sha256,
    }


# What says most of the design comes first.
PARTS: dict[str, Callable[[Setup], Result]] = {
    "roofline": roofline,
    "host": host,
    "constrained": constrained,
}


def run_parts(names: Sequence[str], setup: Setup, run: Run, record: dict[str, Any]) -> None:
    """Each part in turn, into ``record``, which is written after each of them."""
    for name in names:
        print(f"{name} …", file=sys.stderr)
        start = time.monotonic()
        try:
            found, error = PARTS[name](setup), None
        except Exception as raised:
            found, error = Result(), f"{type(raised).__name__}: {raised}"
        for sample in found.samples:
            run.sample(part=name, **sample)
        record["figures"] |= found.figures
        row = {"seconds": time.monotonic() - start, "error": error, **found.details}
        record["parts"][name] = row
        print(f"{name}: {row['seconds']:.0f} s {error or ''}", file=sys.stderr)
        run.write(size_of(setup).repetitions, **record)


def default_path(device: str, date: str) -> Path:
    """Where a run's record goes: the device's name and the day."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return RESULTS / f"{slug}-{date[:10]}.json"


def weights_of(options: argparse.Namespace, run: Run) -> tuple[Path, Path]:
    """Folders of the target and of its head."""
    if options.rehearse:
        return padded_target(work_folder(options.work), run.console, REHEARSAL_VOCABULARY)
    options.model = options.model or LIKE
    settings = model_settings(options, run.console)
    return Path(settings["model"]), Path(settings["draft"])


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("gpu", "How near its limits a CUDA device's step comes.")
    add_model_flags(parser, f"that of {LIKE}")
    parser.add_argument("--data", type=Path, help="schemas, as rows of JSONSchemaBench")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    options = parser.parse_args(arguments)
    if options.rehearse and options.json is not None and RESULTS in options.json.resolve().parents:
        parser.error("--json must not be in bench/results: a rehearsal measures nothing")
    if not (options.rehearse or torch.cuda.is_available()):
        parser.error("bench.gpu needs a CUDA device; --rehearse runs on the CPU")
    if options.json is None and not options.rehearse:
        options.json = default_path(machine()["device"], datetime.now(UTC).isoformat())
    run = Run("gpu", options, arguments)
    setup = Setup(options, *weights_of(options, run))
    torch.set_num_threads(1)
    record: dict[str, Any] = {"figures": {}, "parts": {}}
    record |= {"like": Path(options.model or "").name, "rehearsal": options.rehearse}
    run_parts(options.only or list(PARTS), setup, run, record)
    run.finish(size_of(setup).repetitions, **record)
    wrong = [f"{name}: {row['error']}" for name, row in record["parts"].items() if row["error"]]
    if wrong:
        fail("\n".join(wrong))


if __name__ == "__main__":
    main()
