"""The texts of a choice as tries of tokens, for the passes that weigh them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.drafting.few_texts import few_texts
from overlap_spec.grammar.drafting.text_tokens import TextTokens
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.steps import TRIE_NODES, TokenTrie, WeighedChoices

# Nodes of one pass, and of all passes of a request.
PASS_NODES, MOST_NODES = 256, 4096
K = TypeVar("K")
V = TypeVar("V")
# Choices whose tokens are kept.
CACHED = 64


class ChoiceTokens:
    """Cuts choices into tokens, one way each: the tokenizer's. Safe to share between threads.

    Args:
        vocabulary: Of the grammars.
        encode: Text → tokens, without special ones.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> None:
        self._cut, self._stop_ids = TextTokens(vocabulary, encode), vocabulary.stop_ids
        self._lock = threading.Lock()
        self._known: dict[str, tuple[tuple[str, ...], list[list[int]]]] = {}
        self._tries: dict[tuple[str, str], TokenTrie | None] = {}

    def weighed(self, grammar: Grammar, room: int) -> WeighedChoices:
        """What the target is to weigh for a choice.

        Args:
            grammar: A choice.
            room: Tokens that fit behind the prompt.

        Raises:
            GrammarError: a text has no tokens of exactly its bytes, or does not fit; there are more
                tokens than are weighed.
        """
        texts, cuts = self._cuts(grammar.source)
        width = min(PASS_NODES, room)
        for text, tokens in zip(texts, cuts, strict=True):
            if len(tokens) > width:
                raise GrammarError(
                    f"choice {text[:40]!r} takes {len(tokens)} tokens, and at most {width} of one "
                    "text can be weighed behind this prompt",
                    "choice",
                )
        tries = make_tries(cuts, width)
        total = sum(len(trie.tokens) for trie in tries)
        if total > MOST_NODES:
            raise GrammarError(
                f"{len(texts)} choices take {total} tokens to weigh, and at most {MOST_NODES} are "
                "weighed: send fewer or shorter texts, or leave out probabilities and faithful",
                "choice",
            )
        return WeighedChoices(texts, tuple(tries), tuple(self._stop_ids), grammar.faithful)

    def trie(self, grammar: Grammar) -> TokenTrie | None:
        """The trie of the whole outputs of a grammar that has few; None of any other.

        For drafts alone: texts that the tokenizer cannot cut are left out.
        """
        key = grammar.kind, grammar.source
        if key not in self._tries:
            texts = few_texts(grammar)
            cuts = [self._cut(text) for text in texts]
            found = make_tries([cut for cut in cuts if cut], TRIE_NODES) if any(cuts) else []
            # A node is the prompt's end.
            fit = len(found) == 1 and len(found[0].tokens) < TRIE_NODES
            self._keep(self._tries, key, found[0] if fit else None)
        return self._tries[key]

    def _keep(self, known: dict[K, V], key: K, value: V) -> None:
        with self._lock:
            if len(known) >= CACHED and key not in known:
                del known[next(iter(known))]
            known[key] = value

    def _cuts(self, source: str) -> tuple[tuple[str, ...], list[list[int]]]:
        known = self._known.get(source)
        if known is not None:
            return known
        texts = tuple(json.loads(source))
        cuts = [self._cut(text) for text in texts]
        for text, tokens in zip(texts, cuts, strict=True):
            if not tokens:
                raise GrammarError(
                    f"choice {text[:40]!r} cannot be weighed: this tokenizer has no tokens of "
                    "exactly its bytes",
                    "choice",
                )
        self._keep(self._known, source, (texts, cuts))
        return texts, cuts


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
