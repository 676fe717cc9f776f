"""JSON Schema as sets of values: what is left when all the keywords are read.

An expression says which values are meant without looking into them: a place in the document, both
of several expressions, or the complement of one. A shape is a set of values of one JSON type,
with expressions where it has members; a schema is a union of shapes. Expressions keep recursion
finite: a shape refers to what it holds, and nobody looks before it is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from overlap_spec.grammar.lowering.numbers import Bounds

KINDS = ("object", "array", "string", "number", "boolean", "null")


@dataclass(frozen=True)
class Doc:
    """A schema of the document, equal to all others with the same constraints."""

    text: str
    schema: Any = field(compare=False, repr=False)
    path: str = field(compare=False)


@dataclass(frozen=True)
class Both:
    """Values of all parts; no part means every value."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Not:
    """All other values."""

    body: Expr


Expr = Doc | Both | Not
ANY = Both(())
NOTHING = Not(ANY)


def all_of(*parts: Expr) -> Expr:
    """Values of all parts."""
    found: dict[Expr, None] = {}
    for part in parts:
        found.update(dict.fromkeys(part.parts if isinstance(part, Both) else (part,)))
    if NOTHING in found or any(isinstance(part, Not) and part.body in found for part in found):
        return NOTHING
    return next(iter(found)) if len(found) == 1 else Both(tuple(found))


def negated(expr: Expr) -> Expr:
    """All other values."""
    return expr.body if isinstance(expr, Not) else Not(expr)


@dataclass(frozen=True)
class Keys:
    """A set of member names: the named ones, those in which a pattern is found, and those that
    are values of an expression; or all others, where `inverted`."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    exprs: tuple[Expr, ...] = ()
    inverted: bool = False


@dataclass(frozen=True)
class Consts:
    """Values one by one, as pairs of what equal values share and the JSON text."""

    kind: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Numbers:
    """Numbers; `whole` False means those that are not integers."""

    kind = "number"
    bounds: Bounds = field(default_factory=Bounds)
    whole: bool | None = None
    steps: tuple[Decimal, ...] = ()
    not_steps: tuple[Decimal, ...] = ()
    outside: tuple[Decimal, ...] = ()


@dataclass(frozen=True)
class Strings:
    """Strings; patterns are found in them, `without` ones are not."""

    kind = "string"
    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contains:
    """From `least` to `most` items, at or after index `start`, are values of `item`."""

    start: int
    item: Expr
    least: int
    most: int | None


@dataclass(frozen=True)
class Arrays:
    """Arrays: items by place, then `rest`."""

    kind = "array"
    prefix: tuple[Expr, ...] = ()
    rest: Expr = ANY
    least: int = 0
    most: int | None = None
    unique: bool = False
    contains: tuple[Contains, ...] = ()


@dataclass(frozen=True)
class Objects:
    """Objects.

    Args:
        named: What single members hold, in the order in which they are written.
        rules: What each member holds whose key is in the set.
        required: Keys that are there.
        some: For each, a member is there with its key in the set and its value in the expression.
        least: Fewest members.
        most: Most members, or None.
    """

    kind = "object"
    named: tuple[tuple[str, Expr], ...] = ()
    rules: tuple[tuple[Keys, Expr], ...] = ()
    required: tuple[str, ...] = ()
    some: tuple[tuple[Keys, Expr], ...] = ()
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Unsupported:
    """Values of one type that a keyword excludes in a way that no shape says."""

    kind: str
    keyword: str


Shape = Consts | Numbers | Strings | Arrays | Objects | Unsupported
Shapes = tuple[Shape, ...]

BOOLEANS = Consts("boolean", (("true", "true"), ("false", "false")))
NULL = Consts("null", (("null", "null"),))
EVERYTHING: dict[str, Shape] = {
    "object": Objects(), "array": Arrays(), "string": Strings(), "number": Numbers(),
    "boolean": BOOLEANS, "null": NULL,
}  # fmt: skip
