"""Baselines that adaptive lengths are compared with: a confidence threshold, and SpecInfer.

An engine takes them as ``--adaptive bench.baselines:ThresholdPolicy`` and
``bench.baselines:SpecInfer``.
"""

from __future__ import annotations

from typing import Any

from overlap_spec.speculation.adaspec import Confidences
from overlap_spec.speculation.policy import (
    LengthPolicy,
    StepOutcome,
    StepView,
    active_snapshot,
    slot_snapshot,
)
from overlap_spec.speculation.presets import CHAINS
from overlap_spec.speculation.static import StaticPolicy, static_tier
from overlap_spec.tiers import Budget, Tier

# Below it a draft is not worth its step: the transformers library's default.
THRESHOLD = 0.4
# SpecInfer's depth (ASPLOS 2024), at width 1: all of a chain is verified, whatever it costs.
SPECINFER_STEPS = 8


class SpecInfer(StaticPolicy):
    """A chain of :data:`SPECINFER_STEPS`, always."""

    def __init__(self, launch: Tier) -> None:  # noqa: ARG002
        super().__init__(static_tier(SPECINFER_STEPS, 1, None), "specinfer")


class ThresholdPolicy(LengthPolicy):
    """Drafts on while the mean confidence of the batch's drafts is over a threshold.

    The confidence at a depth is what that depth is expected to be accepted with: a request's mean
    confidence to that power. Load and cost play no part.

    Args:
        launch: Has no part in it: the chains are :data:`overlap_spec.speculation.presets.CHAINS`,
            of which the shortest one that drafts is the least.
    """

    def __init__(self, launch: Tier, threshold: float = THRESHOLD) -> None:  # noqa: ARG002
        self.tiers = tuple(static_tier(steps, 1, None) for steps in CHAINS if steps)
        self._budgets = [Budget(tier) for tier in self.tiers]
        self._threshold, self._confidences = threshold, Confidences()
        self._active = self.tiers[0]
        self._accepted: float | None = None
        self._count = self._switches = 0

    def choose(self, view: StepView) -> Budget:
        chosen = self._budgets[0]
        confidences = self._confidences.of(view)
        for budget in self._budgets[1:]:
            steps = budget.tier.steps
            if sum(c**steps for c in confidences) < self._threshold * view.batch or not view.batch:
                break
            chosen = budget
        return chosen

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
        figures = {"count": self._count, "switches": self._switches}
        steps = [tier.steps for tier in self.tiers]
        slot = slot_snapshot(1, self._active, steps) | {"ema": self._accepted} | figures
        reason = f"confidence over {self._threshold}" if self._count else "nothing has run yet"
        active = active_snapshot(self._active, reason)
        return {"policy": "threshold", **figures, "active": active, "slots": [slot]}
