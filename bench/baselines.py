"""A baseline that adaptive lengths are compared with: a confidence threshold.

An engine takes it as ``--adaptive bench.baselines:ThresholdPolicy``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from overlap_spec.speculation.adaspec import Confidences
from overlap_spec.speculation.policy import (
    LAUNCH,
    LengthPolicy,
    StepOutcome,
    StepView,
    slot_snapshot,
    snapshot_of,
    static_tier,
)
from overlap_spec.tiers import Budget, DraftStop, Tier

# Behind a draft that the drafter gives less there is no further one: the transformers library's
# default (``assistant_confidence_threshold``).
THRESHOLD = 0.4
# The longest draft, as AdaSpec's paper (SoCC 2025, figure 13) has it of this baseline.
THRESHOLD_STEPS = 8
# Probabilities that the threshold's curve tells apart.
BINS = 1000


class ThresholdPolicy(LengthPolicy):
    """Drafts on until the drafter's probability of a token is under a threshold.

    A request is done with the first such token of its own; the step drafts on while any of its
    requests is not, as they all get one length. Load and cost play no part. Where drafts cannot be
    stopped within a step, what is known before it decides: it drafts all, or one where no
    request's mean confidence is over the threshold.

    Args:
        launch: Has no part in it: the chains have 1 to :data:`THRESHOLD_STEPS` drafts.
    """

    ignores = LAUNCH

    def __init__(self, launch: Tier, threshold: float = THRESHOLD) -> None:  # noqa: ARG002
        self.tiers = tuple(static_tier(n, 1, None) for n in range(1, THRESHOLD_STEPS + 1))
        self._budgets = [Budget(tier) for tier in self.tiers]
        self._threshold, self._confidences = threshold, Confidences()
        # A request that is done is worth nothing more, and a step costs nothing: the drafts go on
        # while there is one that is not.
        self._curve = ((np.arange(BINS) + 0.5) / BINS >= threshold).astype(np.float32)
        self._stops = False
        self._active = self.tiers[0]
        self._accepted: float | None = None
        self._count = self._switches = 0

    def let_stop(self) -> None:
        self._stops = True

    def choose(self, view: StepView) -> Budget:
        drafts = [float(request.speculate) for request in view.requests]
        if self._stops and any(drafts):
            costs = (1.0,) * (THRESHOLD_STEPS + 1)
            curves = np.outer(drafts, self._curve).astype(np.float32)
            stop = DraftStop(costs, np.array(drafts, np.float32), curves)
            return Budget(self.tiers[-1], stop=stop)
        sure = any(c >= self._threshold for c in self._confidences.of(view))
        return self._budgets[-1 if sure else 0]

    def observe(self, outcome: StepOutcome) -> None:
        tier = outcome.budget.tier
        if tier not in self.tiers or not outcome.requests:
            return
        self._count += 1
        self._switches += tier != self._active
        self._active = tier
        self._confidences.observe(outcome)
        self._accepted = sum(outcome.accepted) / len(outcome.requests)

    def snapshot(self) -> dict[str, Any]:
        steps, figures = [tier.steps for tier in self.tiers], (self._count, self._switches)
        slot = slot_snapshot(1, self._active, steps, self._accepted, *figures)
        reason = f"confidence over {self._threshold}" if self._count else "nothing has run yet"
        return snapshot_of("threshold", [slot], self._active, reason)
