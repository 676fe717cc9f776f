"""What grammars tell drafts, as the host plans it: the maps of the requests that run, and room for
the trees that the grammar tells, beside what the drafter guesses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlap_spec.grammar.drafting.state_table import token_steps
from overlap_spec.grammar.matching.pool import MatcherPool
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.steps import COMMON_STATES, RUN_TOKENS, STATES, TRIE_NODES, GrammarMap, HostTrees
from overlap_spec.tiers import Budget, Tier
from overlap_spec.worker.worker import Worker, tell_drafts

# Depth and nodes of a tree, root included, where the grammar knows what can come.
WIDE_STEPS, WIDE_NODES = RUN_TOKENS - 1, 32


class GrammarDrafts:
    """Which requests read which maps, and how large each one's next tree can be that the grammar
    tells; ``pool`` follows their texts in their maps.

    The size is known before the next step is planned in every overlap mode, while which of a tree's
    nodes are accepted comes later in some. So the plan goes by the longest run behind any of them,
    and all modes draft alike.
    """

    def __init__(self, worker: Worker, pool: MatcherPool, vocabulary: Vocabulary) -> None:
        self._worker, self._pool = worker, pool
        states = STATES if worker.traits.reads_states else 0
        self._parts = Parts(COMMON_STATES, states), Parts(0, (worker.rows + 1) * TRIE_NODES)
        self._ahead: dict[int, int] = {}
        if worker.traits.reads_states:
            steps = token_steps(vocabulary.text, vocabulary.stop_ids)
            worker.do(tell_drafts, {"texts": (0, steps)})

    def enter(self, sequence: SequenceState) -> None:
        """A request has got its row: take its maps in before its first token, if there is room, and
        tell the worker."""
        fresh = not sequence.output_ids and sequence.matcher is not None
        for parts, known in zip(self._parts, sequence.maps if fresh else (None, None), strict=True):
            part = None if known is None else parts.enter(sequence.request.id, known)
            if known is not None and part is not None:
                base, new = part
                if new:
                    self._worker.do(tell_drafts, known.parts(base))
                self._pool.guesses(sequence.request.id).standing.enter(known, base)
        self._worker.assign(sequence.row, sequence.request, sequence.output_ids)

    def leave(self, request_id: int) -> None:
        """A request has ended; steps under way may still read its maps."""
        for parts in self._parts:
            parts.leave(request_id)

    def note(self, request_ids: Sequence[int], trees: HostTrees) -> None:
        """Take in what the lane told of the nodes of a step's trees."""
        (full,) = np.diff(trees.offsets).nonzero()
        told = (trees.runs[:, :RUN_TOKENS] >= 0).sum(1)
        longest = np.maximum.reduceat(told, trees.offsets[full])
        ids = [request_ids[n] for n in full.tolist()]
        self._ahead = dict(zip(ids, longest.tolist(), strict=True))

    def sizes(self, sequences: Sequence[SequenceState], tier: Tier) -> list[int]:
        """Nodes, root included, of the largest tree that the grammar can make of each request's
        next one, where that is more than a draft of ``tier`` has of it; else 0."""
        sizes = [0] * len(sequences)
        for index, sequence in enumerate(sequences):
            request = sequence.request
            if sequence.matcher is not None and request.sampling.speculate:
                # A run's first token is the next root.
                run = self._ahead.get(request.id, 0) - 1
                left = self._pool.guesses(request.id).standing.left
                sizes[index] = max(1 + run if run > tier.own.steps else 0, 1 + left)
        return sizes


class Parts:
    """Which part of a table on the device each map has: of ``size`` rows from ``first`` on."""

    def __init__(self, first: int, size: int) -> None:
        self._first, self._end = first, first + size
        # By a map's identity: its first row, who uses it, the map itself. The newest come last.
        self._parts: dict[int, tuple[int, set[int], GrammarMap]] = {}

    def enter(self, user: int, known: GrammarMap) -> tuple[int, bool] | None:
        """The base of a map for a user, and whether it is new; None where there is no room."""
        part = self._parts.pop(id(known), None)
        base = self._take(known.size) if part is None else part[0]
        if base is None:
            return None
        users = set[int]() if part is None else part[1]
        self._parts[id(known)] = base, users | {user}, known
        return base, part is None

    def leave(self, user: int) -> None:
        """A user reads its map no more."""
        for _, users, _ in self._parts.values():
            users.discard(user)

    def _take(self, count: int) -> int | None:
        """The first part that is free; unused maps give way, the oldest first."""
        while True:
            start = self._first
            for base, _, known in sorted(self._parts.values(), key=lambda part: part[0]):
                if base - start >= count:
                    break
                start = base + known.size
            if self._end - start >= count:
                return start
            unused = next((key for key, part in self._parts.items() if not part[1]), None)
            if unused is None:
                return None
            del self._parts[unused]


def wide_tier(base: Tier) -> Tier:
    """``base`` with room for the grammar's own trees, and for runs longer than its drafts."""
    tail = max(0, WIDE_STEPS - base.steps)
    nodes = max(WIDE_NODES, base.nodes + tail)
    return Tier(base.steps + tail, max(2, base.top_k), nodes, base)


def widened(budget: Budget, told: Sequence[int]) -> Budget:
    """A budget with room for what the grammar tells of each request: ``told``, nodes that its own
    tree may take, root included (0: it has none). One that drafts nothing stays as it is."""
    tier = budget.tier
    if not any(told) or tier.steps == 0:
        return budget
    wide = wide_tier(tier)
    before = budget.most or (tier.nodes,) * len(told)
    most = tuple(max(most, min(own, wide.nodes)) for most, own in zip(before, told, strict=True))
    nodes = sum(before) if budget.nodes is None else budget.nodes
    nodes += sum(most) - sum(before)
    return Budget(wide, nodes, most)
