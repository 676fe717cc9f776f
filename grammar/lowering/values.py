"""How many values an expression has, and how they are written where equal ones must look equal."""

from __future__ import annotations

from enum import Enum

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.dfa import Dfa, TooLargeError, uncircled
from overlap_spec.grammar.lowering.resolver import Resolver
from overlap_spec.grammar.lowering.shapes import (
    ANY,
    FULL,
    NOTHING,
    Arrays,
    Consts,
    Expr,
    Numbers,
    Objects,
    Shape,
    Strings,
    Unsupported,
)
from overlap_spec.grammar.lowering.strings import automaton


class Once(Enum):
    """How a value is written: in any form; as an item that must differ from others, where equal
    ones are told by their values if they can go on for ever; or inside such an item, where equal
    values have equal texts."""

    NO, ITEM, INSIDE = range(3)


MANY = 4096
"""So many values, or more, count as this."""


class Values:
    """Answers about the values of one document's expressions."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._counts: dict[Expr, int] = {}

    def infinite(self, expr: Expr) -> bool:
        """Whether an expression surely has infinitely many values."""
        if expr == ANY:
            return True
        return any(map(self.shape_is_infinite, self._shapes(expr)))

    def shape_is_infinite(self, shape: Shape) -> bool:
        """The same of a shape."""
        if isinstance(shape, Strings):
            return is_endless(shape)
        if isinstance(shape, Numbers):
            return not shape.not_steps and None in (shape.bounds.low, shape.bounds.high)
        return isinstance(shape, Arrays | Objects) and self.is_open(shape)

    def is_open(self, shape: Shape) -> bool:
        """Whether an array or object can surely go on for ever from any place inside it."""
        if isinstance(shape, Arrays):
            free = shape.most is None and not shape.contains
            return free and self.infinite(shape.rest)
        if not isinstance(shape, Objects) or shape.most is not None or shape.some:
            return False
        if not shape.rules:
            return True
        keys, expr = shape.rules[0]
        every = len(shape.rules) == 1 and keys.inverted and not keys.patterns and not keys.exprs
        return every and self.count(expr) > 0

    def is_written_once(self, expr: Expr, inside: frozenset[Expr] = frozenset()) -> bool:
        """Whether equal values can have equal texts: no object has members in any order, no array
        must look for equal items itself, and there are no two ways to write an array or object."""
        if expr in inside:
            return True
        shapes = self._shapes(expr)
        for kind in ("array", "object"):
            if sum(shape.kind == kind for shape in shapes) > 1:
                return False
        return all(self.shape_is_written_once(shape, inside | {expr}) for shape in shapes)

    def shape_is_written_once(self, shape: Shape, inside: frozenset[Expr] = frozenset()) -> bool:
        """The same of a shape."""
        if isinstance(shape, Arrays):
            parts = [*shape.prefix, *([] if shape.most == len(shape.prefix) else [shape.rest])]
            return not shape.unique and all(self.is_written_once(e, inside) for e in parts)
        if isinstance(shape, Objects):
            closed = any(
                keys.inverted and expr == NOTHING and not keys.patterns and not keys.exprs
                for keys, expr in shape.rules
            )
            return closed and all(self.is_written_once(e, inside) for _, e in shape.named)
        return not isinstance(shape, Unsupported)

    def count(self, expr: Expr) -> int:
        """The number of values of an expression: a lower bound, at most :data:`MANY`."""
        if expr == ANY:
            return MANY
        if expr not in self._counts:
            # A value inside itself is counted as none.
            self._counts[expr] = 0
            # Values of two types differ; two shapes of one type may overlap.
            kinds: dict[str, int] = {}
            for shape in self._shapes(expr):
                kinds[shape.kind] = max(kinds.get(shape.kind, 0), self._count(shape))
            self._counts[expr] = min(MANY, sum(kinds.values()))
        return self._counts[expr]

    def _count(self, shape: Shape) -> int:
        if isinstance(shape, Consts):
            return len(shape.values)
        if isinstance(shape, Strings):
            return _strings(shape)
        if isinstance(shape, Numbers):
            return self._numbers(shape)
        if isinstance(shape, Arrays):
            return self._arrays(shape)
        return self._objects(shape) if isinstance(shape, Objects) else 0

    def _numbers(self, shape: Numbers) -> int:
        if self.shape_is_infinite(shape):
            return MANY
        low, high = shape.bounds.integers()
        if low is None or high is None:
            return 0
        if not shape.whole and not shape.steps and not shape.outside:
            wide = shape.bounds.low != shape.bounds.high
            return MANY if wide else 1
        if high - low >= MANY:
            plain = not shape.steps and not shape.not_steps
            return MANY if plain else 0
        return sum(self._resolver.holds(shape, str(n)) for n in range(low, high + 1))

    def _arrays(self, shape: Arrays) -> int:
        if shape.contains or shape.unique:
            return 0 if shape.least or shape.contains else 1
        if self.is_open(shape):
            return MANY
        length = max(shape.least, min(len(shape.prefix), shape.most or len(shape.prefix)), 1)
        if shape.most is not None and length > shape.most:
            return 1
        found = 1
        for place in range(length):
            known = place < len(shape.prefix)
            found *= self.count(shape.prefix[place] if known else shape.rest)
            if found >= MANY:
                break
        return min(max(found, shape.least == 0), MANY)

    def _objects(self, shape: Objects) -> int:
        if self.is_open(shape):
            return MANY
        if shape.least > len(shape.required) or shape.most is not None or shape.some:
            return 0
        found = 1
        for name, expr in shape.named:
            own = self.count(expr)
            found *= own if name in shape.required else own + 1
            found = min(found, MANY)
        return found

    def _shapes(self, expr: Expr) -> tuple[Shape, ...]:
        return FULL if expr == ANY else self._resolver.written(expr)


def is_endless(shape: Strings) -> bool:
    """Whether each text that begins a string of the shape also begins infinitely many others."""
    if shape.most is not None:
        return False
    if not shape.patterns and not shape.without:
        return True
    try:
        return language_is_endless(automaton(shape))
    except (GrammarError, TooLargeError):
        return False


def language_is_endless(language: Dfa) -> bool:
    """The same of the texts of an automaton."""
    return not language.is_empty and not _ending(language)


def _strings(shape: Strings) -> int:
    if not shape.patterns and not shape.without:
        return 1 if shape.most == 0 else MANY
    try:
        language = automaton(shape)
    except (GrammarError, TooLargeError):
        return 0
    return 0 if language.is_empty else _ending(language).get(0, MANY)


def _ending(language: Dfa) -> dict[int, int]:
    """The states from which there are finitely many texts, and how many, at most MANY."""
    found: dict[int, int] = {}
    leads = {state: {to for *_, to in moves} for state, moves in enumerate(language.moves)}
    for state in uncircled(leads):
        ways = ((high - low + 1) * found[to] for low, high, to in language.moves[state])
        found[state] = min(MANY, int(language.final[state]) + sum(ways))
    return found
