"""What a schema's draft is, and what of other drafts is refused, told, or held."""

import json
import sys
from functools import cache
from typing import Any

import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler
from tests.support.grammars import by_bytes, takes

DRAFT = "http://json-schema.org/draft-0{}/schema#"
INT, STR = {"type": "integer"}, {"type": "string"}


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(by_bytes(), cache_bytes=0, isolated=False)


def is_taken(schema: Any, value: Any, **options: Any) -> bool:
    grammar = Grammar.json_schema(schema, additional_properties="schema", **options)
    return takes(compiler().compile(grammar), json.dumps(value, separators=(",", ":")))


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"disallow": "string"}, "disallow"),
        ({"items": {"extends": STR}}, "extends"),
        ({"anyOf": [{"divisibleBy": 2}]}, "divisibleBy"),
        ({"properties": {"a": {"type": "string", "required": True}}}, "required"),
        ({"type": ["array", INT]}, "type"),
        ({"type": "any"}, "type"),
        ({"$defs": {"a": {"type": ["null", "any"]}}, "$ref": "#/$defs/a"}, "type"),
    ],
)
def test_draft_3_is_refused_by_its_words(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(GrammarError, match=rf"^\$.*: keyword '{word}' .*draft 3.*: say "):
        Grammar.json_schema(schema)
    with pytest.raises(GrammarError, match=r"^\$\.\$schema: draft 3 is not supported"):
        Grammar.json_schema({"$schema": DRAFT.format(3), **schema})
    # As names they are like any other.
    names = dict.fromkeys(("disallow", "extends", "divisibleBy", "required"), STR)
    assert is_taken({"properties": names}, {"disallow": "a", "required": "b"})


@pytest.mark.parametrize(
    ("draft", "keyword", "schema", "value"),
    [
        (4, "const", {"const": 1}, 2),
        (4, "contains", {"contains": INT}, []),
        (6, "if", {"if": True, "then": INT}, "a"),
        (7, "dependentRequired", {"dependentRequired": {"a": ["b"]}}, {"a": 1}),
        (7, "unevaluatedProperties", {"unevaluatedProperties": False}, {"a": 1}),
        (7, "minContains", {"contains": INT, "minContains": 2}, [1]),
    ],
)
def test_keywords_of_later_drafts_bind_nothing_and_are_told(
    draft: int, keyword: str, schema: dict[str, Any], value: Any
) -> None:
    older = {"$schema": DRAFT.format(draft), **schema}
    assert is_taken(older, value)
    assert not is_taken(schema, value)
    told = Grammar.json_schema(older).warnings
    assert any(f"$: keyword {keyword!r} is not of the draft" in warning for warning in told)
    assert Grammar.json_schema(schema).warnings == ()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"contentEncoding": "base64"}, "eyJmb28iOiAiYmFyIn0K", "eyJmb28iOi%iYmFyIn0K"),
        ({"contentMediaType": "application/json"}, '{"foo": ["bar", -1e5]}', "{:}"),
        ({"contentMediaType": "text/html", "contentEncoding": "7bit"}, "{:}", 1),
    ],
)
def test_draft_7_holds_the_content_of_strings(schema: Any, good: str, bad: Any) -> None:
    schema = {"type": "string", **schema}
    of_7 = {"$schema": DRAFT.format(7), **schema}
    assert is_taken(of_7, good)
    assert not is_taken(of_7, bad)
    # Newer drafts have it as an annotation, and so has whoever asks for no formats.
    is_text = isinstance(bad, str)
    assert is_taken(schema, bad) == is_taken(of_7, bad, formats="annotation") == is_text


def test_json_in_base64_is_refused_by_name() -> None:
    schema = {"contentMediaType": "application/json", "contentEncoding": "base64"}
    with pytest.raises(GrammarError, match=r"^\$: keyword 'contentMediaType' is not supported"):
        is_taken({"$schema": DRAFT.format(7), **schema}, "")
    assert is_taken(schema, "{:}")


def test_a_resource_inside_has_the_dialect_that_it_names() -> None:
    inner = {
        "$id": "http://x/old",
        "$schema": DRAFT.format(7),
        "items": [INT, STR],
        "definitions": {"n": INT},
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"a": {"$ref": "http://x/old"}, "b": {"prefixItems": [INT]}},
        "$defs": {"old": inner},
    }
    assert is_taken(schema, {"a": [1, "x"], "b": [1]})
    assert not is_taken(schema, {"a": ["x"]})
    assert not is_taken(schema, {"b": ["x"]})
    # Each is held to its own metaschema.
    with pytest.raises(GrammarError, match=r"\$\.\$defs\.old\.items"):
        Grammar.json_schema({"$defs": {"old": {**inner, "items": [1]}}})
    with pytest.raises(GrammarError, match=r"\$\.\$defs\.old\.items"):
        Grammar.json_schema({"$defs": {"old": {"items": [INT]}}})
    with pytest.raises(GrammarError, match=r"\$\.\$defs\.old\.\$schema: draft 3"):
        Grammar.json_schema({"$defs": {"old": {**inner, "$schema": DRAFT.format(3)}}})


def test_nullable_is_told() -> None:
    schema = {"properties": {"a": {"type": "string", "nullable": True}, "nullable": INT}}
    (warning,) = Grammar.json_schema(schema).warnings
    assert warning.startswith("$.properties.a: keyword 'nullable' is OpenAPI's")
    assert not is_taken(schema, {"a": None})


BROKEN: list[dict[str, Any]] = [
    {"type": "text"}, {"type": []}, {"type": ["null", "null"]}, {"required": ["a", "a"]},
    {"minLength": -1}, {"maxItems": True}, {"minimum": "1"}, {"multipleOf": 0}, {"enum": 1},
    {"pattern": "("}, {"patternProperties": {"(": {}}}, {"properties": {"a": 1}}, {"items": []},
    {"allOf": []}, {"anyOf": {}}, {"$ref": 1}, {"$defs": {"a": []}}, {"uniqueItems": 1},
    {"title": 1}, {"description": None}, {"not": 1}, {"$id": "a#b"}, {"$anchor": "1a"},
    {"dependentRequired": {"a": [1]}}, {"examples": {}},
]  # fmt: skip


@pytest.mark.parametrize("schema", BROKEN, ids=json.dumps)
def test_what_no_metaschema_takes_is_refused_at_any_depth(schema: dict[str, Any]) -> None:
    outer = {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, schema]}}}
    for given in (schema, outer):
        with pytest.raises(GrammarError, match=r"^\$"):
            Grammar.json_schema(given)


def test_a_wide_schema_takes_little_work_of_the_caller() -> None:
    """To interpret its metaschema would be over a thousand calls for each property."""
    names = {f"p{i}": {"type": "integer", "description": "x"} for i in range(1000)}
    schema = {"$id": "http://x/y", "type": "object", "properties": names}
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        Grammar.json_schema(schema)
    finally:
        sys.setprofile(None)
    assert calls < 60 * len(names)
