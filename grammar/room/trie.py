"""The tokens of a vocabulary as a tree of bytes, level by level."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock

import numpy as np
import numpy.typing as npt

from overlap_spec.caches import newest
from overlap_spec.grammar.rows import packed
from overlap_spec.grammar.vocabulary import Vocabulary

# Bodies of repetitions of which it is kept which tokens they make, and for how many sets of tokens
# of each what is left of them.
BODIES, MOST_PARTS = 16, 64
Parts = tuple[list[tuple[int, bytes]], npt.NDArray[np.int64]]
Numbers = npt.NDArray[np.int32]
Level = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]


@dataclass(eq=False)
class Repeats:
    """Which tokens are texts of one language, one after the other.

    Args:
        counts: int16 `(size,)`: of how many texts each token is made; -1: it is not.
        passed, cuts: int16 `(size,)`: of how many its longest such beginning is, and its bytes.
    """

    texts: tuple[bytes, ...]
    words: int
    counts: npt.NDArray[np.int16]
    passed: npt.NDArray[np.int16]
    cuts: npt.NDArray[np.int16]
    _within: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)
    _parts: OrderedDict[tuple[object, ...], Parts] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.most = int(self.counts.max(initial=0))

    def within(self, most: int) -> npt.NDArray[np.int32]:
        """int32 `(words,)`: tokens of at most so many of the texts."""
        found = self._within.get(most)
        if found is None:
            flags = (self.counts >= 0) & (self.counts <= most)
            found = self._within[most] = packed(flags, self.words)
        return found

    def parts(self, tokens: npt.NDArray[np.int64], others: tuple[int, ...], most: int) -> Parts:
        """What is left of tokens behind as many of the texts as can be.

        Args:
            tokens: int64 `(n,)`.
            others: First bytes of tokens that are left as they are.
            most: Of so many texts at most.

        Returns:
            Of how many texts, and what is left; int64 `(n,)`: which of these each token is.
        """
        name = tokens.tobytes(), others, most
        found = self._parts.get(name)
        if found is None:
            numbers: dict[tuple[int, bytes], int] = {}
            which = []
            passed, cuts = self.passed[tokens].tolist(), self.cuts[tokens].tolist()
            for token, count, cut in zip(tokens.tolist(), passed, cuts, strict=True):
                text = self.texts[token]
                is_cut = 0 < count <= most and text[0] not in others
                part = (count, text[cut:]) if is_cut else (0, text)
                which.append(numbers.setdefault(part, len(numbers)))
            found = self._parts[name] = [*numbers], np.array(which, np.int64)
            if len(self._parts) > MOST_PARTS:
                self._parts.popitem(last=False)
        return found


class TokenTrie:
    """A tree of the texts of tokens; node 0 is its root, and stands for tokens without text.

    Attributes:
        levels: For each depth, its first node, and the parent and the byte of each of its nodes.
        node_of: int64 `(size,)`: the node of each token's text.
        longest: Bytes of the longest token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = self.texts = vocabulary.text
        self._repeats: OrderedDict[bytes, Repeats] = OrderedDict()
        self._most_of: dict[bytes, int] = {}
        self._lock = Lock()
        self.by_text = frozenset(text for text in texts if text)
        self.size, self.words = vocabulary.size, vocabulary.words
        self.node_of = np.zeros(len(texts), np.int64)
        self.levels: list[Level] = []
        self.nodes = 1
        # In the order of their texts, those in one node stand together at every depth.
        self._order = np.array(sorted(range(len(texts)), key=texts.__getitem__), np.int64)
        ordered = self._ordered = [texts[token] for token in self._order.tolist()]
        flat = self._flat = np.frombuffer(b"".join(ordered), np.uint8)
        lengths = np.fromiter(map(len, ordered), np.int64, len(ordered))
        self.longest = int(lengths.max(initial=0))
        starts, nodes = np.cumsum(lengths) - lengths, np.zeros(len(ordered), np.int64)
        self._starts = starts[lengths > 0]
        for depth in range(self.longest):
            longer = np.flatnonzero(lengths > depth)
            parents, read = nodes[longer], flat[starts[longer] + depth].astype(np.int64)
            new = np.diff(parents << 8 | read, prepend=-1) != 0
            self.levels.append((self.nodes, parents[new], read[new]))
            nodes[longer] = self.nodes - 1 + np.cumsum(new)
            self.nodes += int(new.sum())
        self.node_of[self._order] = nodes
        self.read = np.zeros(self.nodes, np.int32)
        parents = np.full(self.nodes, -1, np.int64)
        for first, before, read in self.levels:
            here = slice(first, first + len(before))
            self.read[here], parents[here] = read, before
        # A level's nodes are in the order of their parents, and a parent's level is the one before.
        every = np.arange(self.nodes + 1)
        self._children = np.searchsorted(parents, every).astype(np.int32)
        self._by_node = np.argsort(self.node_of, kind="stable")
        self._bounds = np.searchsorted(self.node_of[self._by_node], every).astype(np.int32)

    def repeats(self, moves: npt.NDArray[np.int16]) -> Repeats:
        """Which tokens are texts of one language, one after the other; the last ones are kept.

        Args:
            moves: int16 `(states, 256)`: an automaton, as `Body.moves`.
        """
        with self._lock:
            return newest(self._repeats, moves.tobytes(), lambda: self._read(moves), BODIES)

    def _read(self, moves: npt.NDArray[np.int16]) -> Repeats:
        end = len(moves) - 1
        states = np.zeros(self.nodes, np.int16)
        passed, cuts = np.zeros((2, self.nodes), np.int16)
        for depth, (first, parents, read) in enumerate(self.levels):
            after = moves[states[parents], read]
            ended = after == end
            after[ended] = 0
            here = slice(first, first + len(after))
            states[here], passed[here] = after, passed[parents] + ended
            before = cuts[parents]
            before[ended] = depth + 1
            cuts[here] = before
        counts = np.where(states == 0, passed, np.int16(-1))
        counts[0] = -1
        at = self.node_of
        return Repeats(self.texts, self.words, counts[at], passed[at], cuts[at])

    def most_of(self, chosen: bytes) -> int:
        """The most bytes out of some that a token has."""
        found = self._most_of.get(chosen)
        if found is None:
            table = np.zeros(256, np.int32)
            table[[*chosen]] = 1
            most = np.add.reduceat(table[self._flat], self._starts).max(initial=0)
            found = self._most_of[chosen] = int(most)
        return found

    def below(self, nodes: Numbers) -> tuple[Numbers, Numbers]:
        """int32 `(n,)`: the nodes right below some nodes, and below which of these each is."""
        return _spread(self._children, nodes)

    def tokens_at(self, nodes: Numbers) -> tuple[npt.NDArray[np.int64], Numbers]:
        """`(n,)`: the tokens of some nodes, and at which of these each is."""
        places, at = _spread(self._bounds, nodes)
        return self._by_node[places], at

    def beginning(self, before: bytes) -> npt.NDArray[np.int64]:
        """int64 `(n,)`: the tokens whose texts begin with some bytes."""
        first = bisect_left(self._ordered, before)
        # No byte is above 255.
        return self._order[first : bisect_left(self._ordered, before + b"\xff" * self.longest)]


@lru_cache(maxsize=4)
def token_trie(vocabulary: Vocabulary) -> TokenTrie:
    """The tree of a vocabulary, cached."""
    return TokenTrie(vocabulary)


def _spread(bounds: Numbers, numbers: Numbers) -> tuple[Numbers, Numbers]:
    """All numbers from `bounds[i]` to before `bounds[i + 1]` for each i, and for which of them."""
    first = bounds[numbers]
    sizes = bounds[numbers + 1] - first
    which = np.repeat(np.arange(len(numbers), dtype=np.int32), sizes)
    before = np.cumsum(sizes, dtype=np.int32) - sizes
    return np.arange(len(which), dtype=np.int32) + (first - before)[which], which
