"""JSON Schema keywords: which are enforced, which are annotations, which are refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.schemas.drafts import SINCE

ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema",
        "$vocabulary", "contentSchema", "default", "definitions", "deprecated", "description",
        "example", "examples", "id", "readOnly", "title", "writeOnly"
    }
)  # fmt: skip
READ = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties",
        "allOf", "anyOf", "const", "contains", "contentEncoding", "contentMediaType",
        "dependencies", "dependentRequired", "dependentSchemas", "else", "enum",
        "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items", "maxContains",
        "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems",
        "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern",
        "patternProperties", "prefixItems", "properties", "propertyNames", "required", "then",
        "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"
    }
)  # fmt: skip
# Later drafts than that of these have them as annotations alone.
_CONTENT = ("contentEncoding", "contentMediaType")
ANNOTATIVE = ("format", *_CONTENT)
"""Keywords that are annotations where formats are."""
# Keywords that only modify another one.
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
# Values with which a keyword has no effect.
_TRIVIAL: dict[str, tuple[Any, ...]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
}


def constraints(schema: Mapping[str, Any], draft: int) -> dict[str, Any]:
    """The keywords that have an effect in a draft, in the form of draft 2020-12.

    Annotations and keywords without effect are left out, as are those of later drafts; `const`
    becomes `enum`, a list in `items` becomes `prefixItems`, and boolean exclusive bounds become
    numeric ones.
    """
    kept = {
        key: value
        for key, value in schema.items()
        if key in READ
        and SINCE.get(key, 0) <= draft
        and not (key in _CONTENT and draft > SINCE[key])
        and not (key in _NEEDS and _NEEDS[key] not in schema)
        and value not in _TRIVIAL.get(key, ())
    }
    rest = kept.pop("additionalItems", None)
    if isinstance(kept.get("items"), list):
        kept["prefixItems"] = kept.pop("items")
        if rest is not None:
            kept["items"] = rest
    for bound, exclusive in _EXCLUSIVE.items():
        if isinstance(kept.get(exclusive), bool) and kept.pop(exclusive) and bound in kept:
            kept[exclusive] = kept.pop(bound)
    if "const" in kept:
        value = kept.pop("const")
        kept["enum"] = [v for v in kept.get("enum", [value]) if same(v, value)]
    return kept


def same(left: Any, right: Any) -> bool:
    """JSON equality: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return bool(left == right)


def check(schema: Mapping[str, Any], path: str) -> None:
    """Refuse what looks like a misspelt keyword.

    Raises:
        GrammarError: names the keyword and its path.
    """
    for key in schema:
        meant = _meant(key)
        if meant:
            raise refusal(key, path, f"is not a JSON Schema keyword; did you mean {meant!r}?")


def is_known(schema: Mapping[str, Any]) -> bool:
    """Whether no key looks like a misspelt keyword."""
    return not any(map(_meant, schema))


@lru_cache(4096)
def _meant(key: str) -> str | None:
    if key in ANNOTATIONS or key in READ or not key[:1].isalpha():
        return None
    in_other_case = [word for word in READ if word.lower() == key.lower()]
    meant = in_other_case or difflib.get_close_matches(key, READ, 1, 0.84)
    return meant[0] if meant else None


class Refusal(GrammarError):
    """A keyword that cannot be enforced exactly."""


def refusal(keyword: str, path: str, reason: str) -> Refusal:
    """An error that names a keyword and its path."""
    return Refusal(f"{path}: keyword {keyword!r} {reason}", "schema")
