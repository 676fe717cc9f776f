"""What steps came to, beside what a policy expected of them."""

from __future__ import annotations

from typing import Any

from overlap_spec.speculation.policy import StepOutcome

# Weight of a new step.
ALPHA = 0.05


class Observed:
    """Smoothed accept length and time of steps that prefilled nothing, and targets kept."""

    def __init__(self) -> None:
        self._accept_length: float | None = None
        self._step_ms: float | None = None
        self._asked = self._kept = 0

    def add(self, outcome: StepOutcome) -> None:
        """Take in a step."""
        if outcome.requests:
            length = 1 + sum(outcome.accepted) / len(outcome.requests)
            self._accept_length = _smooth(self._accept_length, length)
        if outcome.step_ms is not None and not outcome.view.chunk_tokens and outcome.view.batch:
            self._step_ms = _smooth(self._step_ms, outcome.step_ms)

    def add_request(self, tpot_ms: float, tpot_slo_ms: float | None) -> None:
        """Take in a request that has ended."""
        if tpot_slo_ms is not None:
            self._asked += 1
            self._kept += tpot_ms <= tpot_slo_ms

    def snapshot(self) -> dict[str, Any]:
        """``observed_accept_length`` and ``observed_step_ms`` (None before the first step), and of
        the requests with a TPOT target that have ended: ``tpot_requests``, ``tpot_attained``."""
        return {
            "observed_accept_length": self._accept_length,
            "observed_step_ms": self._step_ms,
            "tpot_requests": self._asked,
            "tpot_attained": self._kept,
        }


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else before + ALPHA * (now - before)
