"""How a step's cost grows: with requests at once, context and output.

``python -m bench.scaling [--only SWEEP …] [--model DIR --draft DIR | --model NAME] [--threads N]
[--quick] [--json PATH] [--seed S]`` changes one size at a time and leaves the others as they are:

- ``batch``: 1 to 64 requests at once.
- ``context``: 4 requests after 256 to 4,096 tokens.
- ``output``: one request, from its 100th to its 3,500th output token.

Requests are greedy, under a grammar, with a chain of static length, no deadline for masks and no
prefix cache; one that ends is asked again. The grammar is a list of texts that goes on for ever. A
point is measured by single steps, after some that are not
counted, and points take turns in each repetition.

A step's figures, in ms: ``step_ms`` is its wall time; ``host_ms`` the CPU time of the thread that
runs the steps, waits excluded; ``lane_ms`` the wall time of the grammar's work; ``exposed_ms`` and
``idle_ms`` are how long compute stood idle for the masks, and for whatever reason. They are medians
over the steps of a point and then over repetitions; the last two are means over the steps.
``rss_mib`` is resident memory after a point of the first repetition, sizes ascending.

Fields of the last line, beside those of every record (``bench.common``):
    sweeps: Sweep → ``unit``; ``points`` (``x`` and the figures above); ``fits`` (figure →
        ``exponent`` e of x^e by least squares over the logarithms, ``tail``: that between the last
        two points alone, ``slope``: by least squares, a unit of x).
    host_us_per_row: Slope of the host's time over the batch.
    lane_growth: The lane's time at the longest output over that at the shortest.
    faster: What grows faster than its work, in words: see :data:`WORK`.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from bench.common import Run, command, flags, mean, median, positive
from bench.measure import since
from bench.served import rss_mib
from bench.targets import add_model_flags, model_settings
from bench.workloads import NAMES, QUESTIONS, Ask
from overlap_spec.engine import Engine
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.errors import RequestFailed
from overlap_spec.grammar.spec import Grammar

SETTINGS: dict[str, Any] = {
    "adaptive": "static",
    "mask_deadline_ms": None,
    "prefix_cache": False,
    "chunked_prefill_size": 8192,
}
TIMES = ("step_ms", "host_ms", "lane_ms", "exposed_ms", "idle_ms")
MEANS = ("exposed_ms", "idle_ms")
FIGURES = (*TIMES, "rss_mib")
# Sweep → figure → the exponent of its work. Memory may grow with anything, compute with context.
WORK: dict[str, dict[str, float]] = {
    "batch": {"step_ms": 1, "host_ms": 1, "lane_ms": 1, "rss_mib": 1},
    "context": {"step_ms": 1, "host_ms": 0, "lane_ms": 0, "rss_mib": 1},
    "output": {"step_ms": 1, "host_ms": 0, "lane_ms": 0, "rss_mib": 1},
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
        "batch": (1, 2, 4, 8, 16, 32, 64), "context": (256, 512, 1024, 2048, 4096),
        "output": (100, 250, 500, 1000, 2000, 3500),
    },
)  # fmt: skip
QUICK = Size(
    8,
    1,
    {
        "batch": (1, 4, 16), "context": (256, 1024), "output": (60, 120, 240),
    },
)  # fmt: skip
UNITS = {
    "batch": "requests at once",
    "context": "tokens of context",
    "output": "tokens of output",
}


def submit(engine: Engine, ask: Ask) -> RequestHandle:
    """Queue a request."""
    # The endless grammar could end behind every text of the list.
    least = ask.max_tokens if ask.grammar is ENDLESS else 0
    sampling: dict[str, Any] = {"temperature": 0.0, "complete": False, "min_tokens": least}
    return engine.submit(ask.prompt, ask.grammar, sampling | {"max_tokens": ask.max_tokens})


def timed_step(engine: Engine) -> dict[str, float]:
    """One step's figures; the grammar's are those of the step before, which it accounts."""
    before, cpu_ns = copy(engine.figures), time.thread_time_ns()
    start_ns = time.perf_counter_ns()
    engine.step()
    end_ns, cpu_end_ns = time.perf_counter_ns(), time.thread_time_ns()
    grown = since(engine, before)
    return {
        "step_ms": (end_ns - start_ns) / 1e6,
        "host_ms": (cpu_end_ns - cpu_ns) / 1e6,
        "lane_ms": grown.grammar_ms,
        "exposed_ms": grown.exposed_ms,
        "idle_ms": grown.idle_ms,
    }


def of_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Figures of a point, made of those of its steps."""
    return {n: (mean if n in MEANS else median)(step[n] for step in steps) for n in TIMES}


def keep_busy(engine: Engine, asks: Sequence[Ask], steps: int) -> dict[str, float]:
    """Figures of ``steps`` steps while all asks are on their way.

    Raises:
        RequestFailed: one ended with an error.
    """
    handles = [submit(engine, ask) for ask in asks]
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
            handles[index] = submit(engine, asks[index])


def outputs(engine: Engine, marks: Sequence[int], steps: int) -> Iterator[tuple[int, Any]]:
    """One long request: each mark with the figures of the last steps before it."""
    handle = submit(engine, Ask(prompt(engine, 64), ENDLESS, marks[-1] + PER_STEP))
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


def asks_of(engine: Engine, sweep: str, x: int, size: Size) -> list[Ask]:
    """The requests of a point."""
    endless = (UNCOUNTED + size.steps + 4) * PER_STEP
    if sweep == "batch":
        return [Ask(prompt(engine, 48, n), ENDLESS, 2 * endless) for n in range(x)]
    tokens = max(min(x, engine.context_length) - endless, 1)
    return [Ask(prompt(engine, tokens, n), ENDLESS, endless) for n in range(4)]


def engine_settings(sweep: str, size: Size) -> dict[str, Any]:
    """What an engine for the sweep holds."""
    largest = size.sizes[sweep][-1]
    rows = {"batch": largest, "output": 1}.get(sweep, 4)
    long = {"context": largest, "output": largest + 128}.get(sweep, 1024)
    return SETTINGS | {"max_running_requests": rows, "context_length": long}


def run_sweep(engine: Engine, sweep: str, size: Size, run: Run, step: Callable[[], None]) -> None:
    """Every point of one sweep, the sizes in turn, in each repetition."""
    sizes = size.sizes[sweep]
    for repetition in range(size.repetitions):
        if sweep == "output":
            points = outputs(engine, sizes, size.steps)
        else:
            asked = ((x, asks_of(engine, sweep, x, size)) for x in sizes)
            points = ((x, keep_busy(engine, asks, size.steps)) for x, asks in asked)
        for x, figures in points:
            _keep(run, sweep, x, repetition, figures)
            step()


def _keep(run: Run, sweep: str, x: int, repetition: int, figures: dict[str, float]) -> None:
    if repetition == 0:
        figures = figures | {"rss_mib": rss_mib(os.getpid())}
    run.sample(sweep=sweep, x=x, repetition=repetition, **figures)


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples alone."""
    sweeps: dict[str, Any] = {}
    for name in dict.fromkeys(sample["sweep"] for sample in samples):
        own = [sample for sample in samples if sample["sweep"] == name]
        points = []
        for x in dict.fromkeys(s["x"] for s in own):
            at = [s for s in own if s["x"] == x]
            figures = {f: median(s[f] for s in at if f in s) for f in FIGURES if f in at[0]}
            points.append({"x": x} | figures)
        fits = {figure: fit(points, figure) for figure in FIGURES if figure in points[0]}
        sweeps[name] = {"unit": UNITS[name], "points": points, "fits": fits}
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


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("scaling", "How a step's cost grows with each size.")
    add_model_flags(parser)
    parser.add_argument("--only", nargs="+", choices=list(UNITS), help="these sweeps alone")
    parser.add_argument("--threads", type=positive, default=1, help="of a pass (default 1)")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    run = Run("scaling", options, arguments)
    torch.set_num_threads(options.threads)
    sweeps = [name for name in UNITS if name in (options.only or UNITS)]
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
    run.finish(size.repetitions, **summary(run.samples), threads=options.threads)


if __name__ == "__main__":
    main()
