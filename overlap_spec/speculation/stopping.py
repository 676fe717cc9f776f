"""When to stop drafting within a step: the correction of AdaSpec's Algorithm 1 (SoCC 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlap_spec.speculation.acceptance import BINS
from overlap_spec.types import DraftStop, Floats

# The middles of a calibration's bins.
CONFIDENCES = (np.arange(BINS) + 0.5) / BINS


def goodput(tokens: float, step_ms: float, tpot_slo_ms: float | None) -> float:
    """Algorithm 3: tokens per millisecond, -1 where the step breaks the target."""
    if tpot_slo_ms is not None and step_ms > tpot_slo_ms:
        return -1.0
    return tokens / step_ms


@dataclass(frozen=True, eq=False)
class GoodputStop(DraftStop):
    """Stops at the length from which on the goodput does not grow.

    What is drafted counts with its own calibrated confidences, what would be drafted next with
    what is expected of the request.

    Attributes:
        costs: Steps → milliseconds of a step that drafts and verifies as many, ascending, without
            gaps or not: it is stopped at these lengths alone.
        expected: float64 ``(trees,)``: what each request's next draft will be accepted with, given
            that the one before it was; 0 of those that take no drafts.
        curves: float64 ``(2, BINS)``: how often drafts of :data:`CONFIDENCES` are accepted, of free
            and of constrained text.
        constrained: bool ``(trees,)``.
        tpot_slo_ms: The target that a step may not break.
    """

    costs: Mapping[int, float]
    expected: NDArray[np.float64]
    curves: NDArray[np.float64]
    constrained: NDArray[np.bool_]
    tpot_slo_ms: float | None = None

    def stops(self, log_probs: Floats) -> bool:
        trees, steps = log_probs.shape
        longer = next((s for s in self.costs if s > steps), None)
        if steps not in self.costs or longer is None:
            return longer is None
        sure = np.exp(log_probs.astype(np.float64))
        free, bound = (np.interp(sure, CONFIDENCES, curve) for curve in self.curves)
        rates = np.where(self.constrained[:, None], bound, free) * (self.expected > 0)[:, None]
        shares = rates.cumprod(1)
        tokens = trees + float(shares.sum())
        further, share = 0.0, shares[:, -1]
        for _ in range(longer - steps):
            share = share * self.expected
            further += float(share.sum())
        now = goodput(tokens, self.costs[steps], self.tpot_slo_ms)
        return goodput(tokens + further, self.costs[longer], self.tpot_slo_ms) <= now
