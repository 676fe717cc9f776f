"""How a step's cost grows: with requests at once, context, output, schema, and distinct grammars.

``python -m bench.scaling [--only SWEEP …] [--model DIR --draft DIR | --model NAME] [--threads N]
[--quick] [--json PATH] [--seed S]`` changes one size at a time and leaves the others as they are:

- ``batch``: 1 to 64 requests at once.
- ``context``: 4 requests after 256 to 4,096 tokens.
- ``output``: one request, from its 100th to its 3,500th output token.
- ``schema``: 4 requests under one schema of 10 to 10,000 properties, every other one required.
- ``grammars``: 16 requests at once out of a queue in which 1 to 500 schemas are different.

Requests are greedy, under a grammar, with a chain of static length, no deadline for masks and no
prefix cache; one that ends is asked again. Where the sizes have to hold still, the grammar is a
list of texts that goes on for ever. A point is measured by single steps, after some that are not
counted, and points take turns in each repetition.

A step's figures, in ms: ``step_ms`` is its wall time; ``host_ms`` the CPU time of the thread that
runs the steps, waits excluded; ``lane_ms`` the wall time of the grammar's work; ``exposed_ms`` and
``idle_ms`` are how long compute stood idle for the masks, and for whatever reason. They are medians
over the steps of a point and then over repetitions; the last two are means over the steps.
``rss_mib`` is resident memory after a point of the first repetition, sizes ascending.
``compile_ms`` is the time of a new grammar.

Fields of the last line, beside those of every record (``bench.common``):
    sweeps: Sweep → ``unit``; ``points`` (``x`` and the figures above); ``fits`` (figure →
        ``exponent`` e of x^e by least squares over the logarithms, ``tail``: that between the last
        two points alone, ``slope``: by least squares, a unit of x); ``skipped`` (x → why).
    host_us_per_row: Slope of the host's time over the batch.
    lane_growth: The lane's time at the longest output over that at the shortest.
    faster: What grows faster than its work, in words: see :data:`WORK`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from bench.common import Run, flags, mean, median, rounded
from bench.served import rss_mib
from bench.targets import add_model_flags, check_model_flags, model_settings
from bench.workloads import CITIES, EVENTS, NAMES, QUESTIONS
from overlap_spec.engine import Engine
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.errors import GrammarError, OverlapSpecError, RequestFailed
from overlap_spec.grammar.spec import Grammar

SETTINGS: dict[str, Any] = {
    "adaptive": "static",
    "mask_deadline_ms": None,
    "prefix_cache": False,
    "chunked_prefill_size": 8192,
    # A schema of 10,000 properties is compiled for long; how long is what is asked.
    "grammar_compile_timeout_s": 300.0,
}
TIMES = ("step_ms", "host_ms", "lane_ms", "exposed_ms", "idle_ms")
MEANS = ("exposed_ms", "idle_ms")
FIGURES = (*TIMES, "rss_mib", "compile_ms")
# Sweep → figure → the exponent of its work. Memory may grow with anything, compute with context.
WORK: dict[str, dict[str, float]] = {
    "batch": {"step_ms": 1, "host_ms": 1, "lane_ms": 1, "rss_mib": 1},
    "context": {"step_ms": 1, "host_ms": 0, "lane_ms": 0, "rss_mib": 1},
    "output": {"step_ms": 1, "host_ms": 0, "lane_ms": 0, "rss_mib": 1},
    "schema": {"step_ms": 1, "host_ms": 0, "lane_ms": 1, "rss_mib": 1, "compile_ms": 1},
    "grammars": {"step_ms": 0, "host_ms": 0, "lane_ms": 0, "rss_mib": 1, "compile_ms": 0},
}
# What noise may add to an exponent, of all points and of the last two.
SLACK, TAIL_SLACK = 0.15, 0.4
# Less than this a step is not worth naming.
LEAST_MS = 0.2
ENDLESS = Grammar.regex(r'("[a-z]{1,8}",)+')
# Tokens that a chain of 5 emits in a step, at most.
PER_STEP = 6
UNCOUNTED = 4


@dataclass(frozen=True)
class Size:
    """How much is run: steps of a point, repetitions, and the sizes of each sweep."""

    steps: int
    repetitions: int
    sizes: dict[str, tuple[int, ...]]


FULL = Size(
    40,
    3,
    {
        "batch": (1, 2, 4, 8, 16, 32, 64),
        "context": (256, 512, 1024, 2048, 4096),
        "output": (100, 250, 500, 1000, 2000, 3500),
        "schema": (10, 100, 1000, 10_000),
        "grammars": (1, 4, 16, 64, 250, 500),
    },
)
QUICK = Size(
    8,
    1,
    {
        "batch": (1, 4, 16),
        "context": (256, 1024),
        "output": (60, 120, 240),
        "schema": (10, 100),
        "grammars": (1, 16),
    },
)
UNITS = {
    "batch": "requests at once",
    "context": "tokens of context",
    "output": "tokens of output",
    "schema": "properties of the schema",
    "grammars": "distinct grammars",
}


@dataclass(frozen=True)
class Ask:
    """A request that is kept on its way: prompt tokens, grammar, and how long it may go on."""

    prompt: list[int]
    grammar: Grammar
    max_tokens: int
    endless: bool = False

    def submit(self, engine: Engine) -> RequestHandle:
        """Queue it."""
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "complete": False,
        }
        if self.endless:
            # Its grammar could end behind every text of the list.
            sampling["min_tokens"] = self.max_tokens
        return engine.submit(self.prompt, self.grammar, sampling)


def timed_step(engine: Engine) -> dict[str, float]:
    """One step's figures; the grammar's are those of the step before, which it accounts."""
    before, cpu_ns = copy(engine.figures), time.thread_time_ns()
    start_ns = time.perf_counter_ns()
    engine.step()
    end_ns, cpu_end_ns = time.perf_counter_ns(), time.thread_time_ns()
    after = engine.figures
    return {
        "step_ms": (end_ns - start_ns) / 1e6,
        "host_ms": (cpu_end_ns - cpu_ns) / 1e6,
        "lane_ms": after.grammar_ms - before.grammar_ms,
        "exposed_ms": after.exposed_ms - before.exposed_ms,
        "idle_ms": after.idle_ms - before.idle_ms,
    }


def of_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Figures of a point, made of those of its steps."""
    return {n: (mean if n in MEANS else median)(step[n] for step in steps) for n in TIMES}


def keep_busy(engine: Engine, asks: Sequence[Ask], steps: int) -> dict[str, float]:
    """Figures of ``steps`` steps while all asks are on their way.

    Raises:
        RequestFailed: one ended with an error.
    """
    handles = [ask.submit(engine) for ask in asks]
    try:
        rows = min(len(asks), engine.config.max_running_requests)
        while sum(bool(handle.deltas) for handle in handles) < rows:
            engine.step()
            _ask_again(engine, asks, handles)
        taken = []
        for number in range(UNCOUNTED + steps):
            figures = timed_step(engine)
            _ask_again(engine, asks, handles)
            if number >= UNCOUNTED:
                taken.append(figures)
    finally:
        engine.release(handles)
        while engine.step():
            pass
    return of_steps(taken)


def _ask_again(engine: Engine, asks: Sequence[Ask], handles: list[RequestHandle]) -> None:
    for index, handle in enumerate(handles):
        if handle.output is not None:
            if handle.output.error is not None:
                raise RequestFailed(f"request {index} ended with an error: {handle.output.error}")
            engine.release([handle])
            handles[index] = asks[index].submit(engine)


def outputs(engine: Engine, marks: Sequence[int], steps: int) -> Iterator[tuple[int, Any]]:
    """One long request: each mark with the figures of the last steps before it."""
    handle = Ask(prompt(engine, 64), ENDLESS, marks[-1] + PER_STEP, endless=True).submit(engine)
    newest: deque[dict[str, float]] = deque(maxlen=steps)
    tokens, waiting = 0, deque(marks)
    try:
        while waiting and handle.output is None:
            newest.append(timed_step(engine))
            while handle.deltas:
                tokens += len(handle.deltas.popleft().token_ids)
            while waiting and tokens >= waiting[0]:
                yield waiting.popleft(), of_steps(newest)
    finally:
        engine.release([handle])
        while engine.step():
            pass


def prompt(engine: Engine, tokens: int, number: int = 0) -> list[int]:
    """So many tokens of text, another for each number."""
    said = [*QUESTIONS[number % len(QUESTIONS) :], *QUESTIONS]
    text = f"{NAMES[number % len(NAMES)]} {number} " + " ".join(said)
    ids = engine.tokenizer.encode(text)
    return (ids * -(-tokens // len(ids)))[:tokens]


def schema(properties: int, number: int = 0) -> Grammar:
    """An object of so many properties, every other one required; ``number`` tells it from others
    of the same size."""
    kinds = ({"type": "string"}, {"type": "integer"}, {"enum": list(CITIES)})
    names = [f"{EVENTS[n % len(EVENTS)]}_{number}_{n}" for n in range(properties)]
    return Grammar.json_schema(
        {
            "type": "object",
            "properties": {name: kinds[n % 3] for n, name in enumerate(names)},
            "required": names[::2],
            "additionalProperties": False,
        }
    )


def asks_of(engine: Engine, sweep: str, x: int, size: Size) -> list[Ask]:
    """The requests of a point."""
    endless = (UNCOUNTED + size.steps + 4) * PER_STEP
    if sweep == "batch":
        return [Ask(prompt(engine, 48, n), ENDLESS, 2 * endless, True) for n in range(x)]
    if sweep == "context":
        tokens = min(x, engine.context_length) - endless
        return [Ask(prompt(engine, max(tokens, 1), n), ENDLESS, endless, True) for n in range(4)]
    if sweep == "schema":
        return [Ask(prompt(engine, 48, n), schema(x), endless) for n in range(4)]
    rows = engine.config.max_running_requests
    return [Ask(prompt(engine, 48, n), schema(6, n % x), endless) for n in range(max(rows, x))]


def engine_settings(sweep: str, size: Size) -> dict[str, Any]:
    """What an engine for the sweep holds."""
    largest = size.sizes[sweep][-1]
    rows = {"batch": largest, "output": 1, "grammars": 16}.get(sweep, 4)
    long = {"context": largest, "output": largest + 128}.get(sweep, 1024)
    return SETTINGS | {"max_running_requests": rows, "context_length": long}


def compile_all(engine: Engine, asks: Sequence[Ask]) -> float:
    """Mean time of a new grammar, in ms; those that several asks share are compiled once."""
    grammars = {id(ask.grammar): ask.grammar for ask in asks}
    distinct = {repr(grammar): grammar for grammar in grammars.values()}
    start = time.perf_counter()
    for grammar in distinct.values():
        engine.compile(grammar)
    return (time.perf_counter() - start) * 1e3 / len(distinct)


def run_sweep(engine: Engine, sweep: str, size: Size, run: Run, step: Callable[[], None]) -> None:
    """Every point of one sweep, the sizes in turn, in each repetition."""
    refused: set[int] = set()
    for repetition in range(size.repetitions):
        if sweep == "output":
            for x, figures in outputs(engine, size.sizes[sweep], size.steps):
                _keep(run, sweep, x, repetition, figures)
                step()
            continue
        for x in size.sizes[sweep]:
            step()
            if x in refused:
                continue
            more = {}
            try:
                asks = asks_of(engine, sweep, x, size)
                compile_ms = compile_all(engine, asks)
                # Later ones come from the cache.
                if repetition == 0 and sweep in ("schema", "grammars"):
                    more["compile_ms"] = compile_ms
            except GrammarError as error:
                refused.add(x)
                run.sample(sweep=sweep, x=x, repetition=repetition, skipped=str(error)[:300])
                continue
            figures = keep_busy(engine, asks, size.steps)
            _keep(run, sweep, x, repetition, figures | more)


def _keep(run: Run, sweep: str, x: int, repetition: int, figures: dict[str, float]) -> None:
    if repetition == 0:
        figures = figures | {"rss_mib": rss_mib(os.getpid())}
    run.sample(sweep=sweep, x=x, repetition=repetition, **figures)


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples alone."""
    sweeps: dict[str, Any] = {}
    for name in dict.fromkeys(sample["sweep"] for sample in samples):
        own = [sample for sample in samples if sample["sweep"] == name]
        skipped = {str(s["x"]): s["skipped"] for s in own if "skipped" in s}
        points = []
        for x in dict.fromkeys(s["x"] for s in own if "skipped" not in s):
            at = [s for s in own if s["x"] == x and "skipped" not in s]
            figures = {f: median(s[f] for s in at if f in s) for f in FIGURES if f in at[0]}
            points.append({"x": x} | figures)
        fits = {figure: fit(points, figure) for figure in FIGURES if figure in points[0]}
        sweeps[name] = {"unit": UNITS[name], "points": points, "fits": fits, "skipped": skipped}
    found: dict[str, Any] = {"sweeps": sweeps, "host_us_per_row": None, "lane_growth": None}
    if "batch" in sweeps and (per_row := sweeps["batch"]["fits"]["host_ms"]):
        found["host_us_per_row"] = per_row["slope"] * 1e3
    if "output" in sweeps:
        first, *_, last = [point["lane_ms"] for point in sweeps["output"]["points"]]
        found["lane_growth"] = last / first if first else None
    return found | {"faster": list(faster(sweeps))}


def fit(points: Sequence[dict[str, float]], figure: str) -> dict[str, float] | None:
    """Exponents and slope of a figure over x; None where fewer than two points are over 0."""
    there = [(p["x"], p[figure]) for p in points if p[figure] > 0]
    if len(there) < 2:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in there]
    return {
        "exponent": slope(logs),
        "tail": slope(logs[-2:]),
        "slope": slope(there),
    }


def slope(pairs: Sequence[tuple[float, float]]) -> float:
    """Least squares' slope of y over x."""
    x0, y0 = mean(x for x, _ in pairs), mean(y for _, y in pairs)
    return sum((x - x0) * (y - y0) for x, y in pairs) / sum((x - x0) ** 2 for x, _ in pairs)


def faster(sweeps: dict[str, Any]) -> Iterator[str]:
    """Figures that grow faster than their work, in words."""
    for name, sweep in sweeps.items():
        for figure, work in WORK[name].items():
            found, last = sweep["fits"].get(figure), sweep["points"][-1].get(figure)
            if found is None or (figure in TIMES and last < LEAST_MS):
                continue
            if found["exponent"] > work + SLACK or found["tail"] > work + TAIL_SLACK:
                yield (
                    f"{name}: {figure} as x^{found['exponent']:.2f}, at the end "
                    f"x^{found['tail']:.2f}; its work as x^{work:g}"
                )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("scaling", "How a step's cost grows with each size.")
    add_model_flags(parser)
    parser.add_argument("--only", nargs="+", choices=list(UNITS), help="these sweeps alone")
    parser.add_argument("--threads", type=int, default=1, help="of a pass (default 1)")
    options = parser.parse_args(arguments)
    check_model_flags(parser, options)
    if options.threads < 1:
        parser.error("--threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    size = QUICK if options.quick else FULL
    run = Run("scaling", options, arguments)
    torch.set_num_threads(options.threads)
    sweeps = [name for name in UNITS if name in (options.only or UNITS)]
    try:
        weights = model_settings(options, run.console)
        with run.progress() as progress:
            total = sum(len(size.sizes[name]) for name in sweeps) * size.repetitions
            bar = progress.add_task("scaling", total=total)
            for name in sweeps:
                progress.update(bar, description=f"by {UNITS[name]}")
                with Engine(**weights, **engine_settings(name, size)) as engine:
                    # What compiles is started by the first grammar.
                    engine.compile(ENDLESS)
                    run_sweep(engine, name, size, run, lambda: progress.advance(bar))
    except OverlapSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    record = rounded(summary(run.samples))
    run.finish(size.repetitions, **record, threads=options.threads)


if __name__ == "__main__":
    main()
