"""One workload through one engine: its time, its figures, and what it said."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import astuple, dataclass
from typing import Any

from bench.common import mean, percentile
from bench.workloads import Ask
from overlap_spec.engine import Engine
from overlap_spec.engine.grammar_manager import StepFigures
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.errors import RequestFailed
from overlap_spec.types import Output

# Cut where their tokens end, as other engines' outputs are.
GREEDY: dict[str, Any] = {"temperature": 0.0, "complete": False}


@dataclass(frozen=True)
class Measured:
    """What a workload cost, and its outputs in the order of its requests.

    Attributes:
        seconds: From the first submission to the last output.
        steps: Steps that were run, prefill included.
        step_ms: ``seconds`` over steps.
        grammar_ms, exposed_ms: Means over all steps.
        grammar_share: Grammar time over wall time, from when every request has its first token:
            prefill, which makes steps long, is left out.
    """

    seconds: float
    steps: int
    step_ms: float
    grammar_ms: float
    exposed_ms: float
    hidden_fraction: float | None
    grammar_share: float
    outputs: tuple[Output, ...]

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first, over the requests that have more."""
        return mean(o.stats.tpot_ms for o in self.outputs if o.stats.output_tokens > 1)

    @property
    def ttft_ms(self) -> list[float]:
        """Time to the first token of each request."""
        return [output.stats.ttft_ms for output in self.outputs]

    @property
    def verifies(self) -> int:
        """Trees that were verified, over all requests."""
        return sum(output.stats.verifies for output in self.outputs)

    @property
    def verified_tokens(self) -> int:
        """Tokens that these verifies emitted."""
        return sum(output.stats.verified_tokens for output in self.outputs)

    @property
    def accept_length(self) -> float:
        """Tokens that a verify emitted, over all requests."""
        return self.verified_tokens / self.verifies if self.verifies else 0.0

    @property
    def output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(output.stats.output_tokens for output in self.outputs)

    @property
    def sha256(self) -> str:
        """Hash of all outputs' token ids and finish reasons."""
        said = [[list(output.token_ids), output.finish_reason] for output in self.outputs]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def raw(self) -> dict[str, Any]:
        """Everything as plain data: one line of raw samples."""
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "step_ms": self.step_ms,
            "tpot_ms": self.tpot_ms,
            "ttft_ms": self.ttft_ms,
            "ttft_p50_ms": percentile(self.ttft_ms, 50),
            "ttft_p95_ms": percentile(self.ttft_ms, 95),
            "output_tokens": self.output_tokens,
            "verifies": self.verifies,
            "verified_tokens": self.verified_tokens,
            "drafted_tokens": sum(output.stats.drafted_tokens for output in self.outputs),
            "accept_length": self.accept_length,
            "grammar_ms": self.grammar_ms,
            "exposed_ms": self.exposed_ms,
            "hidden_fraction": self.hidden_fraction,
            "grammar_share": self.grammar_share,
            "output_sha256": self.sha256,
        }


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
    return Measured(
        seconds=end - start,
        steps=whole.steps,
        step_ms=(end - start) * 1e3 / whole.steps,
        grammar_ms=whole.grammar_ms / whole.steps,
        exposed_ms=whole.exposed_ms / whole.steps,
        hidden_fraction=whole.hidden_fraction,
        grammar_share=decoded.grammar_ms / ((end - decoding_s) * 1e3) if end > decoding_s else 0.0,
        outputs=outputs,
    )


def _has_begun(ticket: RequestHandle) -> bool:
    return bool(ticket.deltas) or ticket.output is not None


def since(engine: Engine, before: StepFigures) -> StepFigures:
    """What the engine's totals have grown by."""
    pairs = zip(astuple(engine.figures), astuple(before), strict=True)
    return StepFigures(*(now - then for now, then in pairs))
