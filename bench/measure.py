"""One workload through one engine: its time, its figures, and what it said."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import astuple
from typing import Any, NamedTuple

from bench.common import mean
from bench.workloads import Ask
from overlap_spec.engine import Engine
from overlap_spec.engine.grammar_manager import StepFigures
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.errors import RequestFailed
from overlap_spec.types import Output

# Cut where their tokens end, as other engines' outputs are.
GREEDY: dict[str, Any] = {"temperature": 0.0, "complete": False}
COUNTS = ("output_tokens", "verifies", "verified_tokens", "drafted_tokens")


class Measured(NamedTuple):
    """Outputs in the order of their requests, and what they cost: one line of raw samples.

    ``raw`` has ``seconds`` (from the first submission to the last output), ``steps`` (prefill
    included) and ``step_ms``; ``tpot_ms``, over the requests that have more than a token, and
    ``ttft_ms`` of each; sums of the outputs' counts, ``accept_length`` and ``output_sha256`` (of
    token ids and finish reasons); ``grammar_ms`` and ``exposed_ms``, means over all steps,
    ``hidden_fraction``, and ``grammar_share``: grammar time over wall time from when every request
    has its first token, so that prefill, which makes steps long, is left out.
    """

    outputs: tuple[Output, ...]
    raw: dict[str, Any]


def measure(
    engine: Engine, asks: Sequence[Ask], sampling: Mapping[str, Any] = GREEDY, salt: str = ""
) -> Measured:
    """Submit all requests, then step until all have ended.

    Args:
        salt: The requests' ``cache_salt``.

    Raises:
        RequestFailed: a request ended with an error.
    """
    before = copy(engine.figures)
    start = time.perf_counter()
    tickets = [
        engine.submit(
            ask.prompt,
            ask.grammar,
            {"complete": False, **sampling, "max_tokens": ask.max_tokens},
            cache_salt=salt,
        )
        for ask in asks
    ]
    try:
        decoding, decoding_s = None, start
        while any(ticket.output is None for ticket in tickets):
            engine.step()
            if decoding is None and all(map(_has_begun, tickets)):
                decoding, decoding_s = copy(engine.figures), time.perf_counter()
        end = time.perf_counter()
        outputs = tuple(ticket.output for ticket in tickets if ticket.output is not None)
    finally:
        engine.release(tickets)
    for number, output in enumerate(outputs):
        if output.error is not None:
            raise RequestFailed(f"request {number} ended with an error: {output.error}")
    whole, decoded = since(engine, before), since(engine, decoding or before)
    stats = [output.stats for output in outputs]
    said = [[list(output.token_ids), output.finish_reason] for output in outputs]
    tpot_ms = [s.tpot_ms for s in stats if s.output_tokens > 1]
    sums = {name: sum(getattr(s, name) for s in stats) for name in COUNTS}
    raw = {
        "seconds": end - start,
        "steps": whole.steps,
        "step_ms": (end - start) * 1e3 / whole.steps,
        "tpot_ms": mean(tpot_ms) if tpot_ms else None,
        "ttft_ms": [s.ttft_ms for s in stats],
        **sums,
        "accept_length": sums["verified_tokens"] / sums["verifies"] if sums["verifies"] else 0.0,
        "grammar_ms": whole.grammar_ms / whole.steps,
        "exposed_ms": whole.exposed_ms / whole.steps,
        "hidden_fraction": whole.hidden_fraction,
        "grammar_share": decoded.grammar_ms / ((end - decoding_s) * 1e3) if end > decoding_s else 0,
        "output_sha256": hashlib.sha256(json.dumps(said).encode()).hexdigest(),
    }
    return Measured(outputs, raw)


def _has_begun(ticket: RequestHandle) -> bool:
    return bool(ticket.deltas) or ticket.output is not None


def since(engine: Engine, before: StepFigures) -> StepFigures:
    """What the engine's totals have grown by."""
    pairs = zip(astuple(engine.figures), astuple(before), strict=True)
    return StepFigures(*(now - then for now, then in pairs))
