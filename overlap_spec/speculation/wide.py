"""Room in a tier for what the grammar tells, beside what the drafter guesses."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_spec.types import RUN_TOKENS, Budget, Tier

# Depth and nodes of a tree, root included, where the grammar knows what can come.
WIDE_STEPS, WIDE_NODES = RUN_TOKENS - 1, 32


def wide_tier(base: Tier) -> Tier:
    """``base`` with room for the grammar's own trees, and for runs longer than its drafts."""
    tail = max(0, WIDE_STEPS - base.steps)
    nodes = max(WIDE_NODES, base.nodes + tail)
    return Tier(base.steps + tail, max(2, base.top_k), nodes, None, base)


def run_room(tokens: int, tier: Tier) -> int:
    """Nodes, root included, of a chain of ``tokens`` forced ones that is longer than a draft of
    ``tier``; 0: it is not."""
    return 1 + tokens if tokens > tier.own.steps else 0


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
