"""How long a text can be that a grammar forces: a bound, by its rules.

What is forced is no longer than the shortest way to the grammar's end: in each rule that waits for
another one's end, the shortest way to its own. A rule waits once; one of a circle of calls at most
once for each byte of the text so far, since where it waits twice behind one byte, the shortest way
leaves out what lies between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from overlap_spec.grammar.automata.regex_ast import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Ref,
    references,
)
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth

# Longer is not told apart.
MOST = 2**40


class ForcedLength(NamedTuple):
    """A bound, in bytes: ``fixed``, and ``each`` for every byte of the text so far."""

    fixed: int
    each: int

    def behind(self, size: int) -> int:
        """What can be forced behind a text of ``size`` bytes."""
        return self.fixed + self.each * (size + 1)

    def packed(self, body: bytes) -> bytes:
        """The bytes of a grammar with its bound before them."""
        return b"%d %d\n%b" % (*self, body)


def unpacked(data: bytes) -> tuple[ForcedLength, bytes]:
    """What `ForcedLength.packed` wrote."""
    head, _, body = data.partition(b"\n")
    fixed, each = map(int, head.split())
    return ForcedLength(fixed, each), body


UNKNOWN = ForcedLength(MOST, 0)


@bounded_depth()
def forced_length(syntax: Syntax) -> ForcedLength:
    """The bound of a grammar in rules alone.

    Raises:
        GrammarError: it is nested too deep.
    """
    walk = _Walk(_shortest(syntax))
    waits: dict[str, int] = {}
    for name, body in syntax.rules.items():
        walk.waits = 0
        walk.add(body, 0)
        waits[name] = walk.waits
    circling = _circling(syntax)
    each = sum(waits[name] for name in circling)
    return ForcedLength(
        min(MOST, walk.longest + sum(waits.values()) - each),
        min(MOST, each),
    )


def _shortest(syntax: Syntax) -> dict[str, int]:
    """Bytes of each rule's shortest text."""
    found = dict.fromkeys(syntax.rules, MOST)
    grown = True
    while grown:
        grown = False
        # What is referred to stands behind: one pass does, except for circles.
        for name in reversed(syntax.rules):
            size = min(MOST, _size(syntax.rules[name], found))
            if size < found[name]:
                found[name], grown = size, True
    return found


def _size(node: Node, rules: Mapping[str, int]) -> int:
    """Bytes of an expression's shortest text."""
    if isinstance(node, CharClass):
        return len(chr(node.members[0][0]).encode()) if node.members else MOST
    if isinstance(node, Ref):
        return rules[node.name]
    if isinstance(node, Concat):
        return sum(_size(part, rules) for part in node.parts)
    if isinstance(node, Alternation):
        return min((_size(way, rules) for way in node.ways), default=MOST)
    return node.least * _size(node.body, rules) if node.least else 0


class _Walk:
    """Walks rules, and notes the longest of the shortest ways to their ends.

    Attributes:
        longest: From a character.
        waits: From behind a call.
    """

    def __init__(self, shortest: Mapping[str, int]) -> None:
        self._shortest = shortest
        self.longest = self.waits = 0

    def add(self, node: Node, after: int) -> int:
        """Note an expression with ``after`` bytes behind it, and give its shortest text's."""
        if isinstance(node, CharClass):
            size = _size(node, self._shortest)
            self.longest = max(self.longest, size + after)
            return size
        if isinstance(node, Ref):
            self.waits = max(self.waits, after)
            return self._shortest[node.name]
        if isinstance(node, Concat):
            total = 0
            for part in reversed(node.parts):
                total += self.add(part, after + total)
            return total
        if isinstance(node, Alternation):
            return min((self.add(way, after) for way in node.ways), default=MOST)
        more = max(node.least - 1, 0) * _size(node.body, self._shortest)
        turn = self.add(node.body, after + more)
        return more + turn if node.least else 0


def _circling(syntax: Syntax) -> frozenset[str]:
    """Rules that call each other in circles, and those on a way from one circle to another."""
    calls = {name: references(syntax.rules[name]) & syntax.recursive for name in syntax.recursive}
    callers = dict.fromkeys(calls, 0)
    for called in calls.values():
        for name in called:
            callers[name] += 1
    ready = [name for name, count in callers.items() if not count]
    left = set(calls)
    while ready:
        name = ready.pop()
        left.discard(name)
        for other in calls[name]:
            callers[other] -= 1
            if not callers[other]:
                ready.append(other)
    return frozenset(left)
