"""The same draft budget at every step."""

from __future__ import annotations

from typing import Any

from overlap_spec.speculation.policy import (
    LAUNCH,
    OFF,
    LengthPolicy,
    StepOutcome,
    StepView,
    active_snapshot,
    slot_snapshot,
)
from overlap_spec.tiers import Budget, Tier


def static_tier(steps: int, top_k: int, nodes: int | None) -> Tier:
    """Tier of fixed settings.

    Args:
        nodes: Verified nodes, root included; None: all of a chain, at most 16 of a tree.

    Nodes never exceed what can be drafted: steps + 1 in a chain, 1 + k + (steps - 1) k² in a tree.
    """
    if steps == 0:
        return OFF
    most = steps + 1 if top_k == 1 else 1 + top_k + (steps - 1) * top_k * top_k
    if nodes is None:
        nodes = most if top_k == 1 else 16
    return Tier(steps, top_k, min(nodes, most))


class StaticPolicy(LengthPolicy):
    """One tier, whatever is accepted.

    Args:
        name: What the policy is called in its snapshot.
        reason: Why that tier, for the snapshot.
    """

    def __init__(self, tier: Tier, name: str = "static", reason: str = "launch") -> None:
        self.tiers, self.ignores = (tier,), LAUNCH if name == "off" else ()
        self._name, self._reason = name, reason
        self._budget = Budget(tier)
        self._count = 0

    def choose(self, view: StepView) -> Budget:  # noqa: ARG002
        return self._budget

    def observe(self, outcome: StepOutcome) -> None:
        self._count += bool(outcome.requests) and outcome.budget.tier == self._budget.tier

    def snapshot(self) -> dict[str, Any]:
        tier, figures = self._budget.tier, {"count": self._count, "switches": 0}
        slot = slot_snapshot(1, tier, [tier.steps]) | {"ema": None} | figures
        active = active_snapshot(tier, self._reason)
        return {"policy": self._name, **figures, "active": active, "slots": [slot]}
