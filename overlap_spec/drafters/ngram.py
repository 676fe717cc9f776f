"""Drafts looked up in text that is there: n-grams (prompt lookup, arXiv 2304.04487).

What followed the last tokens where they stood before, in the request's own prompt and output, is
proposed again.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import HostDraft
from overlap_spec.drafters.text_pool import END, LookupDrafter, TextPool, best_first
from overlap_spec.steps import History
from overlap_spec.tiers import Tier

# Bytes of a dictionary's two numbers, beside its table.
NUMBERS_BYTES = 36 + 28
# Matches that a tree is made of.
MATCHES = 16


# Of an n-gram: how many tokens it has, and what followed where it stood before.
Match = tuple[int, list[int]]


class NgramTable:
    """Where each n-gram of one length stands in a text; a position is that of the token after it.

    ``entry``: number of the n-gram → a position: the newest or the oldest. ``link``: position → the
    next older or newer one of the same n-gram, -1 is none. ``tail``: oldest position → the newest.
    """

    def __init__(self, oldest: bool, keep_all: bool) -> None:
        self.entry: dict[int, int] = {}
        self._oldest, self._keep_all = oldest, keep_all
        self._link, self._tail = array("i"), array("i")

    def skip(self) -> None:
        """The next position has no such n-gram before it."""
        if self._keep_all:
            self._link.append(-1)
            if self._oldest:
                self._tail.append(len(self._tail))

    def add(self, key: int, at: int) -> None:
        """Enter the next position."""
        self.skip()
        known = self.entry.setdefault(key, at)
        if known == at or not self._keep_all:
            return
        if self._oldest:
            self._link[self._tail[known]] = self._tail[known] = at
        else:
            self._link[at] = known
            self.entry[key] = at

    def positions(self, key: int) -> Iterator[int]:
        """Of an n-gram, in the order of preference."""
        at = self.entry.get(key, -1)
        while at >= 0:
            yield at
            at = self._link[at] if self._keep_all else -1

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        numbers = sys.getsizeof(self.entry) + NUMBERS_BYTES * len(self.entry)
        return numbers + sys.getsizeof(self._link) + sys.getsizeof(self._tail)


class NgramIndex:
    """A growing text with all its n-grams of up to ``size`` tokens.

    Args:
        vocab_size: Tokens are numbers below it: an n-gram is a number in that base.
        oldest: Whether an n-gram's oldest continuation is preferred, else its newest.
        keep_all: Whether all its continuations are kept, or one alone: the longest.
        longest: Tokens of a continuation beyond which its length is of no interest.
    """

    def __init__(
        self, size: int, vocab_size: int, oldest: bool, keep_all: bool, longest: int
    ) -> None:
        self.text = array("i")
        self._vocab_size, self._keep_all, self._longest = vocab_size, keep_all, longest
        self._tables = [NgramTable(oldest, keep_all) for _ in range(size)]

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text; the last one may be END."""
        text, vocab_size = self.text, self._vocab_size
        for index, token in enumerate(tokens):
            at, key, base = len(text), 0, 1
            known = token != END
            for size, table in enumerate(self._tables, 1):
                known = known and at >= size and text[at - size] != END
                if not known:
                    table.skip()
                    continue
                key += text[at - size] * base
                base *= vocab_size
                if not self._keep_all and self._room(table, key) < len(tokens) - index:
                    del table.entry[key]
                table.add(key, at)
            text.append(token)

    def matches(
        self, size: int, key: int, steps: int, periodic: bool, seen: set[int]
    ) -> Iterator[Match]:
        """What followed the n-gram of ``size`` tokens with number ``key``, in order of preference.

        Args:
            steps: Most tokens of each.
            periodic: Whether the text ends with that n-gram: where a match's tokens end there too,
                they go on as if they were repeated.
            seen: Positions of no interest, to which those that are found are added.
        """
        for at in self._tables[size - 1].positions(key):
            if at in seen:
                continue
            seen.add(at)
            found = self.text[at : at + steps].tolist()
            if END in found:
                found = found[: found.index(END)]
            elif periodic:
                period = len(self.text) - at
                found += [found[i % period] for i in range(len(found), steps)]
            yield size, found

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sys.getsizeof(self.text) + sum(table.bytes for table in self._tables)

    def _room(self, table: NgramTable, key: int) -> float:
        """Tokens that follow an n-gram in its own text, as far as they matter."""
        at = next(table.positions(key), None)
        held = [] if at is None else self.text[at : at + self._longest].tolist()
        return held.index(END) if END in held else math.inf


class NgramDrafter(LookupDrafter[NgramIndex]):
    """Proposes what followed the longest n-gram that ends a text, where it stood before."""

    def longest(self, config: EngineConfig) -> int:
        return config.ngram_max_matching_size

    def make_index(self) -> NgramIndex:
        config = self.config
        ways = config.ngram_use_oldest, config.ngram_keep_all
        return NgramIndex(self.size, self.vocab_size, *ways, max(config.num_steps, 1))

    def look_up(self, history: History, pool: TextPool[NgramIndex], tier: Tier) -> HostDraft:
        # What is forced goes in front of what may follow it.
        forced = history.forced[: tier.steps]
        matches = self._matches(history, pool, tier.steps - len(forced))
        return draft_of(islice(matches, 1 if tier.top_k == 1 else MATCHES), tier, forced)

    def _matches(self, history: History, pool: TextPool[NgramIndex], steps: int) -> Iterator[Match]:
        """What followed the request's last tokens, forced ones included, where they stood before:
        after longer n-grams first; of each at most ``steps`` tokens."""
        total, oldest = len(history), self.config.ngram_use_oldest
        at_end = pool.added == total and not history.forced
        every = [(i, last and at_end) for i, last in pool.indexes(oldest)]
        if self.public is not None:
            every += [(i, False) for i, _ in self.public.indexes(oldest)]
        keys, base = [0], 1
        last = [*history.tokens(max(0, total - self.size), total), *history.forced]
        for token in last[: -self.size - 1 : -1]:
            keys.append(keys[-1] + token * base)
            base *= self.vocab_size
        seen: list[set[int]] = [set() for _ in every]
        for size in range(len(keys) - 1, 0, -1):
            for (index, periodic), known in zip(every, seen, strict=True):
                yield from index.matches(size, keys[size], steps, periodic, known)


def draft_of(matches: Iterable[Match], tier: Tier, forced: Sequence[int]) -> HostDraft:
    """The tree of the likeliest continuations, behind what is forced.

    A match of n tokens counts n times. A token's probability after its parent is its share of
    these counts and of one more, which is for what was never seen.
    """
    counts: dict[tuple[int, ...], int] = {}
    after: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for size, tokens in matches:
        for depth in range(len(tokens) + 1):
            path = tuple(tokens[:depth])
            if path and path not in counts:
                after.setdefault(path[:-1], []).append(path)
            counts[path] = counts.get(path, 0) + size

    def children(path: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], float]]:
        below = after.get(path, [])
        total = 1 + sum(counts[child] for child in below)
        for child in sorted(below, key=lambda child: -counts[child])[: tier.top_k]:
            yield child[-1], child, counts[child] / total

    return best_first(tuple[int, ...](), children, tier.nodes - 1, forced)
