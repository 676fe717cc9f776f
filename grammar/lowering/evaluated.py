"""`unevaluatedProperties` and `unevaluatedItems`, exactly.

They bind the members that no keyword beside them, or in a subschema that applies to the same value,
has evaluated (JSON Schema 2020-12 core, 11). Which those are depends on the branches that hold. So
a schema is taken apart into *ways* to be valid: shapes, and what they have evaluated. A way never
has to say that a branch does not hold: to evaluate more only allows more, so the union of all ways
is right without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

from overlap_spec.grammar.lowering import keywords, local_keywords
from overlap_spec.grammar.lowering.shapes import (
    ANY,
    FULL,
    NOTHING,
    Arrays,
    Doc,
    Expr,
    Keys,
    Objects,
    Shapes,
    any_of,
    negated,
)
from overlap_spec.grammar.schemas.source import json_path

KEYWORDS = ("unevaluatedProperties", "unevaluatedItems")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_MOST_WAYS = 256
_MOST_BRANCHES = 8


@dataclass(frozen=True)
class Seen:
    """What a way has evaluated: names and patterns of members, or all of them; the first items,
    those that are in an expression, or all of them."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_members: bool = False
    first_items: int = 0
    items: frozenset[Expr] = frozenset()
    all_items: bool = False

    def __or__(self, other: Seen) -> Seen:
        return Seen(
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_members or other.all_members,
            max(self.first_items, other.first_items),
            self.items | other.items,
            self.all_items or other.all_items,
        )


Ways = dict[Seen, Shapes]
_EVERY: Ways = {Seen(): FULL}


class Source(local_keywords.Source, Protocol):
    """What a schema document is asked for."""

    contains_evaluates: bool

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

    def inside(self, doc: Doc, read: Callable[[dict[str, Any], str], Ways]) -> Ways:
        """What `read` makes of a document's keywords and path."""


def shapes(plain: dict[str, Any], path: str, source: Source) -> Shapes:
    """The shapes of a schema that has one of the keywords, given in the form of draft 2020-12.

    Raises:
        Refusal: it has too many ways to be valid.
    """
    found = _Reader(source).ways(plain, path)
    return tuple(dict.fromkeys(shape for union in found.values() for shape in union))


class _Reader:
    def __init__(self, source: Source) -> None:
        self._source = source

    def ways(self, plain: dict[str, Any], path: str) -> Ways:
        """The ways of a schema, its own `unevaluated…` included."""
        local = {key: value for key, value in plain.items() if key not in KEYWORDS}
        found: Ways = {self._seen(plain, path): local_keywords.shapes(plain, path, self._source)}
        for keyword, value in local.items():
            for part in self._parts(keyword, value, plain, path):
                found = self._product(found, part, keyword, path)
        for keyword in KEYWORDS:
            if keyword in plain:
                found = self._bound(found, keyword, plain[keyword], path)
        return found

    def _of(self, schema: Any, path: str) -> Ways:
        return self._of_expr(self._source.expr(schema, path))

    def _of_expr(self, expr: Expr) -> Ways:
        if expr == NOTHING:
            return {}
        return self._source.inside(expr, self.ways) if isinstance(expr, Doc) else _EVERY

    def _seen(self, plain: dict[str, Any], path: str) -> Seen:
        items: frozenset[Expr] = frozenset()
        if "contains" in plain and self._source.contains_evaluates:
            items = frozenset((self._source.expr(plain["contains"], json_path(path, "contains")),))
        return Seen(
            frozenset(plain.get("properties", {})),
            frozenset(plain.get("patternProperties", {})),
            "additionalProperties" in plain,
            len(plain.get("prefixItems", [])),
            items,
            "items" in plain,
        )

    def _parts(self, keyword: str, value: Any, plain: dict[str, Any], path: str) -> Iterable[Ways]:
        """The ways of each schema that an applicator applies to the same value."""
        here = json_path(path, keyword)
        if keyword in _REFERENCES:
            yield self._of_expr(self._source.target(keyword, value, path))
        elif keyword == "allOf":
            for i, part in enumerate(value):
                yield self._of(part, json_path(here, i))
        elif keyword == "anyOf":
            yield self._any_of([self._of(x, json_path(here, i)) for i, x in enumerate(value)], path)
        elif keyword == "oneOf":
            yield self._one_of(value, here, path)
        elif keyword == "not":
            yield {Seen(): self._source.shapes(negated(self._source.expr(value, here)))}
        elif keyword == "if":
            yield self._cases(plain, path)
        elif keyword == "dependentRequired":
            for name, names in value.items():
                yield self._depending(name, self._requiring(names), path)
        elif keyword in ("dependentSchemas", "dependencies"):
            for name, wanted in value.items():
                listed = isinstance(wanted, list)
                inner = json_path(here, name)
                then = self._requiring(wanted) if listed else self._of(wanted, inner)
                yield self._depending(name, then, path)

    def _any_of(self, branches: list[Ways], path: str) -> Ways:
        # Branches that evaluate the same are one.
        single: Ways = {}
        for branch in branches:
            single = _joined(single, branch)
        if len(single) > _MOST_BRANCHES:
            raise keywords.refusal(KEYWORDS[0], path, "stands beside too many ways to be valid")
        found = dict(single)
        for count in range(2, len(single) + 1):
            for chosen in combinations(single, count):
                seen = _union(chosen)
                # A part of these evaluates as much: it says all that these would.
                if any(seen == _union(part) for part in combinations(chosen, count - 1)):
                    continue
                held: Shapes = FULL
                for one in chosen:
                    held = self._source.both(held, single[one], "anyOf", path)
                found = _joined(found, {seen: held})
        return found

    def _one_of(self, schemas: list[Any], here: str, path: str) -> Ways:
        branches = [self._source.expr(x, json_path(here, i)) for i, x in enumerate(schemas)]
        found: Ways = {}
        alone = self._source.exclusive(branches, FULL, path)
        for branch, shapes_ in zip(branches, alone, strict=True):
            one = self._product(self._of_expr(branch), {Seen(): shapes_}, "oneOf", path)
            found = _joined(found, one)
        return found

    def _cases(self, plain: dict[str, Any], path: str) -> Ways:
        condition = plain["if"]
        then = self._of(plain.get("then", True), json_path(path, "then"))
        other = self._of(plain.get("else", True), json_path(path, "else"))
        when = self._of(condition, json_path(path, "if"))
        no = self._source.otherwise(self._source.expr(condition, json_path(path, "if")))
        held = self._product(when, then, "if", path)
        return _joined(held, self._product({Seen(): no}, other, "if", path))

    def _depending(self, name: str, then: Ways, path: str) -> Ways:
        absent: Shapes = (Objects(named=((name, NOTHING),)), *FULL[1:])
        present: Shapes = (Objects(required=(name,)),)
        held = self._product(then, {Seen(): present}, "dependentSchemas", path)
        return _joined({Seen(): absent}, held)

    def _requiring(self, names: list[str]) -> Ways:
        stated = frozenset(names if self._source.closes_objects else ())
        return {Seen(): (Objects(required=tuple(names), stated=stated),)}

    def _product(self, left: Ways, right: Ways, keyword: str, path: str) -> Ways:
        found: Ways = {}
        for seen, shapes_ in left.items():
            for also, others in right.items():
                held = self._source.both(shapes_, others, keyword, path)
                found = _joined(found, {seen | also: held})
        if len(found) > _MOST_WAYS:
            raise keywords.refusal(keyword, path, "combines into too many cases")
        return found

    def _bound(self, ways: Ways, keyword: str, value: Any, path: str) -> Ways:
        """The ways whose unevaluated members are values of a schema, which evaluates them."""
        wanted = self._source.expr(value, json_path(path, keyword))
        found: Ways = {}
        for seen, shapes_ in ways.items():
            if keyword == "unevaluatedProperties":
                after = seen | Seen(all_members=True)
                keys = Keys(seen.names, tuple(sorted(seen.patterns)), (), True)
                kept: Shapes = (Objects(rules=((keys, wanted),)), *FULL[1:])
                bound = wanted != ANY and not seen.all_members
            else:
                after = seen | Seen(all_items=True)
                rest = any_of(wanted, *seen.items)
                kept = (FULL[0], Arrays((ANY,) * seen.first_items, rest), *FULL[2:])
                bound = rest != ANY and not seen.all_items
            held = self._source.both(shapes_, kept, keyword, path) if bound else shapes_
            found = _joined(found, {after: held})
        return found


def _union(seen: Iterable[Seen]) -> Seen:
    found = Seen()
    for one in seen:
        found |= one
    return found


def _joined(left: Ways, right: Ways) -> Ways:
    found = dict(left)
    for seen, shapes_ in right.items():
        if shapes_:
            found[seen] = tuple(dict.fromkeys((*found.get(seen, ()), *shapes_)))
    return found
