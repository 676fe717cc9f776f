"""Recognises expressions that mean "any string except these".

The free keys of an object are any string except the named keys. EBNF has no exclusion, so the
lowering writes a tree of all strings that differ from them. A library with an exclusion operator
makes masks a hundred times cheaper if it is used.
"""

from __future__ import annotations

from itertools import chain as chained

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.parsing.expressions import (
    Chain,
    Chars,
    Either,
    Expression,
    Repeat,
    parts_of,
    references,
)

_MOST_NODES = 100_000
_MOST_SETS = 50_000
_MOST_TEXTS = 2_000

Nodes = frozenset[int]
Move = tuple[int, int, Nodes]
"""First and last code point, and the nodes that they lead to."""


def excluded(expression: Expression) -> tuple[Repeat, list[str]] | None:
    """Split an expression into a repetition and the few strings that are excluded from it.

    Exact: the expression matches what the repetition does, except for these strings.

    Returns:
        The repetition and the strings; None if the expression has no such form.
    """
    if not isinstance(expression, Either) or references(expression):
        return None
    base = _loop(expression)
    if base is None:
        return None
    points = _Points()
    narrow, wide = (points.node(), points.node()), (points.node(), points.node())
    try:
        points.add(expression, *narrow)
        points.add(base, *wide)
    except GrammarError:
        return None
    texts = _difference(points, narrow, wide)
    return None if texts is None else (base, texts)


def structure_key(expression: Expression) -> object:
    """A key that structurally equal expressions share."""
    if isinstance(expression, Chars):
        return expression.members
    inner = tuple(structure_key(part) for part in parts_of(expression))
    if isinstance(expression, Repeat):
        return (expression.least, expression.most, inner)
    # What is left but chains and choices has no parts, and a name.
    return (isinstance(expression, Chain), inner) if inner else getattr(expression, "name", ())


def _loop(expression: Expression) -> Repeat | None:
    """The first unbounded repetition inside, at least once; those of a tree of keys are alike."""
    pending = [expression]
    while pending:
        part = pending.pop()
        if isinstance(part, Repeat) and part.most is None:
            return Repeat(part.body, 1, None)
        pending += parts_of(part)
    return None


class _Points:
    """A nondeterministic automaton over code points; equal loops into the same node are shared."""

    def __init__(self) -> None:
        self.points: list[list[tuple[int, int, int]]] = []
        self.steps: list[list[int]] = []
        self.loops: dict[object, int] = {}
        self.closures: dict[int, Nodes] = {}

    def node(self) -> int:
        if len(self.points) >= _MOST_NODES:
            raise GrammarError(f"an expression is larger than {_MOST_NODES} states")
        self.points.append([])
        self.steps.append([])
        return len(self.points) - 1

    def add(self, expression: Expression, start: int, end: int) -> None:
        """Add an expression between two nodes; `start` must have no other outgoing edge."""
        if isinstance(expression, Chars):
            self.points[start] += [(low, high, end) for low, high in expression.members]
        elif isinstance(expression, Either):
            for way in expression.ways:
                first = self.node()
                self.steps[start].append(first)
                self.add(way, first, end)
        elif isinstance(expression, Repeat):
            self._repeat(expression, start, end)
        else:
            parts = parts_of(expression)
            for part in parts[:-1]:
                after = self.node()
                self.add(part, start, after)
                start = after
            if parts:
                self.add(parts[-1], start, end)
            else:
                self.steps[start].append(end)

    def _repeat(self, repeat: Repeat, start: int, end: int) -> None:
        for _ in range(repeat.least):
            after = self.node()
            self.add(repeat.body, start, after)
            start = after
        if repeat.most is None:
            key = (structure_key(repeat.body), end)
            if key not in self.loops:
                hub = self.loops[key] = self.node()
                inner = self.node()
                self.steps[hub] += [end, inner]
                self.add(repeat.body, inner, hub)
            self.steps[start].append(self.loops[key])
            return
        self.steps[start].append(end)
        for _ in range(repeat.most - repeat.least):
            inner, after = self.node(), self.node()
            self.steps[start].append(inner)
            self.add(repeat.body, inner, after)
            self.steps[after].append(end)
            start = after

    def closure(self, nodes: Nodes) -> Nodes:
        """The epsilon closure."""
        return frozenset(chained.from_iterable(map(self._one, nodes)))

    def _one(self, node: int) -> Nodes:
        if node not in self.closures:
            seen, pending = {node}, [node]
            while pending:
                new = [after for after in self.steps[pending.pop()] if after not in seen]
                seen.update(new)
                pending += new
            self.closures[node] = frozenset(
                node for node in seen if self.points[node] or not self.steps[node]
            )
        return self.closures[node]

    def moves(self, nodes: Nodes) -> list[Move]:
        """Disjoint ranges of code points, in order."""
        edges = [edge for node in nodes for edge in self.points[node]]
        bounds: dict[int, list[tuple[bool, int]]] = {}
        for low, high, after in edges:
            bounds.setdefault(low, []).append((True, after))
            bounds.setdefault(high + 1, []).append((False, after))
        found: list[Move] = []
        open_: list[int] = []
        start = 0
        for point in sorted(bounds):
            if open_:
                found.append((start, point - 1, frozenset(open_)))
            for opens, after in bounds[point]:
                (open_.append if opens else open_.remove)(after)
            start = point
        return found


def _difference(
    points: _Points, narrow: tuple[int, int], wide: tuple[int, int]
) -> list[str] | None:
    """Strings of `wide` that `narrow` lacks; None if `narrow` has others, or if they are many."""
    first = points.closure(frozenset((narrow[0], wide[0])))
    moves: dict[Nodes, list[Move]] = {}
    known: dict[Nodes, Nodes] = {}
    pending = [first]
    differs: set[Nodes] = set()
    while pending:
        here = pending.pop()
        if here in moves:
            continue
        if len(moves) >= _MOST_SETS or (narrow[1] in here and wide[1] not in here):
            return None
        if wide[1] in here and narrow[1] not in here:
            differs.add(here)
        moves[here] = []
        for low, high, after in points.moves(here):
            if after not in known:
                known[after] = points.closure(after)
            moves[here].append((low, high, known[after]))
            pending.append(known[after])
    return _texts(first, moves, differs)


def _texts(first: Nodes, moves: dict[Nodes, list[Move]], differs: set[Nodes]) -> list[str] | None:
    """All strings that lead from `first` into `differs`; None if they are too many."""
    before: dict[Nodes, list[Nodes]] = {}
    for here, ways in moves.items():
        for _, _, after in ways:
            before.setdefault(after, []).append(here)
    leads = set(differs)
    pending = list(differs)
    while pending:
        new = [here for here in before.get(pending.pop(), ()) if here not in leads]
        leads.update(new)
        pending += new
    found: list[str] = []
    paths = [(first, "")] if first in leads else []
    while paths:
        here, text = paths.pop()
        if here in differs:
            found.append(text)
        for low, high, after in moves[here]:
            if after in leads:
                if high - low > _MOST_TEXTS:
                    return None
                paths += [(after, text + chr(point)) for point in range(low, high + 1)]
        # An infinite difference revisits a set, and its strings outgrow any bound.
        if len(found) + len(paths) > _MOST_TEXTS or len(text) > len(moves):
            return None
    return sorted(found)
