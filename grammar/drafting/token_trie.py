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
        if len(cuts[number]) - trie.known(cuts[number])[1] + len(trie.nodes) > width:
            tries.append(trie.done())
            trie = _Growing()
        trie.add(number, cuts[number])
    return [*tries, trie.done()]


class _Growing:
    """A trie under construction: nodes (token, parent, depth), and the last one of each text."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int, int]] = []
        self._ends: list[tuple[int, int]] = []
        self._child: dict[tuple[int, int], int] = {}

    def known(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The last node on the way of ``tokens``, and its depth."""
        node = -1
        for depth, token in enumerate(tokens):
            if (node, token) not in self._child:
                return node, depth
            node = self._child[node, token]
        return node, len(tokens)

    def add(self, number: int, tokens: Sequence[int]) -> None:
        """Add the text of a number."""
        node, known = self.known(tokens)
        for depth, token in enumerate(tokens[known:], known + 1):
            self._child[node, token] = len(self.nodes)
            self.nodes.append((token, node, depth))
            node = len(self.nodes) - 1
        self._ends.append((number, node))

    def done(self) -> TokenTrie:
        """The trie."""
        nodes = np.array(self.nodes, np.int64).reshape(-1, 3).T.copy()
        return TokenTrie(*nodes, *np.array(self._ends, np.int64).reshape(-1, 2).T.copy())
