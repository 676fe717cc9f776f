"""Grammar rules as trees."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_spec.grammar.automata.charset import Ranges


@dataclass(frozen=True, eq=False)
class Chars:
    """One character of a set; an empty set matches nothing."""

    members: Ranges


@dataclass(frozen=True, eq=False)
class Chain:
    """Parts one after another; no part means the empty text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Either:
    """One of several alternatives."""

    ways: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """`body` from `least` to `most` times; None means no bound."""

    body: Expression
    least: int
    most: int | None


@dataclass(frozen=True, eq=False)
class Ref:
    """A reference to a rule."""

    name: str


Expression = Chars | Chain | Either | Repeat | Ref
EMPTY = Chain(())


def parts_of(expression: Expression) -> tuple[Expression, ...]:
    """The direct parts of an expression."""
    if isinstance(expression, Chain):
        return expression.parts
    if isinstance(expression, Either):
        return expression.ways
    return (expression.body,) if isinstance(expression, Repeat) else ()


def references(expression: Expression) -> set[str]:
    """Names of the rules that an expression refers to directly."""
    found: set[str] = set()
    pending = [expression]
    while pending:
        part = pending.pop()
        if isinstance(part, Ref):
            found.add(part.name)
        pending.extend(parts_of(part))
    return found


def is_nullable(expression: Expression, rules: set[str] | frozenset[str]) -> bool:
    """Whether an expression is nullable, given the nullable rules."""
    if isinstance(expression, Ref):
        return expression.name in rules
    if isinstance(expression, Chain):
        return all(is_nullable(part, rules) for part in expression.parts)
    if isinstance(expression, Either):
        return any(is_nullable(way, rules) for way in expression.ways)
    if isinstance(expression, Repeat):
        return expression.least == 0 or is_nullable(expression.body, rules)
    return False
