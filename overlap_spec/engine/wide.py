"""Wide tiers: room for the trees that the grammar tells, beside what the drafter guesses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.steps import RUN_TOKENS, HostTrees, Int32s
from overlap_spec.tiers import Budget, Tier

# Depth and nodes of a tree, root included, where the grammar knows what can come.
WIDE_STEPS, WIDE_NODES = RUN_TOKENS - 1, 32


def wide_tier(base: Tier) -> Tier:
    """``base`` with room for the grammar's own trees, and for runs longer than its drafts."""
    tail = max(0, WIDE_STEPS - base.steps)
    nodes = max(WIDE_NODES, base.nodes + tail)
    return Tier(base.steps + tail, max(2, base.top_k), nodes, None, base)


def widened(budget: Budget, told: Sequence[int]) -> Budget:
    """A budget with room for what the grammar tells of each request.

    A tree of a fixed shape, and a tier that drafts nothing, stay as they are.

    Args:
        told: Nodes that each request's own tree may take, root included; 0: it has none.
    """
    tier = budget.tier
    if not any(told) or tier.parents is not None or tier.steps == 0:
        return budget
    wide = wide_tier(tier)
    before = budget.most or (tier.nodes,) * len(told)
    most = tuple(max(most, min(own, wide.nodes)) for most, own in zip(before, told, strict=True))
    nodes = sum(before) if budget.nodes is None else budget.nodes
    nodes += sum(most) - sum(before)
    return Budget(wide, nodes, budget.least or (1,) * len(told), most)


class GrammarTrees:
    """How large each request's next tree can be that the grammar tells, as far as the host knows.

    That comes before the next step is planned in every overlap mode, while which of the tree's
    nodes are accepted comes later in some. So the plan goes by the longest run behind any of them,
    and all modes draft alike.
    """

    def __init__(self) -> None:
        self._ahead: dict[int, int] = {}

    def note(self, request_ids: Sequence[int], trees: HostTrees, runs: Int32s) -> None:
        """Take in the runs ``(nodes, TOLD)`` behind the nodes of a step's trees."""
        longest = np.maximum.reduceat((runs[:, :RUN_TOKENS] >= 0).sum(1), trees.offsets[:-1])
        self._ahead = dict(zip(request_ids, longest.tolist(), strict=True))

    def sizes(self, sequences: Sequence[SequenceState], tier: Tier) -> list[int]:
        """Nodes, root included, of the largest tree that the grammar can make of each request's
        next one, where that is more than a draft of ``tier`` has of it; else 0."""
        return [self._size(sequence, tier.own.steps) for sequence in sequences]

    def _size(self, sequence: SequenceState, drafted: int) -> int:
        if sequence.matcher is None or not sequence.request.sampling.speculate:
            return 0
        # A run's first token is the next root.
        run = self._ahead.get(sequence.request.id, 0) - 1
        size, trie = (1 + run if run > drafted else 0), sequence.trie
        place = None if trie is None else trie.follow(-1, sequence.output_ids)
        if trie is None or place is None:
            return size
        # After what is known of its output, the first token at least.
        left = trie.sizes[place] if place >= 0 else trie.sizes[trie.parents < 0].max()
        return max(size, 1 + int(left))
