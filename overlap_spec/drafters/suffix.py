"""Drafts from the suffixes of text that is there, by how often each went on how.

SuffixDecoding (arXiv 2411.04975): the longest end of the request's text that stands elsewhere is
found whatever its length, and what followed it grows into a tree of the likeliest tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import NOTHING, HostDraft
from overlap_spec.drafters.text_pool import END, LookupDrafter, TextPool, best_first
from overlap_spec.steps import History
from overlap_spec.tiers import Tier

# Tokens at the end of a text that are looked up.
LONGEST = 64
# Suffixes of each index from which a tree is grown; the best tree is drafted.
STATES = 4
# Depth of a draft per token of its suffix.
DEPTH_PER_TOKEN = 2
# Bytes of a state's dictionary while it has one transition, numbers included, and of each further
# one as dictionaries grow.
STATE_BYTES, TRANSITION_BYTES = 312, 120


class Suffix(NamedTuple):
    """An end of a text, ``size`` tokens long, that leads to ``state`` of the index ``of``."""

    of: SuffixIndex
    state: int
    size: int


class SuffixIndex:
    """A growing text as its suffix automaton (Blumer et al. 1985), with counts.

    A state stands for all strings that end at the same places of the text. ``length``: tokens of
    the longest of them; ``link``: the state of the longest end of it that stands at more places
    (-1: none); ``count``: at how many it stands; ``after``: token → state.
    """

    def __init__(self) -> None:
        self.text = array("i")
        self.length, self.link, self.count = array("i", [0]), array("i", [-1]), array("i", [0])
        self.after: list[dict[int, int]] = [{}]
        self._last, self._transitions = 0, 0

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text; the last one may be END."""
        for token in tokens:
            self._add(token)
        self.text.extend(tokens)

    def _add(self, token: int) -> None:
        new = self._state(self.length[self._last] + 1, 0, {})
        at = self._last
        while at >= 0 and token not in self.after[at]:
            self.after[at][token] = new
            self._transitions += 1
            at = self.link[at]
        if at >= 0:
            follower = self.after[at][token]
            fits = self.length[follower] == self.length[at] + 1
            self.link[new] = follower if fits else self._split(at, token, follower)
        self._last = at = new
        while at >= 0:
            self.count[at] += 1
            at = self.link[at]

    def _split(self, at: int, token: int, follower: int) -> int:
        """A state for those strings of ``follower`` that are no longer than ``at``'s and one."""
        part = self._state(self.length[at] + 1, self.link[follower], dict(self.after[follower]))
        self.count[part] = self.count[follower]
        self._transitions += len(self.after[part])
        self.link[follower] = part
        while at >= 0 and self.after[at].get(token) == follower:
            self.after[at][token] = part
            at = self.link[at]
        return part

    def _state(self, length: int, link: int, after: dict[int, int]) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(0)
        self.after.append(after)
        return len(self.after) - 1

    def suffixes(self, tokens: Sequence[int]) -> Iterator[Suffix]:
        """Ends of ``tokens`` that stand in the text before some token, the longest first."""
        at, size = 0, 0
        for token in tokens:
            while at and token not in self.after[at]:
                at = self.link[at]
                size = self.length[at]
            if token in self.after[at]:
                at, size = self.after[at][token], size + 1
        while at > 0:
            if any(token != END for token in self.after[at]):
                yield Suffix(self, at, size)
            at = self.link[at]
            size = self.length[at]

    def next(self, state: int) -> list[tuple[int, int, float]]:
        """(token, state, probability) of what follows a state, the likeliest first; where the text
        ends with it, what follows its own ends that stand elsewhere."""
        while state > 0 and not self.after[state]:
            state = self.link[state]
        total, behind = self.count[state], self.after[state].items() if state else ()
        found = [(token, at, self.count[at] / total) for token, at in behind if token != END]
        return sorted(found, key=lambda item: (-item[2], item[0]))

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        numbers, states = (self.text, self.length, self.link, self.count), len(self.after)
        further = TRANSITION_BYTES * max(self._transitions - states, 0)
        return sum(map(sys.getsizeof, numbers)) + STATE_BYTES * states + further


class SuffixDrafter(LookupDrafter[SuffixIndex]):
    """Proposes the tree of which most tokens are to be expected, over the ends of a text."""

    def longest(self, config: EngineConfig) -> int:  # noqa: ARG002
        return LONGEST

    def make_index(self) -> SuffixIndex:
        return SuffixIndex()

    def look_up(self, history: History, pool: TextPool[SuffixIndex], tier: Tier) -> HostDraft:
        tokens = history.tokens(max(0, len(history) - LONGEST), len(history))
        pools = [pool] if self.public is None else [pool, self.public]
        indexes = [index for each in pools for index, _ in each.indexes(oldest=False)]
        found = (end for index in indexes for end in islice(index.suffixes(tokens), STATES))
        drafts = [NOTHING, *(grow_tree(suffix, tier) for suffix in found)]
        return max(drafts, key=lambda draft: float(np.exp(draft.scores).sum()))


def grow_tree(suffix: Suffix, tier: Tier) -> HostDraft:
    """The likeliest tokens after a suffix, best path first: a token's probability after its parent
    is its share of the places where the parent's path stands, the text's end among them."""
    deepest = min(tier.steps, DEPTH_PER_TOKEN * suffix.size)

    def children(end: tuple[int, int]) -> Iterator[tuple[int, tuple[int, int], float]]:
        state, depth = end
        if depth < deepest:
            for token, after, share in suffix.of.next(state)[: tier.top_k]:
                yield token, (after, depth + 1), share

    return best_first((suffix.state, 0), children, tier.nodes - 1)
