"""How many nodes of each request's next tree the grammar may fill, as far as the host knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.speculation.wide import run_room
from overlap_spec.types import RUN_TOKENS, HostTrees, Int32s, Tier


class Rooms:
    """What the lane told of each request's last tree.

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

    def of(self, sequences: Sequence[SequenceState], tier: Tier) -> list[int]:
        """Nodes, root included, of the largest tree that the grammar can make of each request's
        next one, where that is more than a draft of ``tier`` has of it; else 0."""
        return [self._room(sequence, tier) if _drafts(sequence) else 0 for sequence in sequences]

    def _room(self, sequence: SequenceState, tier: Tier) -> int:
        # A run's first token is the next root.
        run = self._ahead.get(sequence.request.id, 0) - 1
        return max(run_room(run, tier), _trie_room(sequence))


def _drafts(sequence: SequenceState) -> bool:
    return sequence.matcher is not None and sequence.request.sampling.speculate


def _trie_room(sequence: SequenceState) -> int:
    """Nodes of the largest tree that a sequence's trie can be, after what is known of its output,
    the first token at least."""
    trie = sequence.trie
    if trie is None:
        return 0
    place = trie.follow(-1, sequence.output_ids)
    if place is None:
        return 0
    return 1 + int(trie.sizes[place] if place >= 0 else trie.sizes[trie.parents < 0].max())
