"""The same draft budget at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap_spec.speculation.policy import LengthPolicy, slot_snapshot
from overlap_spec.types import Tier


def static_tier(steps: int, top_k: int, nodes: int | None) -> Tier:
    """Tier of fixed settings.

    Args:
        nodes: Verified nodes, root included; None: all of a chain, at most 16 of a tree.

    Nodes never exceed what can be drafted: steps + 1 in a chain, 1 + k + (steps - 1) k² in a tree.
    """
    if steps == 0:
        return Tier(0, 1, 1)
    most = steps + 1 if top_k == 1 else 1 + top_k + (steps - 1) * top_k * top_k
    if nodes is None:
        nodes = most if top_k == 1 else 16
    return Tier(steps, top_k, min(nodes, most))


class StaticPolicy(LengthPolicy):
    """One tier, whatever is accepted."""

    def __init__(self, tier: Tier) -> None:
        self.tiers = (tier,)
        self._count = 0

    def choose(self, batch_size: int) -> Tier:  # noqa: ARG002
        return self.tiers[0]

    def observe(self, batch_size: int, tier: Tier, accepted: Sequence[int]) -> None:  # noqa: ARG002
        self._count += bool(accepted) and tier == self.tiers[0]

    def snapshot(self) -> dict[str, Any]:
        figures = {"count": self._count, "switches": 0}
        slot = slot_snapshot(1, self.tiers[0], [self.tiers[0].steps]) | {"ema": None} | figures
        return {"policy": "static", **figures, "slots": [slot]}
