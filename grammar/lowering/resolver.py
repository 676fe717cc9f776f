"""Resolves a schema document: expressions to shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex import Pattern
from overlap_spec.grammar.lowering import applicators, keywords
from overlap_spec.grammar.lowering.intersect import closed, intersect
from overlap_spec.grammar.lowering.membership import complement, contains_value, shape_is_empty
from overlap_spec.grammar.lowering.references import References, Scope
from overlap_spec.grammar.lowering.shapes import (
    ANY,
    EVERYTHING,
    FULL,
    NOTHING,
    Arrays,
    Both,
    Consts,
    Doc,
    Document,
    Expr,
    Found,
    Keys,
    Not,
    Objects,
    Shape,
    Shapes,
    negated,
    path_of,
)
from overlap_spec.grammar.schemas.source import loads
from overlap_spec.grammar.spec import Grammar

_MOST_SHAPES = 512
_MOST_MEETS = 100_000
_LOOK_AHEAD = 4
_TOO_MANY = "combines into too many cases"


class OpenError(GrammarError):
    """An expression that refers to itself without a member in between."""


class Resolver(Document):
    """Reads one schema document.

    Attributes:
        closes_objects: Whether :meth:`written` leaves out members that no keyword names.
    """

    def __init__(self, root: Any, grammar: Grammar) -> None:
        self.best_effort, self.formats = grammar.best_effort, grammar.formats == "assertion"
        self.closes_objects = grammar.additional_properties == "closed"
        self.references = References(root)
        self._scope = self.references.start
        self.contains_evaluates = self._scope.resource.draft > 2019
        self._docs: dict[tuple[int, Scope], tuple[Any, Expr]] = {}
        self._known: dict[Expr, Shapes] = {ANY: FULL, NOTHING: ()}
        self._written: dict[Expr, Shapes] = {}
        self._open: set[Expr] = set()
        self._empty: dict[Expr, bool] = {}
        self._depth = 0
        self._meets = 0

    def expr(self, schema: Any, path: str) -> Expr:
        """A schema of what is being read as an expression, not yet resolved."""
        return self._expr(schema, path, self.references.enter(schema, self._scope))

    def _expr(self, schema: Any, path: str, scope: Scope) -> Expr:
        if isinstance(schema, bool):
            return ANY if schema else NOTHING
        key = (id(schema), scope)
        if key not in self._docs:
            plain = self._constraints(schema, scope)
            # Annotations are ignored, but a misspelt keyword must be reported.
            text = json.dumps(plain) if self.best_effort or keywords.is_known(schema) else None
            found: Expr = Doc(text or json.dumps(schema), scope, schema, path)
            self._docs[key] = (schema, ANY if text == "{}" else found)
        return self._docs[key][1]

    def shapes(self, expr: Expr) -> Shapes:
        """Shapes whose union is the expression; no shape if it is empty.

        Raises:
            GrammarError: names the keyword that cannot be enforced, and its path.
        """
        if expr in self._known:
            return self._known[expr]
        if expr in self._open:
            raise OpenError(f"{path_of(expr)}: references form a cycle", "schema")
        self._open.add(expr)
        try:
            found = self._read(expr)
        except RecursionError as error:
            raise GrammarError(f"{path_of(expr)}: nested too deep", "schema") from error
        finally:
            self._open.discard(expr)
        self._known[expr] = found
        return found

    def written(self, expr: Expr) -> Shapes:
        """The shapes that are written of an expression: those of :meth:`shapes`, closed where
        objects are. Values are judged by :meth:`shapes`: to exclude what a closed object has is
        not to allow what it leaves out.

        Raises:
            GrammarError: as :meth:`shapes`.
        """
        if not self.closes_objects:
            return self.shapes(expr)
        if expr not in self._written:
            found = (
                closed(shape, self) if isinstance(shape, Objects) else shape
                for shape in self.shapes(expr)
            )
            self._written[expr] = tuple(dict.fromkeys(s for s in found if s is not None))
        return self._written[expr]

    @property
    def has_closed(self) -> bool:
        """Whether :meth:`written` has closed an object."""
        return any(found != self.shapes(expr) for expr, found in self._written.items())

    def _read(self, expr: Expr) -> Shapes:
        if isinstance(expr, Not):
            return self.complement(self.shapes(expr.body), "not", path_of(expr))
        if isinstance(expr, Both):
            found = FULL
            for part in expr.parts:
                found = self.both(found, self.shapes(part), "allOf", path_of(expr))
            return found
        return self.inside(expr, lambda plain, path: applicators.shapes(plain, path, self))

    def inside(self, doc: Doc, read: Callable[[dict[str, Any], str], Found]) -> Found:
        """What `read` makes of a document's keywords and path, references resolved from there."""
        around, self._scope = self._scope, doc.scope
        try:
            if not self.best_effort:
                keywords.check(doc.schema, doc.path)
            return read(self._constraints(doc.schema, doc.scope), doc.path)
        finally:
            self._scope = around

    def _constraints(self, schema: dict[str, Any], scope: Scope) -> dict[str, Any]:
        draft = scope.resource.draft
        plain = keywords.constraints(schema, draft)
        if not self.formats:
            plain = {key: plain[key] for key in plain if key not in keywords.ANNOTATIVE}
        if "$ref" in plain and draft < 2019:
            # Older drafts ignore what stands beside it.
            return {"$ref": plain["$ref"]}
        return plain

    def target(self, keyword: str, reference: str, path: str) -> Expr:
        find = self.references.target if keyword == "$ref" else self.references.dynamic_target
        node, scope = find(reference, path, self._scope)
        return self._expr(node, path, scope)

    def exclusive(self, branches: list[Expr], base: Shapes, path: str) -> list[Shapes]:
        """For each branch, the values of `base` that are in this branch alone.

        Raises:
            Refusal: two branches may overlap, and one has no complement.
        """
        ways = [self.both(base, self.shapes(branch), "oneOf", path) for branch in branches]
        found: list[Shapes] = []
        for i, way in enumerate(ways):
            mine = way
            for j, other in enumerate(ways):
                if i == j or not mine or self._apart(mine, other):
                    continue
                try:
                    rest = self.shapes(negated(branches[j]))
                except keywords.Refusal as error:
                    if self.best_effort:
                        continue
                    raise keywords.refusal(
                        "oneOf", path, f"has branches that may overlap, and {error}"
                    ) from error
                mine = self.both(mine, rest, "oneOf", path)
            found.append(mine)
        return found

    def _apart(self, left: Shapes, right: Shapes) -> bool:
        for a in left:
            for b in right:
                common = intersect(a, b, self) if a.kind == b.kind else None
                if common is not None and not shape_is_empty(common, self):
                    return False
        return True

    def otherwise(self, condition: Expr) -> Shapes:
        """The values that an `if` does not hold for; they may have the members that it names."""
        found = self.shapes(negated(condition))
        if not self.closes_objects:
            return found
        objects = [shape for shape in self.shapes(condition) if isinstance(shape, Objects)]
        stated = frozenset(name for shape in objects for name in shape.stated)
        return tuple(
            replace(shape, stated=shape.stated | stated) if isinstance(shape, Objects) else shape
            for shape in found
        )

    def both(self, left: Shapes, right: Shapes, keyword: str, path: str) -> Shapes:
        """The intersection of two unions.

        Raises:
            Refusal: it has too many parts; names the keyword that required it.
        """
        if left == FULL or right == FULL:
            return right if left == FULL else left
        found: dict[Shape, None] = {}
        for a in left:
            parts: list[Shape] = []
            for b in right:
                common = self._common(a, b, keyword, path) if a.kind == b.kind else None
                if common is not None:
                    parts.append(common)
                if common == a and all(_writes(a, other) for other in right):
                    # This part contains the others.
                    parts = [a]
                    break
            found.update(dict.fromkeys(parts))
            if len(found) > _MOST_SHAPES:
                raise keywords.refusal(keyword, path, _TOO_MANY)
        return tuple(found)

    def _common(self, a: Shape, b: Shape, keyword: str, path: str) -> Shape | None:
        self._meets += 1
        if self._meets > _MOST_MEETS:
            raise keywords.refusal(keyword, path, _TOO_MANY)
        full = EVERYTHING[a.kind]
        return b if a == full else a if b == full else intersect(a, b, self)

    def complement(self, shapes: Shapes, keyword: str, path: str) -> Shapes:
        """All values that are in none of the shapes."""
        rest: Shapes = FULL
        for shape in shapes:
            others = tuple(full for full in FULL if full.kind != shape.kind)
            for part in self._taken_apart(shape):
                rest = self.both(rest, (*complement(part), *others), keyword, path)
        return rest

    def _taken_apart(self, shape: Shape) -> Iterable[Shape]:
        """The shape itself; for fixed arrays and objects, the structure of each value."""
        if not isinstance(shape, Consts) or shape.kind not in ("array", "object"):
            return [shape]
        return [_structure(json.loads(text), self.expr) for _, text in shape.values]

    def holds(self, shape: Shape, text: str) -> bool:
        return contains_value(shape, loads(text), self)

    def has(self, expr: Expr, value: Any) -> bool:
        return expr == ANY or any(contains_value(s, value, self) for s in self.shapes(expr))

    def has_key(self, keys: Keys, name: str) -> bool:
        found = (
            name in keys.names
            or any(Pattern(pattern, "schema").matches(name) for pattern in keys.patterns)
            or any(self.has(expr, name) for expr in keys.exprs)
        )
        return found != keys.inverted

    def is_empty(self, expr: Expr) -> bool:
        """Whether an expression is surely empty; False if that is expensive to decide."""
        if expr in (ANY, NOTHING) or isinstance(expr, Doc):
            return expr == NOTHING or (expr in self._known and not self._known[expr])
        if expr in self._empty:
            return self._empty[expr]
        if self._depth >= _LOOK_AHEAD:
            return False
        self._depth += 1
        found = False
        try:
            with suppress(GrammarError):
                found = all(shape_is_empty(shape, self) for shape in self.shapes(expr))
                self._empty[expr] = found
        finally:
            self._depth -= 1
        return found


def _writes(shape: Shape, other: Shape) -> bool:
    """Whether a shape is written with all members that it would have beside another one."""
    if not isinstance(shape, Objects) or not isinstance(other, Objects) or not shape.closes:
        return True
    return other.closes is not False and other.stated <= shape.stated


def _structure(value: Any, expr: Callable[[Any, str], Expr]) -> Shape:
    """A fixed array or object as a shape over its members."""
    if isinstance(value, list):
        items = tuple(expr({"enum": [item]}, "$") for item in value)
        return Arrays(items, NOTHING, len(items), len(items))
    named = tuple((name, expr({"enum": [held]}, "$")) for name, held in value.items())
    rest = (Keys(frozenset(value), inverted=True), NOTHING)
    return Objects(named, (rest,), tuple(value))
