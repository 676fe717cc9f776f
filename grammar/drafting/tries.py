"""Texts as tries of tokens, cut as the tokenizer does: of the few outputs that a grammar has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from overlap_spec.grammar.drafting.few_texts import few_texts
from overlap_spec.grammar.drafting.text_tokens import TextTokens
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.steps import TRIE_NODES, TokenTrie

# Grammars whose tries are kept.
CACHED = 64


class OutputTries:
    """The tries of grammars that have few outputs. Safe to share between threads.

    Args:
        vocabulary: Of the grammars.
        encode: Text → tokens, without special ones.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> None:
        self._cut, self._lock = TextTokens(vocabulary, encode), threading.Lock()
        self._known: dict[tuple[str, str], TokenTrie | None] = {}

    def of(self, grammar: Grammar) -> TokenTrie | None:
        """The trie of the whole outputs of a grammar that has few; None of any other.

        For drafts alone: texts that the tokenizer cannot cut are left out.
        """
        key = grammar.kind, grammar.source
        if key not in self._known:
            cuts = [cut for text in few_texts(grammar) if (cut := self._cut(text))]
            found = make_tries(cuts, TRIE_NODES) if cuts else []
            # A node is the prompt's end.
            fit = len(found) == 1 and len(found[0].tokens) < TRIE_NODES
            with self._lock:
                if len(self._known) >= CACHED:
                    del self._known[next(iter(self._known))]
                self._known[key] = found[0] if fit else None
        return self._known.get(key)


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
