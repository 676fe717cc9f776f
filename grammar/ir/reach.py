"""How long the texts of a grammar are, in bytes: bounds that take no network.

The shortest rest behind a text is no longer than the shortest ways to their ends of all rules that
wait in it, by the longest way down the calls.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import NamedTuple

from overlap_spec.grammar.automata.charset import UTF8_LENGTHS
from overlap_spec.grammar.automata.regex_ast import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Ref,
    Repetition,
    is_nullable,
    parts_of,
    references,
)
from overlap_spec.grammar.ir.calls import circles
from overlap_spec.grammar.ir.network import utf8_spans
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth

# Longer rests are not told apart.
ENDLESS = 2**30
_FIRSTS = [first for first, _ in UTF8_LENGTHS]
# The bytes that what stands before something may begin with, and whether it may be empty.
Before = tuple[frozenset[int], bool]


class Reach(NamedTuple):
    """How long texts of a grammar are, in bytes: bounds that take no network.

    Attributes:
        least: Of its shortest text.
        fixed, each, begins: The shortest rest behind a text that has `n` of the bytes ``begins`` is
            at most ``fixed``, and ``each`` for every one of `n + 1`.
    """

    least: int
    fixed: int
    each: int
    begins: bytes

    def longest(self, size: int) -> int:
        """Most bytes that are forced behind a text of ``size`` bytes."""
        return self.fixed + self.each * (size + 1)

    def behind(self, thinking: Thinking) -> Reach:
        """Of the same grammar behind a model's thinking."""
        before = len(thinking.end) + self.least
        least = self.least if thinking.begin else before
        longest = len(thinking.begin) + before + len(thinking.gap)
        return self._replace(least=least, fixed=max(self.fixed, longest))


class Thinking(NamedTuple):
    """What stands before a grammar: any bytes up to the first ``end``, then at most ``most_gap``
    times ``gap``. With ``begin`` that is only where the text starts with it."""

    end: bytes
    begin: bytes
    gap: bytes
    most_gap: int


@bounded_depth()
def reach(syntax: Syntax) -> Reach:
    """How long the texts of a grammar are, by the longest way down the calls.

    Where rules call each other in a circle, each waits at most once for each byte of the text that
    it may begin with: where one that began at a byte waits twice, the shortest rest leaves out what
    lies between.

    Raises:
        GrammarError: its trees are too deep.
    """
    # What is called stands before what calls it, except in circles.
    circle = circles({name: references(body) for name, body in syntax.rules.items()})
    bounds = _Bounds(syntax, circle)
    each, deepest = 0, dict.fromkeys(circle.values(), 0)
    begins: set[int] = set()
    for name, number in circle.items():
        deepest[number] = max(deepest[number], bounds.longest[name])
        inner = 0
        for called, (rest, before) in bounds.waits[name].items():
            if circle[called] != number:
                deepest[number] = max(deepest[number], rest + deepest[circle[called]])
            else:
                inner = max(inner, rest)
                begins |= before
        each += inner
    root = next(iter(syntax.rules))
    least, fixed, each = (
        min(n, ENDLESS) for n in (bounds.lengths[root], deepest[circle[root]], each)
    )
    return Reach(least, fixed, each, bytes(sorted(begins)))


class _Bounds:
    """How long the rests in the rules of a grammar are.

    Args:
        circle: Of its rules, those in the same one by the same number, in the order in which few
            passes do.

    Attributes:
        lengths: Of each rule, fewest bytes.
        longest: Of each rule, the longest of the shortest rests from a place in it to its end.
        waits: Of each rule, those that it calls, each with the longest shortest rest behind it, and
            the bytes that a text in which such a rest stands behind it may begin with.
    """

    def __init__(self, syntax: Syntax, circle: dict[str, int]) -> None:
        self.lengths = dict.fromkeys(syntax.rules, ENDLESS)
        self.waits: dict[str, dict[str, tuple[int, frozenset[int]]]] = {
            name: {} for name in syntax.rules
        }
        self._syntax = syntax
        # By `id`: fewest bytes, and the longest rest inside; and of what calls rules of a circle,
        # as far as is known.
        self._known: dict[int, tuple[int, int]] = {}
        self._calling: dict[int, tuple[int, int]] = {}
        for _, same in groupby(circle, circle.__getitem__):
            names = [*same]
            comes_back = any(references(syntax.rules[name]).intersection(names) for name in names)
            grown = True
            while grown:
                grown = False
                self._calling.clear()
                for name in names:
                    least = self._read(syntax.rules[name])[0]
                    if least < self.lengths[name]:
                        self.lengths[name], grown = least, comes_back
            self._known |= self._calling
        self.longest = {name: self._read(body)[1] for name, body in syntax.rules.items()}
        for name, body in syntax.rules.items():
            # Asked for of rules in circles alone.
            is_asked = any(circle[name] == circle[called] for called in references(body))
            self._wait(name, body, 0, (frozenset(), is_asked))

    def _read(self, node: Node) -> tuple[int, int]:
        if isinstance(node, Ref):
            return self.lengths[node.name], self.lengths[node.name]
        found = self._known.get(id(node)) or self._calling.get(id(node))
        if found is not None:
            return found
        if isinstance(node, CharClass):
            found = ENDLESS, 0
            if node.members:
                found = utf8_length(node.members[0][0]), utf8_length(node.members[-1][1])
        elif isinstance(node, Repetition):
            least, longest = self._read(node.body)
            found = node.least * least, longest + max(node.least - 1, 0) * least
        elif isinstance(node, Alternation):
            ways = [way for way in map(self._read, node.ways) if way[0] < ENDLESS]
            found = (
                min((least for least, _ in ways), default=ENDLESS),
                max((longest for _, longest in ways), default=0),
            )
        else:
            least, longest = 0, 0
            for part in reversed(node.parts):
                more, inside = self._read(part)
                longest, least = max(longest, inside + least), least + more
            found = least, longest
        found = min(found[0], ENDLESS), min(found[1], ENDLESS)
        (self._calling if references(node) else self._known)[id(node)] = found
        return found

    def _wait(self, name: str, node: Node, behind: int, before: Before) -> None:
        """Note the rules that an expression with such a rest behind it calls."""
        if not references(node) or self._read(node)[0] + behind >= ENDLESS:
            return
        if isinstance(node, Ref):
            waits = self.waits[name]
            rest, begins = waits.get(node.name, (0, frozenset()))
            if behind:
                begins |= self._then(before, node)[0]
            waits[node.name] = max(rest, behind), begins
        elif isinstance(node, Concat):
            befores = [before]
            for part in node.parts:
                befores.append(self._then(befores[-1], part))
            for part, first in zip(reversed(node.parts), befores[-2::-1], strict=True):
                self._wait(name, part, behind, first)
                behind += self._read(part)[0]
        elif isinstance(node, Alternation):
            for way in node.ways:
                self._wait(name, way, behind, before)
        elif isinstance(node, Repetition):
            more = max(node.least - 1, 0) * self._read(node.body)[0]
            # Others of them may stand before it.
            others = self._then(before, Repetition(node.body, 0, None))
            self._wait(name, node.body, behind + more, others)

    def _then(self, before: Before, node: Node) -> Before:
        """Of an expression behind others."""
        begins, is_open = before
        if not is_open:
            return before
        return begins | self._begins(node, set()), is_nullable(node, self._syntax.nullable)

    def _begins(self, node: Node, seen: set[str]) -> set[int]:
        """Bytes that texts of an expression may begin with."""
        if isinstance(node, CharClass):
            spans = (span[0] for low, high in node.members for span in utf8_spans(low, high))
            return {byte for low, high in spans for byte in range(low, high + 1)}
        if isinstance(node, Ref):
            if node.name in seen:
                return set()
            seen.add(node.name)
            return self._begins(self._syntax.rules[node.name], seen)
        if isinstance(node, Concat):
            found: set[int] = set()
            for part in node.parts:
                found |= self._begins(part, seen)
                if not is_nullable(part, self._syntax.nullable):
                    break
            return found
        parts = parts_of(node)
        return set[int]().union(*(self._begins(part, seen) for part in parts))


def utf8_length(code: int) -> int:
    """Bytes of a character."""
    return bisect_right(_FIRSTS, code)
