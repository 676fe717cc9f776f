"""Length policies asked and told as the engine does."""

from collections.abc import Callable, Sequence

import pytest

from overlap_spec.engine import Engine
from overlap_spec.speculation.policy import (
    LengthPolicy,
    RequestOutcome,
    RequestView,
    StepOutcome,
    StepView,
)
from overlap_spec.tiers import Budget, Tier


def view(batch: int, context: int = 100, constrained: bool = False) -> StepView:
    """A step over ``batch`` requests alike."""
    return StepView(tuple(RequestView(n, context, constrained) for n in range(batch)))


def told(
    batch: int, tier: Tier, accepted: Sequence[int], step_ms: float | None = None
) -> StepOutcome:
    """A step that verified every node of a tier."""
    requests = [RequestOutcome(n, a, tier.nodes - 1) for n, a in enumerate(accepted)]
    return StepOutcome(view(batch), Budget(tier), requests, step_ms, batch * tier.nodes)


def share_nodes(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, nodes: Callable[[int, Tier], int]
) -> None:
    """Let every step of an engine verify ``nodes(batch, tier)`` nodes, roots included."""
    policy: LengthPolicy = engine.core.budgets.policy
    chosen = policy.choose

    def choose(view: StepView) -> Budget:
        batch, tier = view.batch, chosen(view).tier
        if not batch or tier.nodes == 1:
            return Budget(tier)
        return Budget(tier, nodes(batch, tier), (tier.nodes,) * batch)

    monkeypatch.setattr(policy, "choose", choose)
