"""Applicators: what they make of the shapes of a schema's other keywords.

Each is an exact operation on sets of values: `allOf` is an intersection, `anyOf` a union, `not` a
complement, `oneOf` the union of each branch minus those that it may overlap, `if` a union of two
cases, and a dependency a union of "key absent" and "key present, and …".

`unevaluatedProperties` and `unevaluatedItems` bind the members that no keyword beside them, or in
a subschema that applies to the same value, has evaluated (JSON Schema 2020-12 core, 11). Which
those are depends on the branches that hold. So a schema is taken apart into *ways* to be valid:
shapes, and what they have evaluated. A way never has to say that a branch does not hold: to
evaluate more only allows more, so the union of all ways is right without it. Where neither keyword
binds, nothing counts as evaluated, and there is one way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import or_
from typing import Any

from overlap_spec.grammar.lowering import keywords, local_keywords
from overlap_spec.grammar.lowering.shapes import (
    ANY,
    FULL,
    NOTHING,
    Arrays,
    Doc,
    Document,
    Expr,
    Keys,
    Objects,
    Shape,
    Shapes,
    any_of,
    negated,
    path_of,
)
from overlap_spec.grammar.schemas.source import json_path

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_APPLICATORS = (
    *_REFERENCES, "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas",
    "dependencies",
)  # fmt: skip
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
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


def shapes(plain: dict[str, Any], path: str, source: Document) -> Shapes:
    """The shapes of a schema, given in the form of draft 2020-12.

    Raises:
        Refusal: a keyword that cannot be enforced, unless `source` leaves it out.
    """
    if any(plain.get(keyword, True) not in (True, {}) for keyword in _UNEVALUATED):
        try:
            return _all(_Reader(source, True).ways(plain, path))
        except keywords.Refusal:
            if not source.best_effort:
                raise
    return _all(_Reader(source, False).ways(plain, path))


class _Reader:
    """Reads schemas; ``tracks`` what they evaluate."""

    def __init__(self, source: Document, tracks: bool) -> None:
        self._source, self._tracks = source, tracks

    def ways(self, plain: dict[str, Any], path: str) -> Ways:
        """The ways of a schema, its own `unevaluated…` included."""
        found: Ways = {self._seen(plain, path): local_keywords.shapes(plain, path, self._source)}
        # Members come in the order in which keywords name them.
        order, others = (plain, _APPLICATORS) if self._tracks else (_APPLICATORS, plain)
        for keyword in [keyword for keyword in order if keyword in others]:
            try:
                found = self._apply(keyword, plain, found, path)
            except keywords.Refusal:
                if self._tracks or not self._source.best_effort:
                    raise
        for keyword in _UNEVALUATED if self._tracks else ():
            if keyword in plain:
                found = self._bound(found, keyword, plain[keyword], path)
        return found

    def _of(self, expr: Expr) -> Ways:
        if not self._tracks:
            return {Seen(): self._source.shapes(expr)}
        if expr == NOTHING:
            return {}
        return self._source.inside(expr, self.ways) if isinstance(expr, Doc) else _EVERY

    def _seen(self, plain: dict[str, Any], path: str) -> Seen:
        if not self._tracks:
            return Seen()
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

    def _apply(self, keyword: str, plain: dict[str, Any], base: Ways, path: str) -> Ways:
        source, value, here = self._source, plain[keyword], json_path(path, keyword)
        if keyword in _REFERENCES:
            target = self._of(source.target(keyword, value, path))
            both = (base, target) if self._tracks else (target, base)
            return self._product(*both, keyword, path)
        if keyword == "not":
            rest = source.shapes(negated(source.expr(value, here)))
            return self._product(base, {Seen(): rest}, keyword, path)
        if keyword == "if":
            return self._cases(base, plain, path)
        if keyword not in ("allOf", "anyOf", "oneOf"):
            return self._dependencies(base, keyword, value, path)
        branches = [source.expr(part, json_path(here, i)) for i, part in enumerate(value)]
        if keyword == "oneOf":
            return self._one_of(base, branches, path)
        if keyword == "anyOf":
            return self._product(base, self._any_of(map(self._of, branches), path), keyword, path)
        for branch in branches:
            base = self._product(base, self._of(branch), keyword, path)
        return base

    def _any_of(self, branches: Iterable[Ways], path: str) -> Ways:
        # Branches that evaluate the same are one.
        single = _joined(branches)
        if len(single) > _MOST_BRANCHES:
            raise keywords.refusal(_UNEVALUATED[0], path, "stands beside too many ways to be valid")
        found = [single]
        for count in range(2, len(single) + 1):
            for chosen in combinations(single, count):
                seen = reduce(or_, chosen)
                # A part of these evaluates as much: it says all that these would.
                if any(seen == reduce(or_, part) for part in combinations(chosen, count - 1)):
                    continue
                held: Shapes = FULL
                for one in chosen:
                    held = self._source.both(held, single[one], "anyOf", path)
                found.append({seen: held})
        return _joined(found)

    def _one_of(self, base: Ways, branches: list[Expr], path: str) -> Ways:
        alone = self._source.exclusive(branches, _all(base), path)
        if not self._tracks:
            return _joined({Seen(): shapes_} for shapes_ in alone)
        parts = (
            self._product(self._of(branch), {Seen(): shapes_}, "oneOf", path)
            for branch, shapes_ in zip(branches, alone, strict=True)
        )
        return self._product(base, _joined(parts), "oneOf", path)

    def _cases(self, base: Ways, plain: dict[str, Any], path: str) -> Ways:
        when, then, other = (
            self._source.expr(plain.get(keyword, True), json_path(path, keyword))
            for keyword in ("if", "then", "else")
        )
        # What a condition evaluates counts where it holds.
        if then == other and not self._tracks:
            return self._product(base, self._of(then), "if", path)
        cases = (self._of(when), then), ({Seen(): self._source.otherwise(when)}, other)
        held = [(self._product(base, case, "if", path), after) for case, after in cases]
        return _joined(self._product(one, self._of(after), "if", path) for one, after in held)

    def _dependencies(self, base: Ways, keyword: str, value: dict[str, Any], path: str) -> Ways:
        # Keys with the same consequence share one case.
        groups: dict[str, tuple[list[str], Any]] = {}
        for name, wanted in value.items():
            names = [wanted] if isinstance(wanted, str) else wanted
            groups.setdefault(json.dumps(names), ([], names))[0].append(name)
        for names, wanted in groups.values():
            absent = Objects(named=tuple((name, NOTHING) for name in names))
            if isinstance(wanted, list):
                stated = frozenset(wanted if self._source.closes_objects else ())
                there: Ways = {Seen(): (Objects(required=tuple(wanted), stated=stated),)}
            else:
                then = self._source.expr(wanted, json_path(path, keyword, names[0]))
                present: Shapes = (Objects(),)
                if self._tracks or len(names) == 1:
                    present = tuple(Objects(required=(name,)) for name in names)
                there = self._product(self._of(then), {Seen(): present}, keyword, path)
            either = _joined(({Seen(): (absent,)}, there, {Seen(): FULL[1:]}))
            base = self._product(base, either, keyword, path)
        return base

    def _product(self, left: Ways, right: Ways, keyword: str, path: str) -> Ways:
        found = _joined(
            {seen | also: self._source.both(shapes_, others, keyword, path)}
            for seen, shapes_ in left.items()
            for also, others in right.items()
        )
        if len(found) > _MOST_WAYS:
            raise keywords.refusal(keyword, path, "combines into too many cases")
        return found

    def _bound(self, ways: Ways, keyword: str, value: Any, path: str) -> Ways:
        """The ways whose unevaluated members are values of a schema, which evaluates them."""
        wanted = self._source.expr(value, json_path(path, keyword))
        found: list[Ways] = []
        for seen, shapes_ in ways.items():
            if keyword == "unevaluatedProperties":
                after = seen | Seen(all_members=True)
                keys = Keys(seen.names, tuple(sorted(seen.patterns)), (), True)
                kept: Shapes = (Objects(rules=((keys, wanted),)), *FULL[1:])
                bound = wanted != ANY and not seen.all_members
            else:
                after = seen | Seen(all_items=True)
                # In an order that does not go by where they lie in memory.
                rest = any_of(wanted, *sorted(seen.items, key=path_of))
                kept = (FULL[0], Arrays((ANY,) * seen.first_items, rest), *FULL[2:])
                bound = rest != ANY and not seen.all_items
            held = self._source.both(shapes_, kept, keyword, path) if bound else shapes_
            found.append({after: held})
        return _joined(found)


def _joined(parts: Iterable[Ways]) -> Ways:
    found: dict[Seen, dict[Shape, None]] = {}
    for part in parts:
        for seen, shapes_ in part.items():
            if shapes_:
                found.setdefault(seen, {}).update(dict.fromkeys(shapes_))
    return {seen: tuple(union) for seen, union in found.items()}


def _all(ways: Ways) -> Shapes:
    return tuple(dict.fromkeys(shape for union in ways.values() for shape in union))
