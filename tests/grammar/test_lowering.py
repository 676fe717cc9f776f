"""The texts that a schema or a pattern allows, byte by byte, against jsonschema, json and re."""

import itertools
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validators

from bench.masks import Order
from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.automata.regex import parse
from overlap_spec.grammar.automata.regex_ast import is_deterministic
from overlap_spec.grammar.contract import CompiledGrammar
from tests.support.grammars import STOP, by_bytes, legal, takes

DATA = Path(__file__).parents[3] / "shared" / "data" / "jsonschemabench_dev.jsonl"
TREE = {"$ref": "#/$defs/t", "$defs": {"t": {"items": {"$ref": "#/$defs/t"}, "type": "array"}}}
PATTERN = {
    "type": "object",
    "patternProperties": {"^x": {"type": "null"}},
    "additionalProperties": False,
}
OPEN = {"properties": {"a": {"type": "integer"}}, "additionalProperties": True, "type": "object"}


@cache
def compiled(grammar: Grammar) -> CompiledGrammar:
    return by_bytes().compile(grammar)


def random_text(grammar: Grammar, rng: random.Random, most: int = 600) -> bytes | None:
    """A random sentence, drawn byte by byte from the masks; None if it did not end in time."""
    matcher, out = compiled(grammar).matcher(), bytearray()
    while len(out) < most:
        choices = legal(matcher)
        assert choices, f"dead end after {bytes(out)!r}"
        if STOP in choices and (len(choices) == 1 or len(out) > 300 or rng.random() < 0.5):
            return bytes(out)
        choices = [c for c in choices if c != STOP]
        closing = 30.0 if len(out) > 40 else 4.0
        weights = [closing if c in b'"}]' else 0.05 if c >= 0x80 else 1.0 for c in choices]
        out += bytes(rng.choices(choices, weights))
        assert matcher.accept(out[-1])
    return None


ACCEPTED = [
    ({"type": "string"}, ['""', '"a\\n\\u00e9\\ud83d\\ude00😀"', '"\x7f"']),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ['"\\n\\""', '"😀"', '"\\ud83d\\ude00a"']),
    ({"type": "string", "pattern": "ab"}, ['"ab"', '"xxabxx"', '"\\nab"']),
    ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 3}, ['"abc"', '"a"']),
    ({"type": "string", "pattern": '^"$'}, ['"\\""']),
    ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"']),
    ({"type": "integer"}, ["0", "-1", "120"]),
    ({"type": "number"}, ["-0.5", "1e10", "1.25E-3"]),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, ["-3", "0", "11"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.001", "0.50"]),
    ({"type": "integer", "multipleOf": 7}, ["0", "-14", "700"]),
    ({"type": "number", "exclusiveMinimum": 0},
     ["0.30000000000000004", "1e-5", "12.5E3", "0.00001", "1"]),
    ({"type": "number", "minimum": 0}, ["0.30000000000000004", "1e-5", "0", "0.0", "0e5", "1e+20"]),
    ({"type": "number", "maximum": 0}, ["-0.30000000000000004", "-1e-5", "0", "0.0", "-12"]),
    ({"type": "number", "exclusiveMaximum": 0}, ["-0.3", "-2.5e7"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.30000000000000004", "1", "1.0"]),
    ({"type": "number", "minimum": 1e-7}, ["0.0000001", "0.00000012", "1", "5.5"]),
    ({"type": "number", "minimum": 5, "maximum": 12.5}, ["5", "5.0", "5.25", "12", "12.5", "11.9"]),
    ({"type": "number", "minimum": 1e308}, [f"1{'0' * 308}", f"2{'0' * 308}.5", f"1{'1' * 309}"]),
    ({"enum": [0.1, "é", {"a": [1, 2]}, 12345678901234567890]}, ["0.1", '"é"', '{"a":[1,2]}']),
    ({"enum": [2.0]}, ["2", "2.0"]),
    ({"minimum": 3}, ["3", '"text"', "null", "{}"]),
    (OPEN, ["{}", '{"a":1}', '{"a":1,"b":[1,{"c":2}]}', '{"aa":1,"":2}']),
    (OPEN, ['{"a\\t":1}', '{"a":1,"\\u0001":2,"b\\n":3}']),
    ({"properties": {"a\t": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
     ['{"a":1,"a\\n":1}', '{"a\\t":null,"\\t":1}', '{"a\\u0001":1}']),
    ({"patternProperties": {"^a": {"type": "null"}}}, ['{"a\\t":null,"\\t":1}']),
    ({**OPEN, "required": ["z"]}, ['{"z":1}', '{"a":1,"z":null,"q":0}']),
    ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}']),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, ["[]", "[null]"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1}, ["[null]"]),
    ({"allOf": [OPEN, {"required": ["a"]}]}, ['{"a":1}']),
    ({"anyOf": [{"type": "null"}, {"type": "integer"}], "minimum": 3}, ["null", "4"]),
    (TREE, ["[[],[[]]]"]),
    (PATTERN, ["{}", '{"xy":null}']),
    ({"type": "string", "format": "date"}, ['"2024-02-28"']),
]  # fmt: skip

REJECTED = [
    ({"type": "string"}, ['"\t"', '"\\ud83d"', '"\\x"', b'"\xe0\x81\xba"', b'"\xed\xa0\x80"']),
    ({"type": "string", "maxLength": 2}, ['"abc"', '"\x01"', '"\\n\\n\\n"']),
    ({"type": "string", "pattern": "^a$"}, ['"ab"', '"\\u0062"']),
    ({"type": "string", "pattern": '^"$'}, ['"""']),
    ({"type": "integer"}, ["01", "1.0", "-", "+1"]),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, ["-4", "12", "99"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0", "0.0", "0.51", "-1"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0", "0.0", "0e5", "0.0e1", "-1", "-1e-5"]),
    ({"type": "number", "minimum": 0}, ["-1", "-0.1", "-1e-5"]),
    ({"type": "number", "maximum": 0}, ["1", "0.1", "1e-5"]),
    ({"type": "number", "exclusiveMaximum": 0}, ["0", "-0", "-0.0", "-0e5", "1"]),
    ({"exclusiveMinimum": 0, "not": {"const": 20}}, ["20", "2e1", "20.0"]),
    ({"exclusiveMinimum": 0, "multipleOf": 0.5}, ["0.25", "25e-2"]),
    ({"type": "number", "minimum": 5, "maximum": 12.5}, ["4.9", "12.6", "12.51", "5e0", "13"]),
    ({"type": "number", "minimum": 1e308}, ["5", f"9{'9' * 307}", "1e99"]),
    ({"type": "integer", "multipleOf": 7}, ["1", "701"]),
    (OPEN, ['{"a":"x"}', '{"\\u0061":"x"}', '{"a":1,"a":"x"}', '{"b":1,"a":"x"}', '{"a": 1}']),
    ({**OPEN, "required": ["a"]}, ["{}", '{"b":1}']),
    ({"properties": {"a\t": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
     ['{"a\\t":1}', '{"a\\n":null}', '{"a\\u0009":1}', b'{"a\t":1}']),
    ({**OPEN, "additionalProperties": False}, ['{"b":1}']),
    ({"type": "object"}, ['{"a":[1, 2]}', '{"a":{"b": 1}}', '{ }', '{"a":1} ', '{"a":1,}']),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, ["[1,2,3]", '["a"]', "[1,]"]),
    ({"allOf": [OPEN, {"required": ["a"]}]}, ["{}"]),
    ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, ["true"]),
    ({"type": "string", "format": "date"}, ['"2024-02-31"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "texts"), ACCEPTED, ids=lambda v: json.dumps(v)[:60])
def test_valid_texts_get_through(schema: Any, texts: list[str]) -> None:
    grammar = Grammar.json_schema(schema)
    assert [text for text in texts if not takes(compiled(grammar), text)] == []


@pytest.mark.parametrize(("schema", "texts"), REJECTED, ids=lambda v: repr(v)[:60])
def test_invalid_texts_do_not(schema: Any, texts: list[str | bytes]) -> None:
    grammar = Grammar.json_schema(schema)
    assert [text for text in texts if takes(compiled(grammar), text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"not": {"uniqueItems": True}}}}, r"\$\.properties\.a: .*'not'"),
        ({"$dynamicRef": "#t"}, "\\$dynamicRef: no \\$anchor 't'"),
        ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems'"),
        ({"type": "array", "not": {"uniqueItems": True}}, "'not' negates 'uniqueItems'"),
        ({"type": "integer", "multipleOf": 123457}, "'multipleOf' needs too large an automaton"),
        ({"type": "object", "minProperties": 2}, "'minProperties'"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look-behind"),
        ({"type": "string", "pattern": "((?!a)b)*"}, "look-around inside a repeat"),
        (
            {
                "anyOf": [{"properties": {name: {}}} for name in "abcdefghi"],
                "unevaluatedProperties": False,
            },
            "'unevaluatedProperties' stands beside too many",
        ),
        ({"items": {"propertes": {}}}, r"\$\.items: keyword 'propertes' .*'properties'"),
        ({"$ref": "http://x/y"}, "outside the schema"),
        ({"$ref": "#/$defs/none"}, "not found"),
        ({"$ref": "#"}, "form a cycle"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "no value is valid"),
        ({"minimum": 10**400 + 7}, "keyword 'minimum' has 401 digits: bounds of up to 64"),
        ({"exclusiveMinimum": 1e308}, "keyword 'exclusiveMinimum' has 309 digits"),
        ({"type": "integer", "maximum": 10**70 + 7}, "keyword 'maximum' has 71 digits"),
        (False, "no value is valid"),
    ],
    ids=lambda v: json.dumps(v)[:60],
)
def test_what_is_not_exact_is_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiled(Grammar.json_schema(schema))


def test_best_effort_skips_what_would_be_refused() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "contains": {}}
    grammar = Grammar.json_schema(schema, best_effort=True)
    assert takes(grammar, "[1,1]")
    assert not takes(grammar, '["a"]')


def test_annotations_and_unknown_words_say_nothing() -> None:
    schema = {"type": "null", "title": "t", "default": 1, "$comment": "c", "x-order": 3, "_y": 1}
    assert takes(Grammar.json_schema(schema), "null")


def test_layouts() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}},
            "b": {"enum": [{"c": [1]}]},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    value = {"a": [1, 2], "b": {"c": [1]}}
    for indent in (0, 2, 4):
        grammar = Grammar.json_schema(schema, whitespace=indent)
        assert takes(grammar, json.dumps(value, indent=indent))
        assert not takes(grammar, json.dumps(value, separators=(",", ":")))
    bounded = Grammar.json_schema(schema, whitespace="bounded")
    assert takes(bounded, '{"a":[1,2],"b":{"c":[1]}}')
    assert takes(bounded, '{ "a": [\n 1,\n 2 ],\n  "b": {"c":[1]}\n}')
    assert not takes(bounded, "{" + " " * 17 + '"a":[1,2],"b":{"c":[1]}}')
    with pytest.raises(GrammarError, match="bounded depth"):
        compiled(Grammar.json_schema({"type": "object"}, whitespace=2))


def test_compact_means_no_space_anywhere() -> None:
    rng = random.Random(3)
    grammars = [Grammar.json_object(), Grammar.json_schema({}), Grammar.json_schema(OPEN)]
    for grammar, _ in itertools.product(grammars, range(15)):
        text = random_text(grammar, rng)
        if text is not None:
            value = json.loads(text)
            bare = re.sub(rb'"([^"\\]|\\.)*"', b'""', text)
            assert not set(b" \t\n\r") & set(bare), (text, value)


def test_other_kinds() -> None:
    choice = Grammar.choice(["yes", "no", 'a "b"\n\\'])
    assert [takes(choice, text) for text in ("yes", 'a "b"\n\\', "ye")] == [True, True, False]
    date = Grammar.regex(r"^\d{4}-(?<month>\d\d)$")
    assert [takes(date, text) for text in ("2024-05", "x2024-05", "2024-5")] == [True, False, False]
    ebnf = Grammar.ebnf('root ::= "(" root ")" | ""')
    assert takes(ebnf, "(())")
    with pytest.raises(GrammarError, match="EBNF line 1, column 11"):
        compiled(Grammar.ebnf("root ::= ("))


def random_regex(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.25:
        return rng.choice(["a", "b", "é", "[ab]", "[bé]", "[^a]"])
    if kind < 0.5:
        return random_regex(rng, depth - 1) + random_regex(rng, depth - 1)
    if kind < 0.7:
        return f"({random_regex(rng, depth - 1)}|{random_regex(rng, depth - 1)})"
    count = rng.choice(["?", "*", "+", "{2}", "{1,2}", "{0,2}", "{2,}", "{0,3}"])
    return f"({random_regex(rng, depth - 1)}){count}"


def test_regexes_mean_what_re_means() -> None:
    rng = random.Random(11)
    texts = ["".join(t) for n in range(5) for t in itertools.product("abé", repeat=n)]
    seen = {True: 0, False: 0}
    while min(seen.values()) < 60:
        pattern = random_regex(rng, rng.choice([2, 3]))
        seen[is_deterministic(parse(pattern))] += 1
        grammar = Grammar.regex(pattern)
        made = by_bytes().compile(grammar)
        wrong = [t for t in texts if takes(made, t) != bool(re.fullmatch(pattern, t))]
        assert wrong == [], pattern


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.ci
@pytest.mark.skipif(not DATA.exists(), reason="JSONSchemaBench sample is not here")
def test_schemas_in_the_wild() -> None:
    entries = [json.loads(line) for line in DATA.read_text().splitlines()][::8]
    rng, refused = random.Random(5), 0
    for entry in entries:
        schema = entry["schema"]
        try:
            grammar = Grammar.json_schema(schema, additional_properties="schema")
            compiled(grammar)
        except GrammarError:
            refused += 1
            continue
        for case in entry["tests"]:
            got = takes(compiled(grammar), compact(Order(schema).apply(case["data"])))
            assert got == case["valid"], entry["id"]
        text = random_text(grammar, rng)
        if text is not None:
            check = validators.validator_for(schema, validators.Draft202012Validator)
            check(schema).validate(json.loads(text))
    assert refused <= len(entries) // 20


@pytest.mark.parametrize("length", [400, 2000])
def test_a_long_name_beside_free_keys(length: int) -> None:
    """Only a library that has an operator for it can leave out a name that long."""
    schema = {"properties": {"a" * length: {"type": "integer"}}, "additionalProperties": True}
    with pytest.raises(GrammarError, match="too deep"):
        by_bytes().compile(Grammar.json_schema(schema))
    assert by_bytes().compile(Grammar.json_schema({**schema, "additionalProperties": False}))
    made = by_bytes("llguidance").compile(Grammar.json_schema(schema))
    for name, taken in (
        ("a" * length, False),
        ("a" * (length - 1), True),
        ("a" * length + "a", True),
    ):
        assert takes(made, f'{{"{name}":"x"}}') == taken, len(name)


@pytest.mark.parametrize(("key", "meant"), [("propertys", "properties"), ("anyof", "anyOf")])
def test_a_misspelt_keyword_is_refused_with_what_was_meant(key: str, meant: str) -> None:
    with pytest.raises(GrammarError, match=f"{key}.*did you mean '{meant}'"):
        takes(Grammar.json_schema({"type": "object", key: []}), "{}")
