"""What a GPU would wait for: the host's code beside a device that is a table.

``python -m bench.simulated_device [--quick] [--json PATH] [--seed S] [--data FILE] [--work DIR]
[--devices NAME ...] [--batches 1,16] [--repetitions N] [--lanes N]`` plans, fills masks and reads
as on a GPU. No model is computed: a pass takes the time of a table (``bench.device_model``), and
what is said was generated before, by the embedded model under the same grammars. Masks have 131,072
tokens. Nothing here was measured on a GPU: the tables are estimates, and the host's times are this
machine's, as processor time, so that other work does not count. Grammars' work is done in the
host's own thread, while it would wait for the lane, and counts as if ``--lanes`` threads shared its
requests without waiting for the interpreter: with more than one a bound, not a measurement.

Drafts are right as often as ``HIT_RATE``: 3.2 tokens a verify for a chain of 5. Under a grammar
what it forces is drafted first. A window begins when all requests have their first token, and ends
when the first one has its last.

Fields of the last line, beside those of every record (``bench.common``):
    devices: Name → kind of traffic (``json``, ``free``) → batch → mode → medians over the
        repetitions: ``tokens_s``, ``step_ms``, ``accept_length``; ``idle_share`` and
        ``exposed_share``, of the window, in which compute stood idle for any reason, or for the
        grammar; ``grammar_ms`` and ``host_ms`` of a step: the grammars' time, and the host's with
        it and without its waits.
    under_grammar: Device → batch → ``once-sync``'s tokens/s with JSON over those without; and the
        same at one accept length, ``at_equal_length``: what a grammar costs.
    hit_rate: See above.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from bench.common import Run, command, fail, flags, median, positive, sizes
from bench.device_model import DEVICES, Device, Oracle, TablePhases, TableStreams
from bench.measure import GREEDY, measure, since
from bench.overlap import MODES, SETTINGS, accepts
from bench.targets import padded_target, work_folder
from bench.workloads import Ask, choose_samples, free_asks, json_asks, read_samples
from overlap_spec.engine import Engine, build
from overlap_spec.errors import RequestFailed

HIT_RATE = 0.738
MOST_RUNNING = 64
TEXTS, MOST_TOKENS, LEAST_TOKENS = 32, 128, 48
Window = dict[str, float]


@dataclass(frozen=True)
class Simulated:
    """An engine whose device is a table; ``grammar_ns``: what its grammars took of a window."""

    engine: Engine
    streams: TableStreams
    grammar_ns: list[int]
    lanes: int

    def run(self, asks: Sequence[Ask]) -> Window | None:
        """One window; None where the requests' windows have no step in common."""
        engine, clock = self.engine, self.streams.clock
        tickets = [
            engine.submit(ask.prompt, ask.grammar, {**GREEDY, "max_tokens": ask.max_tokens})
            for ask in asks
        ]
        try:
            while not all(ticket.deltas or ticket.output for ticket in tickets):
                engine.step()
            told = engine.core.snapshot()["output_tokens"]
            before, start, waited = copy(engine.figures), clock.now(), clock.waited_ns
            self.grammar_ns[:] = [0]
            while all(ticket.output is None for ticket in tickets):
                engine.step()
            took, grown = clock.now() - start, since(engine, before)
            waited, grammar_ms = clock.waited_ns - waited, self.grammar_ns[0] / 1e6
            tokens = engine.core.snapshot()["output_tokens"] - told
            while any(ticket.output is None for ticket in tickets):
                engine.step()
        finally:
            engine.release(tickets)
        wrong = [t.output.error for t in tickets if t.output is not None and t.output.error]
        if wrong:
            raise RequestFailed(f"a request ended with an error: {wrong[0]}")
        if grown.steps < 2:
            return None
        return {
            "steps": grown.steps, "tokens": tokens, "seconds": took / 1e9,
            "idle_ms": grown.idle_ms,
            # The serial mode's counts other work of the machine, too.
            "exposed_ms": min(grown.exposed_ms, grammar_ms),
            "grammar_ms": grammar_ms,
            "host_ms": (took - waited) / 1e6,
        }  # fmt: skip

    def shared(self, work: Callable[..., None]) -> Callable[..., None]:
        """``work`` on a list of requests, item by item, each on the lane that is free first; its
        time counts as the grammars'."""
        clock = self.streams.clock

        def run(items: Sequence[Any]) -> None:
            first, busy = clock.now(), [0] * self.lanes
            for item in items:
                start = clock.now()
                work([item])
                busy[busy.index(min(busy))] += clock.now() - start
            took = max(busy)
            clock.spend(took - (clock.now() - first))
            self.grammar_ns[0] += took

        return run


@contextmanager
def simulated(
    weights: Mapping[str, str], device: Device, oracle: Oracle, lanes: int = 1, **settings: Any
) -> Iterator[Simulated]:
    """An engine over a table, with so many lanes; nothing of its model is computed."""
    made: list[TableStreams] = []

    def streams(_: Any, record: Any) -> TableStreams:
        made.append(TableStreams(device, record))
        return made[-1]

    fixed = {"graphs": False, "tries": True, "num_steps": 5, "chunked_prefill_size": 8192}
    with patch.object(build, "build_streams", streams):
        engine = Engine(**weights, **{**SETTINGS, **fixed, **settings})
    with engine:
        worker, (own,) = engine.core.worker, made
        phases = own.passes = TablePhases(own, oracle)
        worker.phases = phases  # type: ignore[assignment]
        worker.runner.tables.write = phases.write  # type: ignore[method-assign]
        worker.traits = replace(worker.traits, on_gpu=True, verifies_ahead=True, stops_drafts=False)
        side = Simulated(engine, own, [0], lanes)
        pool = engine.core.grammar.pool
        pool.run = side.shared(pool.run)  # type: ignore[method-assign]
        yield side


def said(asks: Sequence[Ask]) -> dict[tuple[int, ...], list[int]]:
    """What the embedded model answers, by the prompt's tokens, with the token that ends it."""
    backend = SETTINGS["grammar_backend"]
    with Engine(grammar_backend=backend, max_running_requests=16, context_length=1024) as engine:
        end, found = min(engine.tokenizer.eos_ids), {}
        for ask, output in zip(asks, measure(engine, asks).outputs, strict=True):
            ids = list(output.token_ids)
            if output.finish_reason == "stop" and ids[-1:] != [end]:
                ids.append(end)
            found[prompt_ids(engine, ask)] = ids
    return found


def texts_of(asks: Sequence[Ask], engine: Engine, seed: int) -> dict[tuple[int, ...], list[int]]:
    """Any tokens, as many as are asked for, of requests without a grammar."""
    coins, found = Random(seed), {}
    usual = [n for n in range(256, 2000) if n not in engine.tokenizer.eos_ids]
    for ask in asks:
        found[prompt_ids(engine, ask)] = coins.choices(usual, k=MOST_TOKENS + 1)
    return found


def figures(windows: Sequence[Window], batch: int) -> dict[str, float]:
    """Of the windows of one workload in one repetition, together."""
    sums = {name: sum(window[name] for window in windows) for name in windows[0]}
    ms, steps = sums["seconds"] * 1e3, sums["steps"]
    return {
        "tokens_s": sums["tokens"] / sums["seconds"],
        "step_ms": ms / steps,
        "accept_length": sums["tokens"] / steps / batch,
        "idle_share": sums["idle_ms"] / ms,
        "exposed_share": sums["exposed_ms"] / ms,
        "grammar_ms": sums["grammar_ms"] / steps,
        "host_ms": sums["host_ms"] / steps,
    }


def windows_of(side: Simulated, asks: Sequence[Ask], batch: int, most: int) -> list[Window]:
    """Windows of ``batch`` requests each, as many as ``most`` requests make, at least one."""
    groups = max(1, most // batch)
    every = [asks[n % len(asks)] for n in range(groups * batch)]
    found = [side.run(every[n * batch : (n + 1) * batch]) for n in range(groups)]
    kept = [window for window in found if window is not None]
    if not kept:
        fail(f"no window of {batch} requests has two steps")
    return kept


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples alone."""
    grouped: dict[str, Any] = {}
    for sample in samples:
        place = grouped
        for name in ("device", "kind", "batch"):
            place = place.setdefault(str(sample[name]), {})
        place.setdefault(sample["mode"], []).append(sample)
    devices = {
        device: {
            kind: {b: {m: medians(of) for m, of in modes.items()} for b, modes in batches.items()}
            for kind, batches in by_kind.items()
        }
        for device, by_kind in grouped.items()
    }
    under = {
        device: {
            batch: {
                "tokens_s": _ratio(by_mode, kinds["free"][batch], "tokens_s"),
                "at_equal_length": 1 / _ratio(by_mode, kinds["free"][batch], "step_ms"),
            }
            for batch, by_mode in kinds["json"].items()
        }
        for device, kinds in devices.items()
    }
    return {"devices": devices, "under_grammar": under}


def _ratio(over: Mapping[str, Any], under: Mapping[str, Any], name: str) -> float:
    """Of a figure of ``once-sync``."""
    return float(over["once-sync"][name] / under["once-sync"][name])


def medians(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each figure."""
    names = ("tokens_s", "step_ms", "accept_length", "idle_share", "exposed_share", "grammar_ms")
    return {name: median(s[name] for s in samples) for name in (*names, "host_ms")}


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("simulated_device", "The host's code beside a device that is a table.")
    parser.add_argument("--data", type=Path, help="schemas, as rows of JSONSchemaBench")
    parser.add_argument("--work", type=Path, help="folder that keeps the padded model")
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=list(DEVICES))
    parser.add_argument("--batches", type=sizes, default=[1, 4, 16, 64], help="of 64 at most")
    parser.add_argument("--repetitions", type=positive, default=3)
    parser.add_argument("--lanes", type=positive, default=8, help="of the grammars (default 8)")
    options = parser.parse_args(arguments)
    if max(options.batches) > MOST_RUNNING:
        parser.error(f"--batches must be at most {MOST_RUNNING}")
    if options.quick:
        options.repetitions, options.batches = 1, options.batches[:2]
    run = Run("simulated_device", options, arguments)
    target, head = padded_target(work_folder(options.work))
    with ExitStack() as stack:
        measure_all(stack, {"model": str(target), "draft": str(head)}, options, run)
    run.finish(options.repetitions, **summary(run.samples), hit_rate=HIT_RATE)


def measure_all(
    stack: ExitStack, weights: Mapping[str, str], options: argparse.Namespace, run: Run
) -> None:
    """All devices, workloads and modes, in turn; a round of all modes goes first, uncounted."""
    sides: dict[str, Simulated] = {}
    first = DEVICES[options.devices[0]]
    oracle = Oracle({}, HIT_RATE)
    for mode in MODES:
        more = {"overlap": mode, "threads": 1, "lane_threads": 0}
        more |= {"max_running_requests": MOST_RUNNING}
        side = stack.enter_context(simulated(weights, first, oracle, options.lanes, **more))
        side.engine.compiler = next(iter(sides.values()), side).engine.compiler
        sides[mode] = side
    engine = sides["none"].engine
    rows = read_samples(options.data)
    samples = choose_samples(rows, 16, options.seed, lambda grammar: accepts(engine, grammar))
    json, free = json_asks(samples, TEXTS, MOST_TOKENS), free_asks(TEXTS, MOST_TOKENS)
    oracle.tell(said(json))
    oracle.tell(texts_of(free, engine, options.seed), keep=True)
    long = [ask for ask in json if len(oracle.text(prompt_ids(engine, ask))) >= LEAST_TOKENS]
    work = {"json": long, "free": free}
    total = len(options.devices) * len(work) * len(options.batches) * options.repetitions
    with run.progress() as progress:
        task = progress.add_task("warm-up", total=total * len(MODES))
        for side in sides.values():
            side.run(json[:16])
        for repetition in range(options.repetitions):
            turn = repetition % len(MODES)
            modes = (*MODES[turn:], *MODES[:turn])
            for device in options.devices:
                for side in sides.values():
                    side.streams.device = DEVICES[device]
                for kind, asks in work.items():
                    for batch in options.batches:
                        for mode in modes:
                            progress.update(task, description=f"{device}, {kind}, {batch}, {mode}")
                            found = figures(windows_of(sides[mode], asks, batch, 8), batch)
                            told = {"device": device, "kind": kind, "batch": batch, "mode": mode}
                            run.sample(**told, repetition=repetition, **found)
                            progress.advance(task)


def prompt_ids(engine: Engine, ask: Ask) -> tuple[int, ...]:
    """A prompt's tokens, as the engine has them."""
    return tuple(engine.input_processor.prompt_ids(ask.prompt))


if __name__ == "__main__":
    main()
