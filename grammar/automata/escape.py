"""How characters are written: as they are, or escaped inside a JSON string."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from overlap_spec.grammar.automata.charset import ALL, Ranges, intersect, union
from overlap_spec.grammar.automata.regex_ast import (
    CharClass,
    Node,
    Repetition,
    alternate,
    concat,
    text,
)

Escape = Callable[[Ranges], Node | None]
"""Writes one character of a set; None for the empty set."""

_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_RAW: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))


def _one_of(chars: str) -> Node:
    return CharClass(union(((ord(char), ord(char)),) for char in chars))


_HEX = _one_of("0123456789ABCDEFabcdef")
_PAIR = concat(_one_of("89ABab"), _HEX, _HEX, text("\\u"), _one_of("Dd"), _one_of("CDEFcdef"))
# A pair of surrogate escapes is one character; half a pair is invalid.
_UNICODE = alternate(
    concat(_one_of("0123456789ABCEFabcef"), _HEX, _HEX, _HEX),
    concat(
        _one_of("Dd"), alternate(concat(_one_of("01234567"), _HEX, _HEX), concat(_PAIR, _HEX, _HEX))
    ),
)
ANY_CHAR = alternate(
    CharClass(_RAW),
    concat(text("\\"), alternate(_one_of('"\\/bfnrt'), concat(text("u"), _UNICODE))),
)
"""One character of a JSON string, in any form that JSON allows."""


def plain(members: Ranges) -> Node | None:
    """A character of the set, unescaped; None for the empty set."""
    inside = intersect(members, ALL)
    return CharClass(inside) if inside else None


@lru_cache(8192)
def in_json(members: Ranges) -> Node | None:
    """A character of the set inside a JSON string; None for the empty set.

    The set of all characters allows every form that JSON does. Any other set allows one form per
    character: unescaped if JSON allows that, else the short escape, else `\\u00xx`.
    """
    inside = intersect(members, ALL)
    if inside == ALL:
        return ANY_CHAR
    ways: list[Node] = []
    raw = intersect(inside, _RAW)
    if raw:
        ways.append(CharClass(raw))
    points = [p for p in (*range(0x20), 0x22, 0x5C) if intersect(inside, ((p, p),))]
    escapes: list[Node] = []
    short = "".join(_SHORT[point] for point in points if point in _SHORT)
    if short:
        escapes.append(_one_of(short))
    long = _long_escapes([point for point in points if point not in _SHORT])
    if long:
        escapes.append(long)
    if escapes:
        ways.append(concat(text("\\"), alternate(*escapes)))
    return alternate(*ways) if ways else None


@lru_cache(8192)
def once_in_json(members: Ranges) -> Node | None:
    """As `in_json`, with one form for each character of the set of all characters too."""
    inside = intersect(members, ALL)
    if inside != ALL:
        return in_json(inside)
    parts = (in_json((part,)) for part in ALL)
    return alternate(*(part for part in parts if part))


ANY_TEXT = Repetition(ANY_CHAR, 0, None)
"""The inside of any JSON string, without its quotes."""


def _long_escapes(points: list[int]) -> Node | None:
    ways = []
    for high in (0, 1):
        digits = "".join(f"{point & 15:x}" for point in points if point >> 4 == high)
        if digits:
            ways.append(concat(text(str(high)), _one_of(digits)))
    return concat(text("u00"), alternate(*ways)) if ways else None
