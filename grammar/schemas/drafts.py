"""Drafts of JSON Schema by number (4, 6, 7, 2019, 2020), and which keywords came with them."""

from __future__ import annotations

import re

NEWEST = 2020
SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("contentEncoding", "contentMediaType", "else", "if", "then"), 7),
    **dict.fromkeys(
        (
            "$recursiveRef", "dependentRequired", "dependentSchemas", "maxContains",
            "minContains", "unevaluatedItems", "unevaluatedProperties",
        ),
        2019,
    ),
    **dict.fromkeys(("$dynamicRef", "prefixItems"), 2020),
}  # fmt: skip
"""The draft from which on a keyword is one; all others are older."""
_NAMES = re.compile(r"//json-schema\.org/draft(?:-0([467])/|/(2019|2020)-)")


def draft_of(schema: object, default: int = NEWEST) -> int:
    """The draft that a document's `$schema` names; `default` if it names none that is known."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    found = _NAMES.search(name) if isinstance(name, str) else None
    return int(found[1] or found[2]) if found else default
