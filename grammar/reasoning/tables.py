"""How a vocabulary's tokens interact with the markers around thinking, and mask rows for that."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.contract import Row
from overlap_spec.grammar.reasoning.reply import GAP
from overlap_spec.grammar.vocabulary import Vocabulary

BREAK = GAP.encode()


class Patch(NamedTuple):
    """An edit of a mask row: `row[words] = row[words] & keep | put`."""

    words: npt.NDArray[np.int64]
    keep: npt.NDArray[np.int32]
    put: npt.NDArray[np.int32]

    @classmethod
    def of(cls, legal: Iterable[tuple[int, bool]]) -> Patch:
        """An edit that sets the bits of these tokens."""
        keep: dict[int, int] = {}
        put: dict[int, int] = {}
        for token, is_legal in legal:
            word, bit = token >> 5, 1 << (token & 31)
            keep[word] = keep.get(word, 0xFFFFFFFF) & ~bit
            put[word] = put.get(word, 0) | (bit if is_legal else 0)
        words = np.array(list(keep), np.int64)
        values = (np.array(list(each.values()), np.uint32).view(np.int32) for each in (keep, put))
        return cls(words, *values)

    def apply(self, row: Row) -> None:
        """Apply the edit to a row in place."""
        if len(self.words):
            row[self.words] = row[self.words] & self.keep | self.put

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in (self.words, self.keep, self.put))


class MarkerTokens:
    """Tables for a pair of markers, shared by all grammars with them.

    Attributes:
        free_row: int32 `(words,)`, all tokens of text; no stop token.
        crossing: For each state (bytes of `end` read so far), the tokens that complete `end`, each
            with the bytes after it.
        heads: For each state of `begin`, which may be empty, the tokens that continue it; see
            `_head`.
    """

    def __init__(self, vocabulary: Vocabulary, end: bytes, begin: bytes) -> None:
        self.vocabulary, self.end = vocabulary, end
        self.by_text = {text: token for token, text in enumerate(vocabulary.text) if text}
        self.free_row = vocabulary.text_row & ~vocabulary.stop_row
        last = end[-1:]
        closing = [(t, text) for t, text in enumerate(vocabulary.text) if last in text]
        self.crossing = [self._crossing(state, closing) for state in range(len(end))]
        self.breaks = [t for t, text in enumerate(vocabulary.text) if text.startswith(BREAK)]
        starts = {byte: list[int]() for byte in begin}
        for token, text in enumerate(vocabulary.text if begin else ()):
            if text and text[0] in starts:
                starts[text[0]].append(token)
        self.heads = [self._head(begin[at:], starts[byte]) for at, byte in enumerate(begin)]

    def scan(self, state: int, text: bytes) -> tuple[int, bytes | None]:
        """The state after more thinking, and the bytes after the marker if it is complete."""
        text = self.end[:state] + text
        found = text.find(self.end)
        if found >= 0:
            return 0, text[found + len(self.end) :]
        if self.end[:1] not in text:
            return 0, None
        longest = min(len(self.end) - 1, len(text))
        matched = (n for n in range(longest, 0, -1) if text.endswith(self.end[:n]))
        return next(matched, 0), None

    def segment(self, text: bytes) -> list[int] | None:
        """Tokens that make up a text, with the longest possible first; None if none do."""
        ways: list[list[int] | None] = [None] * len(text) + [[]]
        for start in range(len(text) - 1, -1, -1):
            for stop in range(len(text), start, -1):
                rest, token = ways[stop], self.by_text.get(text[start:stop])
                if rest is not None and token is not None:
                    ways[start] = [token, *rest]
                    break
        return ways[0]

    def _crossing(self, state: int, closing: list[tuple[int, bytes]]) -> dict[int, bytes]:
        read, end = self.end[:state], self.end
        seen = ((token, (read + text).partition(end)) for token, text in closing)
        return {token: rest for token, (_, found, rest) in seen if found}

    def _head(self, left: bytes, tokens: list[int]) -> dict[int, bytes | None]:
        """Tokens that go on in `begin`, each with the bytes after it, None where it goes on."""
        found: dict[int, bytes | None] = {}
        for token in tokens:
            text = self.vocabulary.text[token]
            if text.startswith(left):
                found[token] = text[len(left) :]
            elif left.startswith(text):
                found[token] = None
        return found


@lru_cache(maxsize=4)
def marker_tokens(vocabulary: Vocabulary, end: bytes, begin: bytes) -> MarkerTokens:
    """The tables of a pair of markers, cached."""
    return MarkerTokens(vocabulary, end, begin)
