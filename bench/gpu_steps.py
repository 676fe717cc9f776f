"""The parts of ``bench.gpu`` that time steps: verify, the grammar's cost, the host's time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.common import mean, median, spread
from bench.gpu_context import Context, Result, figure
from bench.measure import GREEDY, Measured, measure
from bench.overlap import accepts
from bench.workloads import Ask, choose_samples, free_asks, json_asks, read_samples
from examples.embedded_model.data import held_out_cases
from overlap_spec.engine import Engine
from overlap_spec.grammar.matching.pool import MatcherPool
from overlap_spec.grammar.spec import Grammar
from overlap_spec.models.config import read_config
from overlap_spec.types import Output
from overlap_spec.worker.streams import Event


@dataclass
class Driven:
    """Requests that ran side by side, and the steps through which all of them decoded.

    Attributes:
        step_ms, host_ms, thread_ms: Of each such step: its time, that time without waits, and the
            stepping thread's own time on a processor.
        since_ns: When the first of them began.
    """

    outputs: list[Output]
    step_ms: list[float]
    host_ms: list[float]
    thread_ms: list[float]
    since_ns: int

    @property
    def accept_length(self) -> float:
        """Tokens that a verify emitted, over all requests."""
        verifies = sum(output.stats.verifies for output in self.outputs)
        return sum(output.stats.verified_tokens for output in self.outputs) / max(verifies, 1)


def drive(
    engine: Engine, asks: Sequence[Ask], waited_ns: Callable[[], int] = lambda: 0, **sampling: Any
) -> Driven:
    """Submit all requests, then step until all have ended; see :class:`Driven`."""
    tickets = [
        engine.submit(a.prompt, a.grammar, {**GREEDY, "max_tokens": a.max_tokens, **sampling})
        for a in asks
    ]
    driven = Driven([], [], [], [], 0)
    try:
        while any(ticket.output is None for ticket in tickets):
            begun = all(ticket.deltas for ticket in tickets)
            start, waits, cpu = time.perf_counter_ns(), waited_ns(), time.thread_time_ns()
            engine.step()
            if begun and all(ticket.output is None for ticket in tickets):
                driven.since_ns = driven.since_ns or start
                wall = time.perf_counter_ns() - start
                driven.step_ms.append(wall / 1e6)
                driven.host_ms.append((wall - waited_ns() + waits) / 1e6)
                driven.thread_ms.append((time.thread_time_ns() - cpu) / 1e6)
    finally:
        engine.release(tickets)
    driven.outputs = [ticket.output for ticket in tickets if ticket.output is not None]
    wrong = [output.error for output in driven.outputs if output.error is not None]
    if wrong or not driven.step_ms:
        raise RuntimeError(f"requests failed, or no step decoded all of them: {wrong}")
    return driven


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


def schema_asks(context: Context, engine: Engine) -> Callable[[int], list[Ask]]:
    """Requests under schemas of the file, as many as are wanted."""
    samples = choose_samples(
        read_samples(context.options.data),
        context.size.schemas,
        context.options.seed,
        lambda grammar: accepts(engine, grammar),
    )
    return lambda count: json_asks(samples, count, context.size.tokens)


def free(asks: Sequence[Ask]) -> list[Ask]:
    """The same requests without their grammars."""
    return [Ask(ask.prompt, None, ask.max_tokens) for ask in asks]


def weight_bytes(folder: Path, itemsize: int) -> int:
    """Bytes of a checkpoint's weights at ``itemsize`` bytes each, embedding tables left out: a
    pass reads a few of their rows."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name == "__metadata__" or "embed_tokens" in name:
                continue
            count = itemsize
            for size in tensor["shape"]:
                count *= size
            total += count
    return total


def verify(context: Context) -> Result:
    """A verify of 16 nodes at batch 1: the least bytes that it reads, over the copy's rate, over
    its time on the timeline."""
    (engine,) = context.engines("tree")
    asks = free_asks(1, context.size.long_tokens)
    drive(engine, asks, ignore_eos=True)
    driven = drive(engine, asks, ignore_eos=True)
    spans = [
        span
        for span in engine.timeline.spans()
        if (span.lane, span.name) == ("compute", "verify") and span.start_ns >= driven.since_ns
    ]
    if not spans:
        raise RuntimeError("the timeline holds no verify on compute")
    taken_ms = [(span.end_ns - span.start_ns) / 1e6 for span in spans]
    shape, output = read_config(context.target), driven.outputs[0]
    keys = output.stats.prompt_tokens + output.stats.output_tokens / 2
    row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * context.itemsize
    weights = weight_bytes(context.target, context.itemsize)
    least_ms = (weights + row * keys) / context.ceilings[0] * 1e3
    share = least_ms / median(taken_ms)
    return Result(
        {
            "verify_roofline_share": figure(
                share, least=0.85, unit="of roofline", by={"batch 1": share}
            )
        },
        {
            "verify_ms": spread(taken_ms),
            "least_ms": least_ms,
            "weight_bytes": weights,
            "kv_bytes": row * keys,
            "copy_gb_s": context.ceilings[0] / 1e9,
            "nodes": engine.core.policy.tiers[0].nodes,
            "accept_length": driven.accept_length,
        },
        [{"verify_ms": value} for value in taken_ms],
    )


# Requests tried for each one that is wanted: not all outputs are the same.
CANDIDATES = 6


def alike(engine: Engine, context: Context) -> list[Ask]:
    """Extraction requests whose output is the same, token by token, with the grammar and without:
    what the grammar wants is what the model says by itself."""
    cases = held_out_cases(context.options.seed, CANDIDATES * context.size.cases)
    asks = [Ask(c.prompt, Grammar.json_schema(c.schema), context.size.tokens) for c in cases]
    outputs = zip(measure(engine, asks).outputs, measure(engine, free(asks)).outputs, strict=True)
    found = [
        ask
        for ask, (held, loose) in zip(asks, outputs, strict=True)
        if held.token_ids == loose.token_ids and held.stats.output_tokens > 1
    ]
    if not found:
        raise RuntimeError("no case has the same output with and without its grammar")
    return found[: context.size.cases]


def constrained(context: Context) -> Result:
    """TPOT with a grammar over TPOT without, where both sides emit the same tokens: what it costs
    less what it saves, as drafts that keep to it are longer. And ms per step under the file's
    schemas, where they do not."""
    (engine,) = context.engines("chain")
    same, schemas = alike(engine, context), schema_asks(context, engine)
    by: dict[str, float] = {}
    result = Result(details={"alike": len(same), "cases": context.size.cases})
    for batch in context.size.batches:
        name = f"batch {batch}"
        pairs = [_pair(engine, same, batch, n) for n in range(-1, context.size.repetitions)][1:]
        steps = [_steps(engine, schemas(batch), n) for n in range(-1, context.size.repetitions)][1:]
        equal = [p for p in pairs if p["equal"]]
        if not equal:
            raise RuntimeError(f"batch {batch}: outputs never were the same on both sides")
        ratios = spread(p["tpot_ms"][0] / p["tpot_ms"][1] for p in equal)
        by[name] = ratios["median"]
        result.details[name] = {
            "ratio_tpot": ratios,
            "unequal_pairs": len(pairs) - len(equal),
            "accept_lengths": [mean(p["accept_length"][i] for p in equal) for i in (0, 1)],
            "ratio_step": spread(s["step_ms"][0] / s["step_ms"][1] for s in steps),
            "step_accept_lengths": [mean(s["accept_length"][i] for s in steps) for i in (0, 1)],
            "step_ms": [median(s["step_ms"][i] for s in steps) for i in (0, 1)],
        }
        result.samples += [{"batch": batch, **row} for row in (*pairs, *steps)]
    worst = max(by.values())
    result.figures["constrained_tpot_ratio"] = figure(worst, most=1.02, unit="×", by=by)
    return result


def _in_turn(held: Callable[[], Any], loose: Callable[[], Any], number: int) -> tuple[Any, Any]:
    """Both, and which goes first changes with ``number``."""
    if number % 2:
        second, first = loose(), held()
        return first, second
    return held(), loose()


def _pair(engine: Engine, same: list[Ask], batch: int, number: int) -> dict[str, Any]:
    """TPOT of some of the requests with their grammars and without."""
    asks = list(islice(cycle(same), batch * (number + 1), batch * (number + 2)))
    sides: tuple[Measured, Measured] = _in_turn(
        lambda: measure(engine, asks), lambda: measure(engine, free(asks)), number
    )
    return {
        "kind": "tpot",
        "tpot_ms": [side.tpot_ms for side in sides],
        "accept_length": [side.accept_length for side in sides],
        "grammar_ms": sides[0].grammar_ms,
        "exposed_ms": sides[0].exposed_ms,
        "equal": sides[0].sha256 == sides[1].sha256,
    }


def _steps(engine: Engine, asks: list[Ask], number: int) -> dict[str, Any]:
    """Mean time of a full step of the requests with their grammars and without."""
    sides: tuple[Driven, Driven] = _in_turn(
        lambda: drive(engine, asks), lambda: drive(engine, free(asks)), number
    )
    return {
        "kind": "step",
        "step_ms": [mean(side.step_ms) for side in sides],
        "accept_length": [side.accept_length for side in sides],
    }


def host(context: Context) -> Result:
    """What a step costs the host under the file's schemas: its time but for waits.

    A wait for an event may spin, so that the thread's time on a processor, which is reported too,
    holds waits too.
    """
    (engine,) = context.engines("chain")
    schemas, result = schema_asks(context, engine), Result()
    by: dict[str, float] = {}
    for batch in (context.size.batches[0], context.size.batches[-1]):
        asks = schemas(batch)
        drive(engine, asks)
        with waits_timed() as waited_ns:
            runs = [drive(engine, asks, waited_ns) for _ in range(context.size.repetitions)]
            if not waited_ns():
                raise RuntimeError("no wait was seen: the host's time cannot be told from it")
        by[f"batch {batch}"] = median(ms for run in runs for ms in run.host_ms)
        result.details[f"batch {batch}"] = {
            name: spread(ms for run in runs for ms in getattr(run, name))
            for name in ("step_ms", "host_ms", "thread_ms")
        }
        result.samples += [{"batch": batch, "host_ms": run.host_ms} for run in runs]
    single, *_ = by.values()
    result.figures["host_ms_per_step"] = figure(single, most=0.5, unit="ms", by=by)
    return result
