"""Checks a schema document against its metaschema before anything reads it.

A metaschema is a schema, and to interpret it takes a fifth of a millisecond for each schema of a
document. What most documents are made of is known to be valid without: strings, counts, lists of
names. A document with anything else is interpreted. A part with an identifier and a `$schema` of
its own is held to that one, and draft 3, whose keywords mean something else, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.dialect import explicit
from overlap_spec.grammar.schemas.source import json_path
from overlap_spec.grammar.schemas.unheld import LISTS, MAPS, ONE, names_dialect, schemas_in

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
# Dialects whose metaschemas agree on the keywords below.
_ALIKE = re.compile(r"https?://json-schema\.org/draft(-0[67]|/20(19-09|20-12))/schema#?")
_REFERENCE = re.compile(r"[A-Za-z0-9_.$/~-]*(#[A-Za-z0-9_.$/~-]*)?")
_ANCHOR = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:/~-]+#?")
_DEEPEST = 64
_OLD = "draft-03/schema"
_OLD_WORDS = {
    "disallow": '"not"',
    "divisibleBy": '"multipleOf"',
    "extends": '"allOf"',
    "required": "a list of names in the object's schema",
    "type": '"anyOf", or no type for any',
}


def check_schema(schema: Any) -> None:
    """Check a schema against its metaschema.

    Raises:
        GrammarError: it is invalid; names the path.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"$: a schema is an object or a boolean, not {schema!r}", "schema")
    if _is_surely_valid(schema):
        return
    try:
        _interpret(schema)
    except RecursionError as error:
        raise GrammarError("the schema is nested too deep", "schema") from error


def _interpret(document: Any) -> None:
    names_draft = isinstance(document, dict) and "$schema" in document
    resources = [("$", document)]
    for path, schema, _ in schemas_in(document, "$"):
        if _OLD in str(schema.get("$schema", "")):
            where = json_path(path, "$schema")
            raise GrammarError(f"{where}: draft 3 is not supported: say draft 4 or later", "schema")
        if not names_draft:
            _refuse_old_words(schema, path)
        if schema is not document and names_dialect(schema):
            resources.append((path, schema))
    inner = {id(schema) for _, schema in resources[1:]}
    for path, schema in resources:
        _hold(_without(schema, inner - {id(schema)}) if inner else schema, path)


def _hold(schema: Any, path: str) -> None:
    """Hold a schema to the metaschema that it names; by default the newest."""
    from jsonschema import SchemaError, validators

    kind: Any = validators.validator_for(schema, validators.Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=_formats(kind.FORMAT_CHECKER.checkers))
    except SchemaError as error:
        where = json_path(path, *error.absolute_path)
        reason = error.message
        if error.absolute_path and error.absolute_path[-1] == "type":
            reason = f"{error.instance!r} is not a JSON Schema type"
        raise GrammarError(f"{where}: {reason}", "schema") from error


def _without(value: Any, left_out: set[int]) -> Any:
    """A copy of a document in which some schemas allow everything."""
    if id(value) in left_out:
        return {}
    if isinstance(value, dict):
        return {key: _without(part, left_out) for key, part in value.items()}
    return [_without(part, left_out) for part in value] if isinstance(value, list) else value


def _refuse_old_words(schema: dict[str, Any], path: str) -> None:
    """Refuse what only draft 3 reads, in a document that names no draft."""
    kinds = schema.get("type")
    mixed = isinstance(kinds, list) and any(isinstance(kind, dict) for kind in kinds)
    for word, instead in _OLD_WORDS.items():
        if word == "type":
            is_old = mixed or kinds == "any" or (isinstance(kinds, list) and "any" in kinds)
        elif word == "required":
            is_old = isinstance(schema.get(word), bool)
        else:
            is_old = word in schema
        if is_old:
            raise GrammarError(
                f"{path}: keyword {word!r} is used as in draft 3, which is not supported: "
                f"say {instead}",
                "schema",
            )


def _formats(known: Any) -> Any:
    """A metaschema's formats, with patterns as they are read here."""
    from jsonschema import FormatChecker

    checker = FormatChecker(())
    checker.checkers = {**known, "regex": (_is_pattern, re.error)}
    return checker


def _is_pattern(text: Any) -> bool:
    return not isinstance(text, str) or re.compile(explicit(text, "ecma")) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_names(value: Any) -> bool:
    is_texts = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return is_texts and len(set(value)) == len(value)


def _are_plain(values: list[Any]) -> bool:
    """Whether all are texts, whole numbers or null, and differ."""
    return all(type(v) in (str, int, type(None)) for v in values) and len({*values}) == len(values)


def _is_type(value: Any) -> bool:
    if isinstance(value, str):
        return value in _TYPES
    return _is_names(value) and bool(value) and _TYPES.issuperset(value)


def _compiles(value: Any) -> bool:
    try:
        return isinstance(value, str) and _is_pattern(value)
    except (re.error, GrammarError, RecursionError):
        return False


_VALUES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("$comment", "description", "format", "title"), lambda v: isinstance(v, str)),
    **dict.fromkeys(
        ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"), _is_number
    ),
    **dict.fromkeys(
        (
            "maxContains", "maxItems", "maxLength", "maxProperties",
            "minContains", "minItems", "minLength", "minProperties",
        ),
        _is_count,
    ),
    **dict.fromkeys(
        ("deprecated", "readOnly", "uniqueItems", "writeOnly"), lambda v: isinstance(v, bool)
    ),
    **dict.fromkeys(("const", "default"), lambda _: True),
    "$ref": lambda v: isinstance(v, str) and _REFERENCE.fullmatch(v) is not None,
    "$schema": lambda v: isinstance(v, str) and _ALIKE.fullmatch(v) is not None,
    "$anchor": lambda v: isinstance(v, str) and _ANCHOR.fullmatch(v) is not None,
    "$id": lambda v: isinstance(v, str) and _IDENTIFIER.fullmatch(v) is not None,
    "dependentRequired": lambda v: isinstance(v, dict) and all(map(_is_names, v.values())),
    "enum": lambda v: isinstance(v, list) and bool(v) and _are_plain(v),
    "examples": lambda v: isinstance(v, list),
    "multipleOf": lambda v: _is_number(v) and v > 0,
    "pattern": _compiles,
    "required": _is_names,
    "type": _is_type,
}  # fmt: skip
# Of these a metaschema asks for more than is looked at here.
_OTHERS = frozenset((
    "additionalItems", "contentEncoding", "contentMediaType", "contentSchema", "dependencies",
    "disallow", "divisibleBy", "extends",
))  # fmt: skip


def _is_surely_valid(document: Any) -> bool:
    """Whether a document is valid in all dialects that agree, as far as a look tells."""
    pending: list[tuple[Any, int]] = [(document, 0)]
    while pending:
        schema, depth = pending.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return False
        inside: list[Any] = []
        for key, value in schema.items():
            if not _takes(key, value, inside):
                return False
        if depth and "$schema" in schema:
            return False
        pending += [(part, depth + 1) for part in inside]
    return True


def _takes(key: Any, value: Any, inside: list[Any]) -> bool:
    """Whether a keyword may have a value; what is a schema in it is appended to `inside`."""
    if key in _VALUES:
        return _VALUES[key](value)
    if key in _OTHERS:
        return False
    if key in ONE:
        inside.append(value)
        return True
    if key in LISTS:
        inside += value if isinstance(value, list) else ()
        return isinstance(value, list) and bool(value)
    if key in MAPS:
        inside += value.values() if isinstance(value, dict) else ()
        is_map = isinstance(value, dict) and all(isinstance(name, str) for name in value)
        return is_map and (key != "patternProperties" or all(map(_compiles, value)))
    return isinstance(key, str) and not key.startswith("$")
