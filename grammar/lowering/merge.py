"""The conjunction of two schemas as one schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from overlap_spec.grammar.lowering import keywords

Schema = dict[str, Any]
Resolve = Callable[[Any], Any]

_HIGHEST = ("minimum", "minLength", "minItems", "minProperties")
_LOWEST = ("maximum", "maxLength", "maxItems", "maxProperties")
_OBJECT = ("properties", "patternProperties", "additionalProperties")
_ARRAY = ("prefixItems", "items")


class NotMergeableError(Exception):
    """Two schemas whose conjunction has no schema here; the argument is the keyword."""


def merge(left: Any, right: Any, resolve: Resolve) -> Any:
    """A schema that holds where both do.

    Args:
        left: A schema.
        right: Another.
        resolve: Replaces a schema whose `$ref` stands beside others by an equal one without.

    Raises:
        NotMergeableError: naming the keyword that stands in the way.
    """
    if left is False or right is False:
        return False
    left, right = ({} if side is True else side for side in (left, right))
    a, b = keywords.constraints(left), keywords.constraints(right)
    if not a or not b or a == b:
        return right if not a else left
    if "$ref" in a or "$ref" in b:
        return merge(resolve(left), resolve(right), resolve)
    merged: Schema = {}
    _merge_containers(a, b, merged, resolve)
    for key in dict.fromkeys([*a, *b]):
        if key in _OBJECT or key in _ARRAY:
            continue
        if key not in a or key not in b:
            merged[key] = a[key] if key in a else b[key]
        else:
            merged[key] = _merge_keyword(key, a[key], b[key], resolve)
    if any(merged.get(key) == [] for key in ("type", "enum")):
        return False
    return merged


def _common(left: list[Any], right: list[Any]) -> list[Any]:
    return [value for value in left if any(keywords.same(value, other) for other in right)]


def _merge_keyword(key: str, left: Any, right: Any, resolve: Resolve) -> Any:
    if json.dumps(left) == json.dumps(right):
        return left
    if key in _HIGHEST or key == "exclusiveMinimum":
        return max(left, right)
    if key in _LOWEST or key == "exclusiveMaximum":
        return min(left, right)
    if key == "type":
        return _common_types(left, right)
    if key == "enum":
        return _common(left, right)
    if key == "required":
        return list(dict.fromkeys([*left, *right]))
    if key == "anyOf":
        pairs = [merge(one, other, resolve) for one in left for other in right]
        return [pair for pair in pairs if pair is not False] or [False]
    if key == "allOf":
        return [*left, *right]
    if key == "uniqueItems":
        return left or right
    if key == "propertyNames":
        return merge(left, right, resolve)
    if key == "format":
        return left
    if key == "multipleOf" and isinstance(left, int) and isinstance(right, int):
        return math.lcm(left, right)
    raise NotMergeableError(key)


def _common_types(left: Any, right: Any) -> list[str]:
    one = [left] if isinstance(left, str) else left
    other = [right] if isinstance(right, str) else right
    common = [kind for kind in one if kind in other or (kind == "integer" and "number" in other)]
    common += [kind for kind in other if kind == "integer" and "number" in one]
    return list(dict.fromkeys(common))


def _merge_containers(a: Schema, b: Schema, merged: Schema, resolve: Resolve) -> None:
    for keys, combine in ((_OBJECT, _merge_objects), (_ARRAY, _merge_arrays)):
        mine = {key: a[key] for key in keys if key in a}
        theirs = {key: b[key] for key in keys if key in b}
        merged.update(combine(mine, theirs, resolve) if mine and theirs else mine or theirs)


def _merge_objects(a: Schema, b: Schema, resolve: Resolve) -> Schema:
    for one, other in ((a, b), (b, a)):
        closed = other.get("additionalProperties", True) not in (True, {})
        if one.get("patternProperties") and (closed or other.get("patternProperties")):
            raise NotMergeableError("patternProperties")
    properties: Schema = {}
    for name in dict.fromkeys([*a.get("properties", {}), *b.get("properties", {})]):
        # Each side's view of a name is its own property, or else its patterns and the rest.
        properties[name] = merge(view(a, name, resolve), view(b, name, resolve), resolve)
    merged: Schema = {"properties": properties}
    patterns = {**a.get("patternProperties", {}), **b.get("patternProperties", {})}
    if patterns:
        merged["patternProperties"] = patterns
    rest = merge(a.get("additionalProperties", True), b.get("additionalProperties", True), resolve)
    if rest not in (True, {}):
        merged["additionalProperties"] = rest
    return merged


def view(side: Schema, name: str, resolve: Resolve) -> Any:
    """What an object schema asks of the member `name`, from all three of its keywords."""
    matching = [
        schema
        for pattern, schema in side.get("patternProperties", {}).items()
        if re.search(pattern, name)
    ]
    if name in side.get("properties", {}):
        matching.append(side["properties"][name])
    if not matching:
        return side.get("additionalProperties", True)
    view = matching[0]
    for schema in matching[1:]:
        view = merge(view, schema, resolve)
    return view


def _merge_arrays(a: Schema, b: Schema, resolve: Resolve) -> Schema:
    first, second = a.get("prefixItems", []), b.get("prefixItems", [])
    rest_a, rest_b = a.get("items", True), b.get("items", True)
    length = max(len(first), len(second))
    one = [*first, *[rest_a] * (length - len(first))]
    other = [*second, *[rest_b] * (length - len(second))]
    merged: Schema = {"items": merge(rest_a, rest_b, resolve)}
    if length:
        merged["prefixItems"] = [merge(p, q, resolve) for p, q in zip(one, other, strict=True)]
    return merged
