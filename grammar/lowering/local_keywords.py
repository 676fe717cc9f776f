"""A schema's local keywords as shapes, without applicators such as `allOf`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.intersect import consts, intersect, tidy_array
from overlap_spec.grammar.lowering.membership import kind_of
from overlap_spec.grammar.lowering.numbers import Bounds
from overlap_spec.grammar.lowering.shapes import (
    ANY,
    BOOLEANS,
    KINDS,
    NOTHING,
    NULL,
    Arrays,
    Contains,
    Document,
    Expr,
    Keys,
    Numbers,
    Objects,
    Shape,
    Shapes,
    Strings,
)
from overlap_spec.grammar.schemas import formats
from overlap_spec.grammar.schemas.source import json_path, key_of, loads

Schema = dict[str, Any]
# Keywords that say what members are that `properties` does not name.
_OTHERS = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))


def shapes(plain: Schema, path: str, source: Document) -> Shapes:
    """The shapes of a schema's local keywords, given in the form of draft 2020-12."""
    found: list[Shape] = []
    for kind, whole in _types(plain):
        shape = _of_kind(kind, whole, plain, path, source)
        if shape is not None:
            found.append(shape)
    if "enum" in plain:
        return tuple(_fixed(plain["enum"], found, source))
    return tuple(found)


def _types(plain: Schema) -> Iterator[tuple[str, bool | None]]:
    named = plain.get("type", KINDS)
    kinds = [named] if isinstance(named, str) else list(named)
    for kind in dict.fromkeys(kinds):
        if kind == "integer":
            if "number" not in kinds:
                yield "number", True
        else:
            yield kind, None


def _of_kind(
    kind: str, whole: bool | None, plain: Schema, path: str, source: Document
) -> Shape | None:
    if kind == "object":
        return _object(plain, path, source)
    if kind == "array":
        return tidy_array(_array(plain, path, source))
    if kind == "string":
        return _string(plain, path)
    if kind == "number":
        step = plain.get("multipleOf")
        steps = () if step is None else (_decimal(step),)
        shape = Numbers(_bounds(plain), whole, steps)
        if shape.bounds.is_empty:
            return None
        span = formats.INTEGERS.get(plain.get("format", ""))
        if span is None:
            return shape
        low, high = map(Decimal, span)
        return intersect(shape, Numbers(Bounds(low, high), True), source)
    return BOOLEANS if kind == "boolean" else NULL


def _fixed(values: list[Any], allowed: list[Shape], source: Document) -> Iterator[Shape]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for value in values:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        exact = loads(text)
        groups.setdefault(kind_of(exact), []).append((key_of(exact), text))
    for kind, pairs in groups.items():
        fixed = consts(kind, pairs)
        for shape in allowed:
            held = intersect(fixed, shape, source) if fixed else None
            if held is not None:
                yield held


def _decimal(value: Any) -> Decimal:
    return Decimal(repr(value))


def _bounds(plain: Schema) -> Bounds:
    low, high = plain.get("minimum"), plain.get("maximum")
    above, below = plain.get("exclusiveMinimum"), plain.get("exclusiveMaximum")
    open_low = above is not None and (low is None or above >= low)
    open_high = below is not None and (high is None or below <= high)
    bottom, top = above if open_low else low, below if open_high else high
    return Bounds(
        None if bottom is None else _decimal(bottom),
        None if top is None else _decimal(top),
        open_low,
        open_high,
    )


def _count(plain: Schema, keyword: str) -> int | None:
    return None if plain.get(keyword) is None else int(plain[keyword])


def _most(plain: Schema, keyword: str) -> int | None:
    count = _count(plain, keyword)
    # No text is as long, and the libraries do not count so far.
    return None if count is None or count >= 2**31 else count


def _string(plain: Schema, path: str) -> Strings | None:
    least, most = _count(plain, "minLength") or 0, _most(plain, "maxLength")
    if most is not None and least > most:
        return None
    found = [plain.get("pattern"), formats.pattern(plain.get("format", ""))]
    if plain.get("contentMediaType") == formats.JSON:
        if "contentEncoding" in plain:
            reason = "is not supported beside 'contentEncoding'"
            raise keywords.refusal("contentMediaType", path, reason)
        found.append(formats.pattern(formats.JSON))
    if plain.get("contentEncoding") == "base64":
        found.append(formats.pattern("base64"))
    return Strings(least, most, tuple(pattern for pattern in found if pattern is not None))


def _array(plain: Schema, path: str, source: Document) -> Arrays:
    prefix = tuple(
        source.expr(item, json_path(path, "prefixItems", i))
        for i, item in enumerate(plain.get("prefixItems", []))
    )
    rest = source.expr(plain.get("items", True), json_path(path, "items"))
    contains: tuple[Contains, ...] = ()
    if "contains" in plain:
        item = source.expr(plain["contains"], json_path(path, "contains"))
        least = _count(plain, "minContains")
        one = Contains(0, item, 1 if least is None else least, _most(plain, "maxContains"))
        contains = (one,) if one.least or one.most is not None else ()
    least, most = _count(plain, "minItems") or 0, _most(plain, "maxItems")
    return Arrays(prefix, rest, least, most, bool(plain.get("uniqueItems")), contains)


def _object(plain: Schema, path: str, source: Document) -> Objects | None:
    properties = plain.get("properties", {})
    named = tuple(
        (name, source.expr(schema, json_path(path, "properties", name)))
        for name, schema in properties.items()
    )
    patterns = plain.get("patternProperties", {})
    rules: list[tuple[Keys, Expr]] = []
    for pattern, schema in patterns.items():
        value = source.expr(schema, json_path(path, "patternProperties", pattern))
        rules.append((Keys(patterns=(pattern,)), value))
    here = json_path(path, "additionalProperties")
    rest = source.expr(plain.get("additionalProperties", True), here)
    if rest != ANY:
        rules.append((Keys(frozenset(properties), tuple(patterns), (), True), rest))
    names = source.expr(plain.get("propertyNames", True), json_path(path, "propertyNames"))
    if names != ANY:
        rules.append((Keys(exprs=(names,), inverted=True), NOTHING))
    required = plain.get("required", [])
    least, most = _count(plain, "minProperties") or 0, _most(plain, "maxProperties")
    if most is not None and least > most:
        return None
    wanted = tuple(dict.fromkeys(required)) if isinstance(required, list) else ()
    kept = tuple(rule for rule in rules if rule[1] != ANY)
    shape = Objects(named, kept, wanted, (), least, most)
    if not source.closes_objects:
        return shape
    closes = False if _OTHERS & plain.keys() else True if named else None
    return replace(shape, stated=frozenset((*properties, *wanted)), closes=closes)
