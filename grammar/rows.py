"""Mask rows: int32 `(words,)`, one bit a vocabulary entry; 1: the token is allowed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.int32]
# The word with each of its bits alone.
BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


def packed(flags: npt.NDArray[np.bool_], words: int) -> Row:
    """A row of flags.

    Args:
        flags: bool `(n,)`, at most as many as the row has bits; the other bits are 0.
    """
    bits = np.zeros(words * 4, np.uint8)
    packed = np.packbits(flags, bitorder="little")
    bits[: len(packed)] = packed
    return bits.view("<i4").astype(np.int32, copy=False)


def row_of(tokens: Iterable[int], words: int) -> Row:
    """The row of some tokens."""
    flags = np.zeros(words * 32, np.bool_)
    flags[list(tokens)] = True
    return packed(flags, words)


def flags_of(row: Row) -> npt.NDArray[np.bool_]:
    """bool `(words * 32,)`: the flags of a row."""
    return np.unpackbits(row.view(np.uint8), bitorder="little").view(np.bool_)


def tokens_of(row: Row) -> npt.NDArray[np.int64]:
    """int64 `(n,)`: the tokens of a row, in order."""
    words = np.flatnonzero(row)
    at, bit = np.nonzero(flags_of(row[words]).reshape(-1, 32))
    return words[at] * 32 + bit


def which_allowed(row: Row, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """bool `(n,)`: which of some tokens a row allows."""
    found: npt.NDArray[np.bool_] = (row[tokens >> 5] & BITS[tokens & 31]) != 0
    return found


def allowed(row: Row, token: int) -> bool:
    """Whether a row allows a token; tokens outside the row are not allowed."""
    return 0 <= token < len(row) * 32 and bool((int(row[token >> 5]) >> (token & 31)) & 1)
