"""Compiling grammars beside a running engine: whether its requests notice.

``python -m bench.compile [--rounds N] [--data FILE] [--quick] [--json PATH] [--seed S]`` streams 16
requests for JSON again and again, each time beside something else:

- ``nothing``;
- ``normal``: 100 schemas that were never seen before are handed to the compiler at once;
- ``hostile``: one grammar that hangs, one that eats 10 GiB and one that crashes its process.

The three take turns in one process, and ``tpot_ratio`` pairs each with the ``nothing`` of its own
round. What still compiles when the requests have ended is waited for (hostile) or cancelled
(normal). It fails (exit status 1) where outputs differ or a hostile grammar gets another error
than its own.

Fields of the last line, beside those of every record (``bench.common``): ``tpot_ms`` and
``tpot_ratio`` by load, ``errors`` (by hostile grammar: the kinds of its errors, and seconds
to them), ``compiled`` and ``refused`` (of the normal schemas), ``cancelled``, ``compile_ms``,
``first`` (``isolated_ms``, ``in_process_ms``: a small regex in a warm worker and in this process),
``cold_ms`` (the first grammar of all, which starts the workers) and ``equal``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import faulty_backend
from bench.common import Run, fail, flags, paired, rounded, spread
from bench.measure import measure
from bench.workloads import OWN_SCHEMAS, Ask, Sample, json_asks, read_samples
from overlap_spec.engine import Engine
from overlap_spec.errors import OverlapSpecError
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.grammar.spec import Grammar

LOADS = ("nothing", "normal", "hostile")
# Where memory is slow to come by, the eater's time may be up first.
EXPECTED = {"hang": {"timeout"}, "eat": {"out_of_memory", "timeout"}, "crash": {"crash"}}
REQUESTS = 16
STORM = 100
WAIT_S = 60.0


class Storm:
    """A round's grammars at the compiler; all are new to it."""

    def __init__(self, engine: Engine, grammars: dict[str, Grammar]) -> None:
        self.start = time.perf_counter()
        self.ended: dict[str, float] = {}
        self.futures = {name: engine.compiler.submit(one) for name, one in grammars.items()}
        for name, future in self.futures.items():
            future.add_done_callback(partial(self._note, name))

    def _note(self, name: str, _: Future[CompiledGrammar]) -> None:
        self.ended[name] = time.perf_counter() - self.start

    def errors(self) -> dict[str, dict[str, Any]]:
        """Wait for all; kind of error and seconds to it, by name."""
        wait(self.futures.values(), WAIT_S)
        return {
            name: {"kind": _kind(future.exception(0)), "seconds": self.ended[name]}
            for name, future in self.futures.items()
        }

    def cancel(self) -> dict[str, int]:
        """Cancel what still waits or compiles; counts of what became of all."""
        cancelled = sum(future.cancel() for future in self.futures.values() if not future.done())
        done = [future for future in self.futures.values() if not future.cancelled()]
        # A few can no longer be cancelled: they are just being handed over.
        wait(done, WAIT_S)
        failed = sum(future.exception(0) is not None for future in done)
        return {"compiled": len(done) - failed, "refused": failed, "cancelled": cancelled}


def _kind(error: BaseException | None) -> str:
    return error.kind if isinstance(error, CompileFailure) else repr(error)


def storm_of(load: str, samples: Sequence[Sample], number: int, seed: int) -> dict[str, Grammar]:
    """Grammars of a load in round `number`."""
    if load == "hostile":
        return {name: getattr(faulty_backend, name)(number) for name in EXPECTED}
    if load == "normal":
        chosen = Random(f"{seed} {number}").choices(samples, k=STORM)
        return {
            f"{i} {sample.id}": Grammar.json_schema({**sample.schema, "$comment": f"{number} {i}"})
            for i, sample in enumerate(chosen)
        }
    return {}


def run_rounds(
    engine: Engine, asks: Sequence[Ask], samples: Sequence[Sample], run: Run, rounds: int
) -> list[str]:
    """All rounds; what was wrong, in words."""
    wrong, said = [], set()
    with run.progress() as progress:
        task = progress.add_task("groups", total=rounds * len(LOADS))
        for number in range(rounds):
            turn = number % len(LOADS)
            for load in LOADS[turn:] + LOADS[:turn]:
                grammars = storm_of(load, samples, number, run.options.seed)
                storm = Storm(engine, grammars)
                result = measure(engine, asks)
                errors = storm.errors() if load == "hostile" else {}
                said.add(result.sha256)
                run.sample(load=load, round=number, **result.raw(), errors=errors, **storm.cancel())
                for name, end in errors.items():
                    if end["kind"] not in EXPECTED[name]:
                        wrong.append(f"round {number}: {name} ended with {end['kind']}")
                progress.advance(task)
    if len(said) > 1:
        wrong.append("outputs are not the same under all loads")
    return wrong


def first_grammars(engine: Engine, count: int) -> dict[str, Any]:
    """Small regular expressions that were never seen, in a worker and in this process, in turn."""
    isolated, here = [], []
    for number in range(count):
        grammars = [Grammar.regex(f"{place}{number}-[0-9]{{4}}") for place in ("worker", "here")]
        begin = time.perf_counter()
        engine.compiler.compile(grammars[0])
        middle = time.perf_counter()
        engine.compiler.backend.compile(grammars[1])
        isolated.append((middle - begin) * 1e3)
        here.append((time.perf_counter() - middle) * 1e3)
    return {"isolated_ms": spread(isolated), "in_process_ms": spread(here)}


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's figures, made of the samples."""
    by_load = {
        load: sorted((s for s in samples if s["load"] == load), key=lambda s: int(s["round"]))
        for load in LOADS
    }
    tpot = {load: [s["tpot_ms"] for s in rows] for load, rows in by_load.items()}
    errors = {
        name: {
            "kinds": Counter(s["errors"][name]["kind"] for s in by_load["hostile"]),
            "seconds": spread(s["errors"][name]["seconds"] for s in by_load["hostile"]),
        }
        for name in EXPECTED
    }
    normal = by_load["normal"]
    return {
        "tpot_ms": {load: spread(values) for load, values in tpot.items()},
        "tpot_ratio": {load: paired(tpot[load], tpot["nothing"]) for load in LOADS[1:]},
        "errors": errors,
        **{n: sum(s[n] for s in normal) for n in ("compiled", "refused", "cancelled")},
    }


def print_table(record: dict[str, Any], console: Console) -> None:
    """What a reader sees: time per token beside each load."""
    title = f"Time per output token of {REQUESTS} requests, beside"
    table = Table(title=title, title_justify="left")
    for name in ("load", "TPOT ms", "ratio (median, least, most)"):
        table.add_column(name, justify="left" if name == "load" else "right")
    for load in LOADS:
        ratio = record["tpot_ratio"].get(load)
        shown = f"{ratio['median']:.3f} ({ratio['min']:.3f} – {ratio['max']:.3f})" if ratio else ""
        table.add_row(load, f"{record['tpot_ms'][load]['median']:.2f}", shown)
    console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("compile", "Compiling grammars beside a running engine.")
    parser.add_argument("--rounds", type=int, help="rounds of all loads; 12, or 2 with --quick")
    parser.add_argument("--data", type=Path, help="schemas, as bench.workloads reads them")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an output")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 2 if options.quick else 12
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("compile", options, arguments)
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"context_length": 1024, "mask_deadline_ms": None}
    try:
        samples = read_samples(options.data)
        with Engine(
            grammar_backend="bench.faulty_backend:FaultyBackend",
            max_running_requests=REQUESTS,
            prefix_cache=False,
            **settings,
        ) as engine:
            begin = time.perf_counter()
            engine.compiler.compile(Grammar.choice(["yes", "no"]))
            cold_ms = (time.perf_counter() - begin) * 1e3
            asks = json_asks(read_samples(OWN_SCHEMAS), REQUESTS, options.tokens)
            measure(engine, asks)
            first = first_grammars(engine, 10 if options.quick else 50)
            wrong = run_rounds(engine, asks, samples, run, options.rounds)
            state = engine.compiler.snapshot()
            engine.compiler.close()
    except OverlapSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    record = rounded(
        {
            **summary(run.samples),
            "compile_ms": state["compile_ms"],
            "first": first,
            "cold_ms": cold_ms,
        }
    )
    print_table(record, Console(width=100))
    run.finish(options.rounds, **record, equal=not wrong)
    if wrong:
        fail("\n".join(wrong[:10]))


if __name__ == "__main__":
    main()
