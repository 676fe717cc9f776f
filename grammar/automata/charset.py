"""Sets of Unicode code points."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
# Surrogates are not characters: UTF-8 cannot encode them.
ALL: Ranges = ((0, 0xD7FF), (0xE000, _LAST))
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
# ECMAScript and Python disagree on a few spaces: `\s` matches what both call a space, `\S`
# excludes what either does.
SPACE: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
SPACE_WIDE: Ranges = (*SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))
# First and last code point of each length in UTF-8.
UTF8_LENGTHS: Ranges = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, _LAST))

LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))


def union(sets: Iterable[Ranges]) -> Ranges:
    """Code points in at least one of the sets, as merged ascending ranges."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


@lru_cache(8192)
def intersect(left: Ranges, right: Ranges) -> Ranges:
    """Code points in both sets."""
    pairs = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return union([tuple((low, high) for low, high in pairs if low <= high)])


@lru_cache(8192)
def negate(ranges: Ranges) -> Ranges:
    """Characters that are not in the set."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in union([ranges]):
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        gaps.append((start, _LAST))
    return intersect(tuple(gaps), ALL)
