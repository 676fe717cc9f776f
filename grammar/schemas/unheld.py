"""What a schema asks for that nothing holds: formats that nobody knows, keywords that came after
the draft that the schema names, OpenAPI's `nullable`.

JSON Schema calls these annotations, so they refuse no schema and no value. They are told instead:
`Grammar.warnings`, and from there `Output.warnings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from overlap_spec.grammar.schemas.drafts import NEWEST, SINCE, draft_of
from overlap_spec.grammar.schemas.formats import is_known
from overlap_spec.grammar.schemas.source import json_path

# Keywords with one schema, with a list of schemas, and with schemas by name.
ONE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS = (
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
)  # fmt: skip
MOST_WARNINGS = 16


def warnings_of(schema: Any, path: str = "$", formats: bool = True) -> tuple[str, ...]:
    """At most :data:`MOST_WARNINGS`, one for each thing that is not held, at its first path."""
    found: dict[str, str] = {}
    for here, one, draft in schemas_in(schema, path):
        name = one.get("format")
        if formats and isinstance(name, str) and not is_known(name):
            found.setdefault(name, f"{here}: format {name!r} is not known, so it is not enforced")
        for key in one.keys() & SINCE.keys() if draft < NEWEST else ():
            if SINCE[key] > draft:
                wrong = f"{here}: keyword {key!r} is not of the draft that $schema names"
                found.setdefault(key, f"{wrong}, so it is not enforced")
        if one.get("nullable") is True:
            hint = 'say "null" in its type'
            wrong = f"{here}: keyword 'nullable' is OpenAPI's, so it allows no null: {hint}"
            found.setdefault("nullable", wrong)
        if len(found) >= MOST_WARNINGS:
            break
    return tuple(found.values())[:MOST_WARNINGS]


def schemas_in(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any], int]]:
    """A schema and those inside it, with their paths and drafts, from the outside to the inside."""
    pending = [(path, schema, NEWEST)]
    while pending:
        here, one, around = pending.pop()
        if not isinstance(one, dict):
            continue
        draft = draft_of(one, around) if here == path or names_dialect(one) else around
        yield here, one, draft
        inside = [(json_path(here, key), one[key]) for key in ONE if key in one]
        for key in LISTS:
            if isinstance(one.get(key), list):
                inside += [(json_path(here, key, i), part) for i, part in enumerate(one[key])]
        for key in MAPS:
            if isinstance(one.get(key), dict):
                inside += [(json_path(here, key, name), part) for name, part in one[key].items()]
        pending += [(where, part, draft) for where, part in reversed(inside)]


def names_dialect(schema: dict[str, Any]) -> bool:
    """Whether a schema inside another has a dialect of its own: only one with an identifier may."""
    return isinstance(schema.get("$schema"), str) and ("$id" in schema or "id" in schema)
