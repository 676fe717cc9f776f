"""References, unevaluated members and formats: cases of our own, and the JSON Schema Test Suite."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench import exactness
from bench.maskbench import feed
from bench.masks import VOCABULARY, Tokens, padded_tokens
from overlap_spec.cli.request import ConstraintFlags
from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler
from overlap_spec.grammar.backends import load
from tests.support.tiers import few

SUITE = Path(__file__).parents[3] / "shared" / "data" / "json_schema_test_suite"


@cache
def chosen() -> Tokens:
    return padded_tokens(VOCABULARY, 0)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(load("auto")(chosen().vocabulary), cache_bytes=0, isolated=False)


def split(schema: Any, values: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
    """The values that the grammar lets through, and the others."""
    options = {"additional_properties": "schema", **options}
    made = compiler().compile(Grammar.json_schema(schema, **options))
    taken: list[Any] = []
    refused: list[Any] = []
    for value in values:
        ids = chosen().encode(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        (taken if feed(made, ids, []) is None else refused).append(value)
    return taken, refused


INT, STR = {"type": "integer"}, {"type": "string"}
# Two resources with a definition of the same name.
TWO = {
    "$ref": "#/$defs/item",
    "$defs": {"inner": STR, "item": {"$id": "http://x/item", "$ref": "#/$defs/inner",
        "$defs": {"inner": INT}}},
}  # fmt: skip
# The generic list of the specification, closed over strings by an extension.
LIST = {
    "$id": "http://x/strings",
    "$ref": "list",
    "$defs": {"items": {"$dynamicAnchor": "T", "type": "string"},
        "list": {"$id": "list", "type": "array", "items": {"$dynamicRef": "#T"},
        "$defs": {"any": {"$dynamicAnchor": "T"}}}},
}  # fmt: skip
# An identifier in a place that is no schema.
EXAMPLE = {
    "$ref": "#v",
    "$defs": {"x": {"$anchor": "v", "type": "integer"}},
    "examples": [{"$anchor": "v"}],
}
OLD_TREE = {
    "$schema": "https://json-schema.org/draft/2019-09/schema",
    "$id": "http://x/tree",
    "$recursiveAnchor": True,
    "type": "object",
    "properties": {"next": {"$recursiveRef": "#"}, "value": INT},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (TWO, [1], ["a"]),
        (LIST, [[], ["a"]], [[1], ["a", None]]),
        (LIST["$defs"]["list"], [[], ["a", 1]], [1]),
        (EXAMPLE, [1], ["a", None]),
        (OLD_TREE, [{"next": {"next": {"value": 1}}}], [{"next": {"next": {"value": "a"}}}]),
    ],
    ids=["resource", "dynamic", "dynamic alone", "no schema", "recursive"],
)
def test_references_know_their_resource(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert split(schema, [*good, *bad]) == (good, bad)


def properties(**schemas: Any) -> dict[str, Any]:
    return {"properties": schemas}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {
                "type": "object",
                "allOf": [properties(a=INT)],
                "anyOf": [
                    {"properties": {"b": {"const": 1}}, "required": ["b"]},
                    {"properties": {"c": {"const": 2}}, "required": ["c"]},
                ],
                "unevaluatedProperties": False,
            },
            [{"a": 1, "b": 1}, {"c": 2}, {"b": 1, "c": 2}],
            [{"b": 1, "c": 3}, {"a": 1}, {"b": 1, "d": 1}],
        ),
        (
            {
                "type": "object",
                "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
                "then": properties(x=INT),
                "else": properties(kind=STR, y=INT),
                "unevaluatedProperties": False,
            },
            [{"kind": "x", "x": 1}, {"kind": "z", "y": 1}],
            [{"kind": "x", "y": 1}, {"kind": "z", "x": 1}],
        ),
        ({"type": "array", "prefixItems": [STR], "contains": INT,
            "unevaluatedItems": {"type": "null"}}, [["a", 1], ["a", 1, None, 2]],
            [["a", None], ["a", 1, "b"]]),
        ({"$schema": "https://json-schema.org/draft/2019-09/schema", "type": "array",
            "items": [STR], "unevaluatedItems": False}, [[], ["a"]], [["a", "b"], [1]]),
    ],
    ids=["anyOf", "if", "contains", "2019-09"],
)  # fmt: skip
def test_unevaluated_members_are_those_that_no_branch_has_seen(
    schema: Any, good: list[Any], bad: list[Any]
) -> None:
    assert split(schema, [*good, *bad]) == (good, bad)


FORMATS = {
    "date": (["2024-02-29", "2000-02-29"], ["1900-02-29", "2023-02-29", "2024-04-31"]),
    "date-time": (["2024-02-29t10:00:00.5z"], ["2024-02-29T10:00:00", "2024-02-29 10:00:00Z"]),
    "duration": (["P1DT2H", "P3W"], ["P", "PT", "P1W2D"]),
    "email": (["a.b@c.de", "a@[127.0.0.1]"], ["a..b@c.de", "a@"]),
    "hostname": (["a.example", "a--b"], ["-a", "a.", "x" * 64]),
    "ipv6": (["::", "2001:db8::1", "::ffff:1.2.3.4"], ["1::2::3", "1:2:3:4:5:6:7", "::g"]),
    "uri": (["http://[::1]:80/a?b#c", "urn:a:b"], ["//a/b", "http://a:b/", "a b:c"]),
    "uri-reference": (["", "../a", "#b"], ["1:b", "a\\b"]),
    "iri": (["http://ä.de/ö"], ["ä"]),
    "json-pointer": (["", "/a~1b/0"], ["a", "/~2"]),
    "relative-json-pointer": (["0#", "1/a"], ["01", "-1/a"]),
    "regex": (["^(a|b)+[0-9]{2}$", "[](?<=a+)\\cA"], ["(a", "a**", "\\b*", "(?=a)*"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
    "uuid4": (["2eb8aa08-aa98-41ea-b4aa-73b441d16380"], ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"]),
    "byte": (["aGk=", "", "aGkh aGkh\nIQ=="], ["a", "aGk", " aGkh"]),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("beside", few([{}, {"minLength": 1}, {"pattern": "^[^µ]*$"}], {}))
def test_a_format_is_held_beside_whatever(name: str, beside: dict[str, Any]) -> None:
    good, bad = FORMATS[name]
    good = [text for text in good if text or "minLength" not in beside]
    schema = {"type": "string", "format": name, **beside}
    assert split(schema, [*good, *bad]) == (good, bad)


def test_a_format_is_held_under_not_as_a_name_and_beside_min_length() -> None:
    dates = ["2024-01-01", "x"]
    assert split({"type": "string", "not": {"format": "date"}}, dates) == (["x"], dates[:1])
    assert split({"format": "uri", "minLength": 1}, ["a:b", "a"]) == (["a:b"], ["a"])
    names = {"type": "object", "propertyNames": {"format": "date"}}
    assert split(names, [{"2024-01-01": 1}, {"x": 1}]) == ([{"2024-01-01": 1}], [{"x": 1}])


@pytest.mark.parametrize("most", few((40, 254, 2083), 254))
def test_a_length_that_no_automaton_counts_is_held_too(most: int) -> None:
    mail, uri = "anna.k@mail.example", "https://www.example.org/a/b%20c?d=1"
    for name, text in (("email", mail), ("hostname", "www.example.org"), ("uri", uri)):
        long = text[0] * most + text
        schema = {"type": "string", "format": name, "minLength": 1, "maxLength": most}
        assert split(schema, [text, long, "@ "]) == ([text], [long, "@ "])


def test_formats_of_whole_numbers_bound_them() -> None:
    schema = {"type": "integer", "format": "int32"}
    good, bad = [2**31 - 1, -(2**31)], [2**31, -(2**31) - 1]
    assert split(schema, [*good, *bad]) == (good, bad)
    assert split({**schema, "format": "uint8"}, [255, 256, -1]) == ([255], [256, -1])


def test_a_format_is_an_annotation_where_asked() -> None:
    schema = {
        "properties": {"day": {"type": "string", "format": "date", "maxLength": 10}},
        "additionalProperties": {"$ref": "#/$defs/small"},
        "$defs": {"small": {"type": "integer", "format": "int8"}},
    }
    free = [{"day": "x"}, {"a": 300}, {"day": "2024-01-01", "a": 1}]
    long = {"day": "x" * 11}
    assert split(schema, [*free, long]) == (free[2:], [*free[:2], long])
    assert split(schema, [*free, long], formats="annotation") == (free, [long])


def test_what_a_format_is_belongs_to_the_grammar() -> None:
    schema = {"type": "string", "format": "sku"}
    free = Grammar.json_schema(schema, formats="annotation")
    assert free != Grammar.json_schema(schema)
    assert free.after_thinking().inner == free
    # Nobody asks that it be held, so there is nothing to tell.
    assert Grammar.json_schema(schema).warnings
    assert free.warnings == ()
    flags = ConstraintFlags(schema=json.dumps(schema), formats="annotation")
    assert flags.grammar(None) == free
    with pytest.raises(GrammarError, match="formats 'no' is not 'assertion' or 'annotation'"):
        Grammar.json_schema(schema, formats="no")  # type: ignore[arg-type]


@pytest.mark.skipif(not SUITE.is_dir(), reason="the JSON Schema Test Suite is not here")
@pytest.mark.parametrize("draft", few(exactness.DRAFTS, "2020-12"))
@pytest.mark.parametrize("part", exactness.PARTS)
def test_a_sample_of_the_suite_lets_nothing_wrong_through(draft: str, part: str) -> None:
    suite = list(exactness.entries(SUITE, draft, part))
    found = [exactness.judge(compiler(), entry, chosen()) for entry in suite[::9]]
    # `contentMediaType` is an annotation; a grammar has one spelling of a number.
    known = ("base64", "JSON document", "float is not an integer", "non-schema")
    wrong = [r.reason for r in found if r.name == "under_constrained"]
    assert [reason for reason in wrong if not any(part in reason for part in known)] == []
    assert sum(result.name == "clean" for result in found) >= 0.5 * len(found)


def test_what_lies_outside_is_refused_by_name() -> None:
    with pytest.raises(GrammarError, match="outside the schema"):
        compiler().compile(Grammar.json_schema({"$ref": "http://x/y#/a"}))


def test_a_format_beside_a_pattern_anywhere_in_it_is_held() -> None:
    # Its automaton has no expression of bearable length: it is routed to xgrammar.
    schema = {"type": "string", "format": "uri", "pattern": "example"}
    good, bad = ["https://www.example.org/a?b=c", "urn:example"], ["https://a.org", "//example"]
    assert split(schema, [*good, *bad]) == (good, bad)
