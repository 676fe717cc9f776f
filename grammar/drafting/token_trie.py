"""Texts as tries of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from overlap_spec.steps import Int64s, Part


@dataclass(frozen=True)
class TokenTrie:
    """Texts as a tree of tokens behind a prompt, for one pass of the target.

    ``tokens``, ``parents`` (an earlier node, or -1: the prompt's end), ``depths`` (from 1 on):
    int64 ``(n,)``; what is below a node comes right after it. ``texts``, ``ends``: int64 ``(m,)``:
    numbers of texts, and each one's last node.
    """

    tokens: Int64s
    parents: Int64s
    depths: Int64s
    texts: Int64s
    ends: Int64s

    @cached_property
    def sizes(self) -> Int64s:
        """int64 ``(n,)``: nodes below each one."""
        sizes = np.zeros(len(self.tokens), np.int64)
        for node in range(len(self.tokens) - 1, -1, -1):
            if self.parents[node] >= 0:
                sizes[self.parents[node]] += sizes[node] + 1
        return sizes

    @cached_property
    def children(self) -> Mapping[tuple[int, int], int]:
        """(node, or -1 for the prompt's end, and a token) → the node of that token after it."""
        pairs = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {pair: node for node, pair in enumerate(pairs)}

    def follow(self, node: int | None, tokens: Sequence[int]) -> int | None:
        """The node that ``tokens`` lead to from ``node``; None where none does."""
        for token in tokens:
            if node is None:
                return None
            node = self.children.get((node, token))
        return node

    def left(self, node: int) -> int:
        """Nodes that can be left behind what is known: behind the first token at least."""
        return int(self.sizes[node] if node >= 0 else self.sizes[self.parents < 0].max())

    @property
    def size(self) -> int:
        """Nodes, the prompt's end included."""
        return 1 + len(self.tokens)

    def parts(self, base: int) -> dict[str, Part]:
        """As :class:`GrammarMap`: of each node its token, parent, depth, and the nodes below it."""
        table = np.array([self.tokens, self.parents + 1 + base, self.depths, self.sizes]).T
        end = np.array([[-1, -1, 0, len(self.tokens)]])
        return {"tries": (base, np.concatenate([end, table]))}

    def path(self, node: int) -> list[int]:
        """The nodes down to ``node``, which is the last."""
        found = []
        while node >= 0:
            found.append(node)
            node = int(self.parents[node])
        return found[::-1]


def make_tries(cuts: Sequence[Sequence[int]], width: int) -> list[TokenTrie]:
    """Tries of at most ``width`` nodes with every text in one of them; as few as sorting gives.

    Args:
        cuts: Tokens of each text, all different, none of more than ``width``.
    """
    tries: list[TokenTrie] = []
    trie = _Growing()
    for number in sorted(range(len(cuts)), key=lambda n: list(cuts[n])):
        if trie.missing(cuts[number]) + len(trie.tokens) > width:
            tries.append(trie.done())
            trie = _Growing()
        trie.add(number, cuts[number])
    return [*tries, trie.done()]


class _Growing:
    """A trie under construction."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._texts: list[int] = []
        self._ends: list[int] = []
        self._child: dict[tuple[int, int], int] = {}

    def missing(self, tokens: Sequence[int]) -> int:
        """Nodes that ``tokens`` would add."""
        node = -1
        for at, token in enumerate(tokens):
            child = self._child.get((node, token))
            if child is None:
                return len(tokens) - at
            node = child
        return 0

    def add(self, number: int, tokens: Sequence[int]) -> None:
        """Add the text of a number."""
        node = -1
        for depth, token in enumerate(tokens, 1):
            child = self._child.get((node, token))
            if child is None:
                child = self._child[node, token] = len(self.tokens)
                self.tokens.append(token)
                self._parents.append(node)
                self._depths.append(depth)
            node = child
        self._texts.append(number)
        self._ends.append(node)

    def done(self) -> TokenTrie:
        """The trie."""
        fields = self.tokens, self._parents, self._depths, self._texts, self._ends
        return TokenTrie(*(np.array(field, np.int64) for field in fields))
