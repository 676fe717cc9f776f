"""The ways in which forced text can be cut into tokens, for drafters that weigh them.

Masks allow every cut, and where a model writes what it would not have written by itself, it cuts
otherwise than its tokenizer. But few tokens are possible at any place: a drafter that chooses among
these alone is right far more often than one that chooses among all.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.types import CUT_BYTES, CUT_TOKENS

Entry = TypeVar("Entry")
# Texts whose cuts are kept, some 5 MB, and places in texts: some 5 MB.
CACHED, CACHED_PLACES = 4096, 32768
LENGTH_BITS = 5
LONGEST_BYTES = (1 << LENGTH_BITS) - 1
# A table without any.
NOTHING = np.full(CUT_BYTES * CUT_TOKENS, -1, np.int32).tobytes()


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
        # What lies behind a place, as far as a token can reach → its entries.
        self._places: dict[bytes, bytes] = {}

    def of(self, text: bytes) -> npt.NDArray[np.int32]:
        """int32 ``(CUT_BYTES * CUT_TOKENS,)``, the numbers from byte 0 on, then from byte 1 on, and
        so forth; -1 where there are no more."""
        text = text[: CUT_BYTES + LONGEST_BYTES]
        found = self._known.get(text)
        if found is None:
            known, places = self._places, range(min(len(text), CUT_BYTES))
            behind = [text[place : place + LONGEST_BYTES] for place in places]
            entries = b"".join([known.get(part) or self._find(part) for part in behind])
            found = np.frombuffer(entries + NOTHING[len(entries) :], np.int32)
            self._keep(self._known, CACHED, text, found)
        return found

    def _find(self, text: bytes) -> bytes:
        """The entries of a place with this text behind it."""
        lengths = (1, *self._lengths.get(text[:2], ()))
        pieces = (self._numbers.get(text[:length]) for length in lengths if length <= len(text))
        numbers = [number for number in pieces if number is not None]
        if len(numbers) > CUT_TOKENS:
            half = CUT_TOKENS // 2
            numbers = numbers[:half] + numbers[-half:]
        numbers += [-1] * (CUT_TOKENS - len(numbers))
        found = np.array(numbers, np.int32).tobytes()
        self._keep(self._places, CACHED_PLACES, text, found)
        return found

    def _keep(self, known: dict[bytes, Entry], most: int, text: bytes, found: Entry) -> None:
        with self._lock:
            if len(known) >= most and text not in known:
                del known[next(iter(known))]
            known[text] = found
