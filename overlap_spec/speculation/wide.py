"""Room in a tier for what the grammar tells, beside what the drafter guesses."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_spec.types import Budget, Tier

# Depth and nodes of a tree, root included, where the grammar knows what can come.
WIDE_STEPS, WIDE_NODES = 8, 32


def wide_tier(base: Tier) -> Tier:
    """``base`` with room for the grammar's own trees."""
    return Tier(
        max(WIDE_STEPS, base.steps), max(2, base.top_k), max(WIDE_NODES, base.nodes), None, base
    )


def widened(budget: Budget, rooms: Sequence[int]) -> Budget:
    """A budget with room for what the grammar tells of each request.

    A tree of a fixed shape, and a tier that drafts nothing, stay as they are.

    Args:
        rooms: Nodes that each request's own tree may take, root included; 0: it has none.
    """
    tier = budget.tier
    if not any(rooms) or tier.parents is not None or tier.steps == 0:
        return budget
    wide = wide_tier(tier)
    before = budget.most or (tier.nodes,) * len(rooms)
    most = tuple(max(most, min(room, wide.nodes)) for most, room in zip(before, rooms, strict=True))
    nodes = sum(before) if budget.nodes is None else budget.nodes
    nodes += sum(most) - sum(before)
    return Budget(wide, nodes, budget.least or (1,) * len(rooms), most)
