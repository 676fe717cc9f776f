"""What a schema asks for that nothing holds: formats that nobody knows.

JSON Schema calls an unknown format an annotation, so it refuses no schema and no value. It is told
instead: `Grammar.warnings`, and from there `Output.warnings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from overlap_spec.grammar.formats import is_known
from overlap_spec.grammar.source import json_path

_ONE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = (
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
)  # fmt: skip
MOST_WARNINGS = 16


def warnings_of(schema: Any, path: str = "$") -> tuple[str, ...]:
    """A warning for each unknown format of a schema, with the first path that has it; at most
    :data:`MOST_WARNINGS`.

    Args:
        schema: Valid under its metaschema.
        path: Where it stands.
    """
    found: dict[str, str] = {}
    for here, one in _schemas(schema, path):
        name = one.get("format")
        if isinstance(name, str) and name not in found and not is_known(name):
            found[name] = f"{here}: format {name!r} is not known, so it is not enforced"
            if len(found) == MOST_WARNINGS:
                break
    return tuple(found.values())


def _schemas(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and those inside it, with their paths, from the outside to the inside."""
    pending = [(path, schema)]
    while pending:
        here, one = pending.pop()
        if not isinstance(one, dict):
            continue
        yield here, one
        inside = [(json_path(here, key), one[key]) for key in _ONE if key in one]
        for key in _LISTS:
            if isinstance(one.get(key), list):
                inside += [(json_path(here, key, i), part) for i, part in enumerate(one[key])]
        for key in _MAPS:
            if isinstance(one.get(key), dict):
                inside += [(json_path(here, key, name), part) for name, part in one[key].items()]
        pending += reversed(inside)
