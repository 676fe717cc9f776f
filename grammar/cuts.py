"""The ways in which forced text can be cut into tokens, for drafters that weigh them.

Masks allow every cut, and where a model writes what it would not have written by itself, it cuts
otherwise than its tokenizer. But few tokens are possible at any place: a drafter that chooses among
these alone is right far more often than one that chooses among all.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.types import CUT_BYTES, CUT_TOKENS

# Texts whose cuts are kept: some 5 MB.
CACHED = 4096
LENGTH_BITS = 5
LONGEST_BYTES = (1 << LENGTH_BITS) - 1


class Cuts:
    """Finds the tokens with which forced text can go on, from each of its first bytes on.

    A number is ``token << LENGTH_BITS | bytes``. Tokens that go on behind the text are left out:
    whether they are legal, the text does not tell. Safe to share between threads.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._numbers: dict[bytes, int] = {}
        # By two bytes: the lengths of the tokens that begin with them, ascending.
        lengths: dict[bytes, set[int]] = {}
        for token, text in enumerate(vocabulary.text):
            if 0 < len(text) <= LONGEST_BYTES:
                self._numbers.setdefault(text, token << LENGTH_BITS | len(text))
                if len(text) > 1:
                    lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found) for start, found in lengths.items()}
        self._lock = threading.Lock()
        self._known: dict[bytes, npt.NDArray[np.int32]] = {}

    def of(self, text: bytes) -> npt.NDArray[np.int32]:
        """int32 ``(CUT_BYTES * CUT_TOKENS,)``, the numbers from byte 0 on, then from byte 1 on, and
        so forth; -1 where there are no more."""
        text = text[: CUT_BYTES + LONGEST_BYTES]
        found = self._known.get(text)
        if found is None:
            found = self._find(text)
            with self._lock:
                if len(self._known) >= CACHED and text not in self._known:
                    del self._known[next(iter(self._known))]
                self._known[text] = found
        return found

    def _find(self, text: bytes) -> npt.NDArray[np.int32]:
        found: list[int] = []
        for start in range(min(len(text), CUT_BYTES)):
            begins = text[start : start + 2]
            ends = [start + length for length in (1, *self._lengths.get(begins, ()))]
            pieces = (self._numbers.get(text[start:end]) for end in ends if end <= len(text))
            numbers = [number for number in pieces if number is not None]
            if len(numbers) > CUT_TOKENS:
                half = CUT_TOKENS // 2
                numbers = numbers[:half] + numbers[-half:]
            found += numbers + [-1] * (CUT_TOKENS - len(numbers))
        found += [-1] * (CUT_BYTES * CUT_TOKENS - len(found))
        return np.array(found, np.int32)
