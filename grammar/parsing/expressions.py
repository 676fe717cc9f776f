"""The trees that grammars are made of."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_spec.grammar.automata.charset import Ranges


@dataclass(frozen=True, eq=False)
class Chars:
    """One character of a set; no character where it is empty."""

    members: Ranges


@dataclass(frozen=True, eq=False)
class Chain:
    """Parts one after another; the empty chain is the empty text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Either:
    """One of several."""

    ways: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """`body` from `least` to `most` times; None means no bound."""

    body: Expression
    least: int
    most: int | None


@dataclass(frozen=True, eq=False)
class Ref:
    """What the rule of this name matches."""

    name: str


Expression = Chars | Chain | Either | Repeat | Ref
EMPTY = Chain(())


def parts_of(expression: Expression) -> tuple[Expression, ...]:
    """The expressions that one is made of."""
    if isinstance(expression, Chain):
        return expression.parts
    if isinstance(expression, Either):
        return expression.ways
    return (expression.body,) if isinstance(expression, Repeat) else ()


def references(expression: Expression) -> set[str]:
    """Names of the rules that an expression refers to by itself."""
    found: set[str] = set()
    pending = [expression]
    while pending:
        part = pending.pop()
        if isinstance(part, Ref):
            found.add(part.name)
        pending.extend(parts_of(part))
    return found


def is_nullable(expression: Expression, rules: set[str] | frozenset[str]) -> bool:
    """Whether an expression matches the empty text, where exactly `rules` do."""
    if isinstance(expression, Ref):
        return expression.name in rules
    if isinstance(expression, Chain):
        return all(is_nullable(part, rules) for part in expression.parts)
    if isinstance(expression, Either):
        return any(is_nullable(way, rules) for way in expression.ways)
    if isinstance(expression, Repeat):
        return expression.least == 0 or is_nullable(expression.body, rules)
    return False
