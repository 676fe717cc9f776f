"""JSON Schema as sets of values.

An expression refers to a set of values without resolving it: a schema of the document, the
intersection of expressions, or the complement of one. A shape is a set of values of one JSON type,
with expressions for its members; a schema is a union of shapes. Expressions keep recursive schemas
finite: members are resolved only when their rules are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol, TypeVar

from overlap_spec.grammar.lowering.numbers import Bounds
from overlap_spec.grammar.lowering.references import Scope

Found = TypeVar("Found")
KINDS = ("object", "array", "string", "number", "boolean", "null")


@dataclass(frozen=True)
class Doc:
    """A schema of the document; equal to all others with the same constraints and scope."""

    text: str
    scope: Scope
    schema: Any = field(compare=False, repr=False)
    path: str = field(compare=False)


@dataclass(frozen=True)
class Both:
    """The intersection of the parts; no part means every value."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Not:
    """The complement."""

    body: Expr


Expr = Doc | Both | Not
ANY = Both(())
NOTHING = Not(ANY)


def all_of(*parts: Expr) -> Expr:
    """The intersection of the parts."""
    found: dict[Expr, None] = {}
    for part in parts:
        found.update(dict.fromkeys(part.parts if isinstance(part, Both) else (part,)))
    if NOTHING in found or any(isinstance(part, Not) and part.body in found for part in found):
        return NOTHING
    return next(iter(found)) if len(found) == 1 else Both(tuple(found))


def any_of(*parts: Expr) -> Expr:
    """The union of the parts."""
    return negated(all_of(*map(negated, parts)))


def negated(expr: Expr) -> Expr:
    """The complement of an expression."""
    return expr.body if isinstance(expr, Not) else Not(expr)


def path_of(expr: Expr) -> str:
    """The path in the document that an expression comes from."""
    if isinstance(expr, Doc):
        return expr.path
    if isinstance(expr, Not):
        return path_of(expr.body)
    return path_of(expr.parts[0]) if expr.parts else "$"


@dataclass(frozen=True)
class Keys:
    """A set of member names: the listed ones, those that match a pattern, and those that are
    values of an expression; all other names if `inverted`."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    exprs: tuple[Expr, ...] = ()
    inverted: bool = False


@dataclass(frozen=True)
class Consts:
    """Fixed values of one type, as pairs of a key that equal values share and the JSON text."""

    kind: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Numbers:
    """Numbers; `whole` False means non-integers."""

    kind = "number"
    bounds: Bounds = field(default_factory=Bounds)
    whole: bool | None = None
    steps: tuple[Decimal, ...] = ()
    not_steps: tuple[Decimal, ...] = ()
    outside: tuple[Decimal, ...] = ()


@dataclass(frozen=True)
class Strings:
    """Strings that match all `patterns` and no pattern of `without`."""

    kind = "string"
    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contains:
    """`least` to `most` items from index `start` on match `item`."""

    start: int
    item: Expr
    least: int
    most: int | None


@dataclass(frozen=True)
class Arrays:
    """Arrays: `prefix` items by position, then `rest`."""

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
        named: Values of named members, in the order in which they are written.
        rules: Values of all members whose key is in a set.
        some: For each pair, at least one member with its key and value in them.
        stated: Names that keywords state. Read where objects are closed by default alone.
        closes: Whether no other member may be written: true if `properties` names some, false if a
            keyword says what others are, None if no keyword says either.
    """

    kind = "object"
    named: tuple[tuple[str, Expr], ...] = ()
    rules: tuple[tuple[Keys, Expr], ...] = ()
    required: tuple[str, ...] = ()
    some: tuple[tuple[Keys, Expr], ...] = ()
    least: int = 0
    most: int | None = None
    stated: frozenset[str] = frozenset()
    closes: bool | None = None


@dataclass(frozen=True)
class Unsupported:
    """Values of one type that no shape can describe, because of a keyword."""

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
FULL: Shapes = tuple(EVERYTHING[kind] for kind in KINDS)
"""Every value."""


class Document(Protocol):
    """What a schema document is asked for."""

    best_effort: bool
    closes_objects: bool
    contains_evaluates: bool

    def expr(self, schema: Any, path: str) -> Expr:
        """A subschema as an expression."""

    def shapes(self, expr: Expr) -> Shapes:
        """An expression as a union of shapes."""

    def otherwise(self, condition: Expr) -> Shapes:
        """The values that an `if` does not hold for."""

    def both(self, left: Shapes, right: Shapes, keyword: str, path: str) -> Shapes:
        """The intersection of two unions."""

    def exclusive(self, branches: list[Expr], base: Shapes, path: str) -> list[Shapes]:
        """For each branch, the values of `base` that are in this branch alone."""

    def target(self, keyword: str, reference: str, path: str) -> Expr:
        """What a reference keyword points to."""

    def inside(self, doc: Doc, read: Callable[[dict[str, Any], str], Found]) -> Found:
        """What `read` makes of a document's keywords and path."""

    def holds(self, shape: Shape, text: str) -> bool:
        """Whether a shape contains a value, given as JSON text."""

    def has(self, expr: Expr, value: Any) -> bool:
        """Whether an expression contains a value, with numbers as Decimal."""

    def has_key(self, keys: Keys, name: str) -> bool:
        """Whether a set of keys contains a name."""

    def is_empty(self, expr: Expr) -> bool:
        """Whether an expression is surely empty."""
