"""Runs: the tokens of text that a grammar forces, for drafts.

Where the bytes that come next can be nothing else, they are tokenised as the model's own tokenizer
would: longest-match tokens are often not its. A run is a guess all the same: masks allow every cut
of these bytes into tokens, and a model that writes what it would not have written by itself cuts
them in its own way. So what it chose where it had the same bytes before (`guesses.py`) comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.contract import Links, Matcher, Row
from overlap_spec.grammar.drafting.guesses import Guesses
from overlap_spec.grammar.drafting.text_tokens import TextTokens
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.steps import LOST

# Texts whose tokens are kept, and bytes of the longest: some 5 MB.
CACHED = 16384
LONGEST_BYTES = 256
# More than the bytes that may come next.
MAY_END = 1000
# Texts that may follow a run. Where one of them would change its last token, that is left out.
FOLLOWING = ("a", "0", '"')


class Openings(NamedTuple):
    """Where a tree's text was forced.

    ``refused``: drafts that the grammar forbids, or whose path it does. ``texts``: the forced
    bytes behind nodes. ``children``: of each node, by token, the likeliest first; empty where no
    text is forced. ``runs``: those behind nodes.
    """

    refused: int
    texts: Mapping[int, bytes]
    children: Mapping[int, Mapping[int, int]]
    runs: Mapping[int, list[int]]


NO_OPENINGS = Openings(0, {}, {}, {})


class ForcedRuns:
    """Finds the runs behind the nodes of draft trees; safe to share between threads.

    Args:
        vocabulary: Of the matchers.
        encode: Text → tokens, without special ones.
        tokens: Most tokens of a run that are of interest.
        weighed: Whether the drafter keeps to what is forced by itself.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Callable[[str], Sequence[int]],
        tokens: int,
        weighed: bool = False,
    ) -> None:
        self.weighed = weighed
        self._text, self._tokens = vocabulary.text, tokens
        self._encoded = TextTokens(vocabulary, encode)
        self._stops = frozenset(vocabulary.stop_ids)
        single = vocabulary.byte_tokens
        self._all_bytes = bool((single >= 0).all())
        words, bits = _by_words(single[single >= 0])
        stop_words, stop_bits = _by_words(np.array(vocabulary.stop_ids, np.int64))
        self._words = np.concatenate([words, stop_words])
        self._bits = np.concatenate([bits, stop_bits])
        self._weights = np.repeat([1, MAY_END], [len(words), len(stop_words)])
        self._lock = threading.Lock()
        self._known: dict[bytes, list[int]] = {}
        # By a text's last two tokens: whether what follows may change the last one.
        self._merges: dict[tuple[int, ...], bool] = {}

    def fill(
        self,
        matcher: Matcher,
        tokens: Links,
        first_child: Links,
        next_sibling: Links,
        rows: Row,
        runs: Row,
        guesses: Guesses,
    ) -> Openings:
        """Write the run behind each node of a tree; which nodes have one, their rows tell.

        The bytes of a node inside the run of its parent are the rest of that, and cost nothing. A
        node whose child is its run's first token has none: it is no accepted path's end if that
        token is chosen.

        Args:
            matcher: As it was when it filled ``rows``, by `Matcher.fill_tree` with this tree.
            runs: int32 ``(nodes, TOLD)``, completely overwritten: a run, -1 behind its end, then
                the node's state and its place in the trie, -1 where nothing is known.
        """
        runs.fill(-1)
        counts = np.bitwise_count(rows.take(self._words, 1) & self._bits)
        ahead: list[int] = counts.dot(self._weights).tolist()
        # Where the vocabulary has a token for every byte, one of these is legal if any token is.
        reached = ahead if self._all_bytes else [int(row.any()) for row in rows]
        if not reached[0]:
            return NO_OPENINGS
        drafted, child, sibling = tokens.tolist(), first_child.tolist(), next_sibling.tolist()
        # Nothing is reached behind a stop token, whether or not it is legal.
        ends = self._stops
        children = children_of(drafted, child, sibling)
        linked = sum(token not in ends for own in children.values() for token in own)
        refused = max(0, linked + 1 - sum(map(bool, reached)))
        states = self._tell_states(children, reached, runs, guesses)
        forced = [node for node, count in enumerate(ahead) if count <= 1 and reached[node]]
        if not forced:
            return Openings(refused, {}, {}, {})
        told: dict[int, list[int]] = {}
        texts = self._texts(matcher, forced, children, states, guesses)
        for node, text in texts.items():
            run = self.tokens(text, guesses)
            if run and run[0] not in children.get(node, ()):
                runs[node, : len(run)] = run
                told[node] = run
        return Openings(refused, texts, children, told)

    def _tell_states(
        self,
        children: Mapping[int, Mapping[int, int]],
        reached: Sequence[int],
        runs: Row,
        guesses: Guesses,
    ) -> dict[int, int]:
        """Write where all nodes stand that are known, and give their states."""
        standing, trie, states = guesses.standing, guesses.standing.trie, dict[int, int]()
        if standing.table is None and trie is None:
            return states
        # A node comes before its children.
        edges = [
            (node, token, child)
            for node, own in children.items()
            for token, child in own.items()
            if reached[child]
        ]
        if standing.table is not None:
            states[0] = standing.state
            for node, token, child in edges:
                if node in states:
                    states[child] = standing.after(states[node], self._text[token])
            nodes = list(states)
            runs[nodes, self._tokens] = [standing.number(states[node]) for node in nodes]
        if trie is not None:
            places = {0: standing.node}
            for node, token, child in edges:
                places[child] = trie.follow(places.get(node), (token,))
            nodes = list(places)
            runs[nodes, self._tokens + 1] = [standing.place(places[node]) for node in nodes]
        return states

    def learn(self, openings: Openings, chosen: Sequence[int], guesses: Guesses) -> None:
        """Note what a request's model chose where text was forced.

        Args:
            chosen: The tokens that followed the root.
        """
        told, guesses.told = guesses.told, []
        if not openings.texts:
            return
        node = 0
        for depth, token in enumerate(map(int, chosen)):
            text, children = openings.texts.get(node), openings.children.get(node, {})
            if text:
                guesses.note(text, token, next(iter(self.canonical(text)), None))
                # What a run does not tell, the drafter guesses by itself.
                if children and depth >= len(told):
                    guesses.judge(token == next(iter(children)))
            if token not in children:
                run = openings.runs.get(node, [])
                guesses.told = run[1:] if run[:1] == [token] else []
                return
            told = told if told[depth : depth + 1] == [token] else []
            node = children[token]

    def read(self, chosen: Sequence[int], guesses: Guesses) -> None:
        """Follow a request's tokens in its grammar's table."""
        for token in chosen:
            guesses.standing.read(token, self._text[token])

    def tokens(self, text: bytes, guesses: Guesses) -> list[int]:
        """The likely tokens of forced bytes, at most as many as are of interest.

        They end where a guess would be worse than the drafter's own.
        """
        found: list[int] = []
        canonical: list[int] | None = None
        while text and len(found) < self._tokens:
            token, kind = guesses.find(text)
            if not guesses.trusts(kind):
                break
            if kind == 0:
                canonical = self.canonical(text) if canonical is None else canonical
                if not canonical:
                    break
                token, *canonical = canonical
            elif canonical is not None:
                canonical = canonical[1:] if canonical[:1] == [token] else None
            found.append(token)
            text = text[len(self._text[token]) :]
        return found

    def canonical(self, text: bytes) -> list[int]:
        """The tokenizer's tokens of forced bytes, as far as what follows will not change them."""
        text = text[: LONGEST_BYTES + 1]
        known = self._known.get(text)
        if known is None:
            known = self._canonical(text)
            with self._lock:
                if len(self._known) >= CACHED and text not in self._known:
                    del self._known[next(iter(self._known))]
                self._known[text] = known
        return known

    def _texts(
        self,
        matcher: Matcher,
        forced: list[int],
        children: dict[int, dict[int, int]],
        states: Mapping[int, int],
        guesses: Guesses,
    ) -> dict[int, bytes]:
        """The forced bytes behind nodes that have such, by node: the table's, where it has any."""
        above = {
            child: (node, token) for node, own in children.items() for token, child in own.items()
        }
        texts: dict[int, bytes] = {}
        for node in forced:
            if node and node not in above:
                continue
            parent, token = above.get(node, (0, 0))
            own, outer = self._text[token] if node else b"", texts.get(parent, b"")
            if node and len(outer) > len(own) and outer.startswith(own):
                texts[node] = outer[len(own) :]
            else:
                told = guesses.standing.forced(states.get(node, LOST), LONGEST_BYTES + 1)
                texts[node] = told or matcher.forced_bytes(_path(node, above))
        return texts

    def _canonical(self, forced: bytes) -> list[int]:
        whole = len(forced) <= LONGEST_BYTES
        text = _characters(forced[:LONGEST_BYTES])
        found = self._encoded(text)
        # What follows is free, and may be one token with the end of this.
        return found if whole and not self._may_merge(tuple(found[-2:])) else found[:-1]

    def _may_merge(self, last: tuple[int, ...]) -> bool:
        """Whether text behind these two tokens may change the second."""
        known = self._merges.get(last)
        if known is None:
            text = _characters(b"".join(self._text[token] for token in last))
            wanted = self._encoded(text)
            known = any(self._encoded(text + more)[: len(wanted)] != wanted for more in FOLLOWING)
            if len(self._merges) < CACHED:
                self._merges[last] = known
        return known


def _by_words(tokens: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Row]:
    """Which words of a mask row have the bits of ``tokens``, and these bits."""
    words = np.unique(tokens >> 5)
    bits = np.zeros(len(words), np.uint32)
    np.bitwise_or.at(bits, np.searchsorted(words, tokens >> 5), np.uint32(1) << (tokens & 31))
    return words, bits.view(np.int32)


def children_of(
    tokens: list[int], first_child: list[int], next_sibling: list[int]
) -> dict[int, dict[int, int]]:
    """Of each node that has any: its children by token."""
    found: dict[int, dict[int, int]] = {}
    for node, child in enumerate(first_child):
        while child >= 0:
            found.setdefault(node, {})[tokens[child]] = child
            child = next_sibling[child]
    return found


def _path(node: int, above: dict[int, tuple[int, int]]) -> list[int]:
    """The tokens from the root's child down to a node."""
    path = []
    while node in above:
        node, token = above[node]
        path.append(token)
    return path[::-1]


def _characters(text: bytes) -> str:
    """The whole characters at a text's start."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
