"""Where a text stands in its JSON, and which items and keys it has so far.

Reads bytes that a grammar allows, so it checks no syntax. What to look at comes from
`lowering.distinct`: arrays whose items, and objects whose keys, must differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from overlap_spec.grammar.schemas.source import key_of, loads

# What comes next, or is being read: a value, the inside of a string value, a number or word, what
# follows a value, a key or the end, the inside of a key, a colon.
VALUE, STRING, WORD, AFTER, KEY_START, KEY, COLON = range(7)
BLANK = frozenset(b" \t\n\r")
_QUOTE, _SLASH, _COMMA, _OPEN, _CLOSE, _BRACE, _UNBRACE = b'"\\,[]{}'
ENDS = frozenset(b",]} \t\n\r")


class Node(msgspec.Struct, array_like=True):
    """A place in a schema; index 0 of a plan is one where there is nothing to look at.

    Args:
        items: Places of the first items of an array.
        named: Places of an object's members by name.
        endless: First bytes of items that go on to infinitely many values from wherever they are
            (`[`, `{`, `"`).
        exhaustible: Whether the items may all be taken.
    """

    distinct_items: bool = False
    distinct_keys: bool = False
    items: list[int] = []
    rest: int = 0
    named: dict[str, int] = {}
    other: int = 0
    endless: bytes = b""
    exhaustible: bool = False


class Frame(NamedTuple):
    """An open array or object.

    Args:
        node: Its place in the plan.
        start: Offset of its bracket.
        done: Items or members that are complete.
        seen: Keys of the values of the items, or the keys, so far, if they must differ.
        texts: The texts of the items, without white space between tokens.
        legal: Of an array whose items must differ: what these may go on with, by their number,
            their text and whether that ends in an open number or word; found when it is needed.
    """

    outer: Frame | None
    node: int
    is_array: bool
    start: int
    done: int = 0
    seen: frozenset[str] | None = None
    texts: tuple[bytes, ...] = ()
    legal: dict[tuple[int, bytes, bool], bytes] | None = None


class Place(NamedTuple):
    """A position in a text.

    Args:
        mode: See above.
        escaped: Whether the last byte of a string or key was a backslash.
        node: The place in the plan of the value that comes next or is being read.
        start: Offset of the value, key or word that is being read.
    """

    mode: int = VALUE
    escaped: bool = False
    frame: Frame | None = None
    node: int = 1
    start: int = 0


class Reader:
    """Reads texts by the nodes of a grammar.

    Args:
        nodes: Node 0 looks at nothing; node 1 is the whole text.
        blanks: Whether white space between tokens is free.
    """

    def __init__(self, nodes: Sequence[Node], blanks: bool) -> None:
        self.nodes, self.blanks = tuple(nodes), blanks

    def step(self, place: Place, text: bytes | bytearray, at: int) -> Place | None:
        """The place after one more byte; None if it completes a repeated item or key.

        Args:
            text: The whole text, at least up to the byte.
        """
        byte, mode = text[at], place.mode
        if mode in (STRING, KEY):
            if place.escaped:
                return place._replace(escaped=False)
            if byte == _SLASH:
                return place._replace(escaped=True)
            if byte != _QUOTE:
                return place
            return self._end(place, text, at + 1) if mode == STRING else self._key(place, text, at)
        if mode == WORD:
            if byte not in ENDS:
                return place
            after = self._end(place, text, at)
            return None if after is None else self.step(after, text, at)
        if byte in BLANK:
            return place
        if byte in (_CLOSE, _UNBRACE):
            frame = place.frame
            assert frame is not None
            closed = Place(AFTER, False, frame.outer, frame.node, frame.start)
            return self._end(closed, text, at + 1)
        if mode == COLON:
            return place._replace(mode=VALUE)
        if mode == AFTER:
            frame = place.frame
            assert frame is not None
            if frame.is_array:
                return place._replace(mode=VALUE, node=self._item(frame))
            return place._replace(mode=KEY_START)
        if byte == _QUOTE:
            return place._replace(mode=STRING if mode == VALUE else KEY, start=at)
        if byte in (_OPEN, _BRACE):
            return self._opened(place, byte == _OPEN, at)
        return place._replace(mode=WORD, start=at)

    def _opened(self, place: Place, is_array: bool, at: int) -> Place:
        node = self.nodes[place.node]
        must_differ = node.distinct_items if is_array else node.distinct_keys
        seen = frozenset[str]() if must_differ else None
        legal = dict[tuple[int, bytes, bool], bytes]() if is_array and must_differ else None
        frame = Frame(place.frame, place.node, is_array, at, 0, seen, (), legal)
        if is_array:
            return Place(VALUE, False, frame, self._item(frame), at)
        return Place(KEY_START, False, frame, 0, at)

    def _item(self, frame: Frame) -> int:
        node = self.nodes[frame.node]
        return node.items[frame.done] if frame.done < len(node.items) else node.rest

    def _key(self, place: Place, text: bytes | bytearray, at: int) -> Place | None:
        frame = place.frame
        assert frame is not None
        node = self.nodes[frame.node]
        if frame.seen is None and not node.named:
            return Place(COLON, False, frame, node.other, at)
        key = json.loads(bytes(text[place.start : at + 1]))
        if frame.seen is not None:
            if key in frame.seen:
                return None
            frame = frame._replace(seen=frame.seen | {key})
        return Place(COLON, False, frame, node.named.get(key, node.other), at)

    def _end(self, place: Place, text: bytes | bytearray, end: int) -> Place | None:
        """The place after a value that began at `place.start`, inside `place.frame`."""
        frame = place.frame
        if frame is None:
            return Place(AFTER, False, None, 0, end)
        if frame.is_array and frame.seen is not None:
            item = bytes(text[place.start : end])
            key = key_of(loads(item.decode()))
            if key in frame.seen:
                return None
            texts = (*frame.texts, self.spelled(item))
            frame = frame._replace(seen=frame.seen | {key}, texts=texts)
        return Place(AFTER, False, frame._replace(done=frame.done + 1), 0, end)

    def spelled(self, text: bytes) -> bytes:
        """A part of a text without white space between its tokens, if that is free."""
        if not self.blanks:
            return text
        found, inside, escaped = bytearray(), False, False
        for byte in text:
            if inside or byte not in BLANK:
                found.append(byte)
            if inside and not escaped and byte == _SLASH:
                escaped = True
                continue
            if byte == _QUOTE and not escaped:
                inside = not inside
            escaped = False
        return bytes(found)


def watched(place: Place) -> Frame | None:
    """The innermost open array or object whose items or keys must differ."""
    frame = place.frame
    while frame is not None and frame.seen is None:
        frame = frame.outer
    return frame


def item_start(place: Place, frame: Frame, length: int) -> int:
    """Where the item of an open array that is being read begins; `length` if none is."""
    inner, outer = place.frame, None
    while inner is not frame:
        assert inner is not None
        inner, outer = inner.outer, inner
    if outer is not None:
        return outer.start
    return place.start if place.mode in (STRING, WORD) else length
