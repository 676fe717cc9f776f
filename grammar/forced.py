"""Runs: the tokens of text that a grammar forces, for drafts.

Where the bytes that come next can be nothing else, they are tokenised as the model's own tokenizer
would: longest-match tokens are often not its. A run is a guess all the same. The model may cut
these bytes into other tokens, and masks allow every cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.contract import Links, Matcher, Row
from overlap_spec.grammar.vocabulary import Vocabulary

# Runs that are kept, and bytes of the longest: with its tokens, a run takes half a kilobyte.
CACHED = 16384
LONGEST_BYTES = 256
# Texts that may follow a run. Where one of them would change its last token, that is left out.
FOLLOWING = ("a", "0", '"')
# What is encoded in front of a run where a tokenizer puts a space before every text.
FRONT = "\n"


class ForcedRuns:
    """Finds the runs behind the nodes of draft trees; safe to share between threads.

    Args:
        vocabulary: Of the matchers.
        encode: Text → tokens, without special ones.
        tokens: Most tokens of a run that are of interest.
    """

    def __init__(
        self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]], tokens: int
    ) -> None:
        self._text, self._encode, self._tokens = vocabulary.text, encode, tokens
        self._front = list(encode(FRONT))
        single = vocabulary.byte_tokens
        self._all_bytes = bool((single >= 0).all())
        single = single[single >= 0]
        self._words, self._bits = _by_words(single)
        self._stops = vocabulary.stop_ids
        self._stop_words, self._stop_bits = _by_words(np.array(vocabulary.stop_ids, np.int64))
        self._lock = threading.Lock()
        self._known: dict[bytes, npt.NDArray[np.int32]] = {}

    def fill(
        self,
        matcher: Matcher,
        tokens: Links,
        first_child: Links,
        next_sibling: Links,
        rows: Row,
        runs: Row,
    ) -> int:
        """Write the run behind each node of a tree; which nodes have one, their rows tell.

        The bytes of a node inside the run of its parent are the rest of that, and cost nothing.

        Args:
            matcher: As it was when it filled ``rows``, by `Matcher.fill_tree` with this tree.
            runs: int32 ``(nodes, tokens)``, completely overwritten; -1 behind a run's end.

        Returns:
            Drafts that the grammar forbids, or whose path it does.
        """
        runs.fill(-1)
        ahead = np.bitwise_count(rows[:, self._words] & self._bits).sum(1, dtype=np.int64)
        may_end = (rows[:, self._stop_words] & self._stop_bits).any(1)
        # Where the vocabulary has a token for every byte, one of these is legal if any token is.
        reached = np.asarray((ahead > 0) | may_end if self._all_bytes else rows.any(1))
        if not reached[0]:
            return 0
        open_nodes = np.flatnonzero(reached & (ahead <= 1) & ~may_end).tolist()
        if open_nodes:
            self._fill(matcher, tokens, first_child, next_sibling, open_nodes, runs)
        drafts = np.concatenate([first_child[first_child >= 0], next_sibling[next_sibling >= 0]])
        # Nothing is reached behind a stop token, whether or not it is legal.
        stops = sum(int((tokens[drafts] == stop).sum()) for stop in self._stops)
        return max(0, len(drafts) - stops + 1 - int(reached.sum()))

    def _fill(
        self,
        matcher: Matcher,
        tokens: Links,
        first_child: Links,
        next_sibling: Links,
        open_nodes: list[int],
        runs: Row,
    ) -> None:
        drafted, parents = tokens.tolist(), _parents(first_child.tolist(), next_sibling.tolist())
        behind: dict[int, bytes] = {}
        for node in open_nodes:
            parent = parents[node]
            if node and parent < 0:
                continue
            own = self._text[drafted[node]] if node else b""
            outer = behind.get(parent, b"")
            if len(outer) > len(own) and outer.startswith(own):
                found = outer[len(own) :]
            else:
                found = matcher.forced_bytes(_path(node, drafted, parents))
            behind[node] = found
            if found:
                runs[node] = self.tokens(found)

    def tokens(self, text: bytes) -> npt.NDArray[np.int32]:
        """The canonical tokens of forced bytes, int32 ``(tokens,)``, -1 behind their end."""
        known = self._known.get(text)
        if known is None:
            known = np.full(self._tokens, -1, np.int32)
            found = self._canonical(text)[: self._tokens]
            known[: len(found)] = found
            with self._lock:
                if len(self._known) >= CACHED:
                    del self._known[next(iter(self._known))]
                self._known[text] = known
        return known

    def _canonical(self, forced: bytes) -> list[int]:
        whole = len(forced) <= LONGEST_BYTES
        text = _characters(forced[:LONGEST_BYTES])
        found = self._encoded(text)
        # What follows is free, and may be one token with the end of this.
        merges = (self._encoded(text + more)[: len(found)] != found for more in FOLLOWING)
        return found if whole and not any(merges) else found[:-1]

    def _encoded(self, text: str) -> list[int]:
        """The tokens of a text inside another; none if the tokenizer does not keep its bytes."""
        found, wanted, front = list(self._encode(text)), text.encode(), self._front
        if self._bytes(found) == wanted:
            return found
        found = list(self._encode(FRONT + text))
        inside = found[len(front) :]
        return inside if found[: len(front)] == front and self._bytes(inside) == wanted else []

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        size = len(self._text)
        return b"".join(self._text[token] for token in tokens if token < size)


def _by_words(tokens: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Row]:
    """Which words of a mask row have the bits of ``tokens``, and these bits."""
    words = np.unique(tokens >> 5)
    bits = np.zeros(len(words), np.uint32)
    np.bitwise_or.at(bits, np.searchsorted(words, tokens >> 5), np.uint32(1) << (tokens & 31))
    return words, bits.view(np.int32)


def _parents(first_child: list[int], next_sibling: list[int]) -> list[int]:
    """Each node's parent, -1 of the root and of nodes to which no link leads."""
    parents = [-1] * len(first_child)
    for node, child in enumerate(first_child):
        while child >= 0:
            parents[child] = node
            child = next_sibling[child]
    return parents


def _path(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    """The tokens from the root's first child down to a node."""
    path = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def _characters(text: bytes) -> str:
    """The whole characters at a text's start."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
