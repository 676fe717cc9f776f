"""Members in any order: exactly the valid instances, bounded, and asked for over every face."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from overlap_spec.cli.request import ConstraintFlags
from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.lowering.any_order import MOST_SETS
from tests.support.grammars import by_bytes, takes

INT, STR = {"type": "integer"}, {"type": "string"}
VALUES: list[Any] = [1, "a"]
OBJECTS: list[Any] = [
    dict(zip(names, values, strict=True))
    for n in range(5)
    for names in itertools.permutations(["a", "b", "c", "x1"], n)
    for values in itertools.product(VALUES if n < 3 else [1], repeat=n)
]


def made(schema: Any, name: str = "xgrammar", **options: Any) -> CompiledGrammar:
    options = {"key_order": "any", "additional_properties": "schema", **options}
    return by_bytes(name).compile(Grammar.json_schema(schema, **options))


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def obj(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


SCHEMAS: dict[str, Any] = {
    "closed": {**obj("a", a=INT, b=STR, c=INT), "additionalProperties": False},
    "all optional": {**obj(a=INT, b=INT), "additionalProperties": False},
    "open": obj("a", "c", a=INT, c=INT),
    "free keys of a type": {**obj("b", a=INT, b=INT), "additionalProperties": STR},
    "counted": {**obj("a", a=INT, b=INT, c=INT), "minProperties": 2, "maxProperties": 3},
    "free ones counted": {**obj(a=INT, b=INT), "maxProperties": 2},
    "keys by a pattern": {
        **obj("a", a=INT, b=INT),
        "patternProperties": {"^x": INT},
        "additionalProperties": False,
    },
    "a free member is required": {**obj("a", a=INT), "not": {"propertyNames": {"maxLength": 1}}},
    "impossible member": {**obj("a", a=INT, b=False), "additionalProperties": False},
    "either way": {"oneOf": [obj("a", "b", a=INT), {**obj("c", c=INT), "maxProperties": 1}]},
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_every_order_of_a_valid_object_and_no_other(name: str, library: str) -> None:
    schema = SCHEMAS[name]
    oracle = Draft202012Validator(schema)
    compiled = made(schema, library)
    pool = OBJECTS if library == "xgrammar" else OBJECTS[1::2]
    wrong = [text for v in pool if takes(compiled, text := compact(v)) != oracle.is_valid(v)]
    assert wrong == []
    assert any(oracle.is_valid(value) for value in pool)


def test_a_key_does_not_repeat() -> None:
    compiled = made({**obj(a=INT, b=INT), "additionalProperties": False})
    assert takes(compiled, '{"b":1,"a":2}')
    assert not takes(compiled, '{"b":1,"a":2,"b":3}')
    assert not takes(compiled, '{"b":1,"b":3}')


def test_inner_objects_and_layouts() -> None:
    inner = {**obj("x", "y", x=INT, y=INT), "additionalProperties": False}
    schema = {**obj("a", "b", a=inner, b=INT), "additionalProperties": False}
    value = {"b": 1, "a": {"y": 2, "x": 3}}
    assert takes(made(schema), compact(value))
    assert takes(made(schema, whitespace=2), json.dumps(value, indent=2))
    assert takes(made(schema, whitespace="bounded"), json.dumps(value))


def test_fixed_values_and_items_that_must_differ_keep_their_order() -> None:
    fixed = made({"enum": [{"a": 1, "b": 2}]})
    assert takes(fixed, '{"a":1,"b":2}')
    assert not takes(fixed, '{"b":2,"a":1}')
    closed = {**obj("a", "b", a=INT, b=INT), "additionalProperties": False}
    grammar = Grammar.json_schema(
        {"type": "array", "items": closed, "uniqueItems": True}, key_order="any"
    )
    with GrammarCompiler(by_bytes(), isolated=False) as compiler:
        compiled = compiler.compile(grammar)
    assert takes(compiled, '[{"a":1,"b":2},{"a":2,"b":2}]')
    assert not takes(compiled, '[{"a":1,"b":2},{"a":1,"b":2}]')
    assert not takes(compiled, '[{"a":1,"b":2},{"b":2,"a":1}]')


def closed(count: int) -> dict[str, Any]:
    return {**obj(**{f"k{i}": INT for i in range(count)}), "additionalProperties": False}


def orders() -> Iterator[list[str]]:
    names = [f"k{i}" for i in range(9)]
    yield names
    yield names[::-1]
    yield names[4:] + names[:4]


def test_nine_named_members_are_taken_and_ten_are_refused_by_name() -> None:
    assert MOST_SETS == 2**9
    compiled = made(closed(9), "llguidance")
    for names in orders():
        assert takes(compiled, compact(dict.fromkeys(names, 1)))
    with pytest.raises(GrammarError, match=r'key_order "any".*10 properties'):
        made(closed(10))
    many = obj(**{f"o{i}": {**closed(9), "title": f"{i}", "minProperties": i} for i in range(6)})
    with pytest.raises(GrammarError, match="over 2048 sets"):
        made({**many, "additionalProperties": False})
    with pytest.raises(GrammarError, match=r"\$: .*too many free ones to count"):
        made({**obj(a=INT), "maxProperties": 5000})


def test_key_order_is_part_of_a_grammar() -> None:
    schema = obj(a=INT)
    any_order = Grammar.json_schema(schema, key_order="any")
    assert any_order != Grammar.json_schema(schema)
    assert any_order.after_thinking().inner == any_order
    tool = {"type": "function", "function": {"name": "f"}}
    assert Grammar.tools([tool], otherwise=any_order).inner == any_order
    flags = ConstraintFlags(schema=json.dumps(schema), key_order="any")
    assert flags.grammar(None) == any_order
    with pytest.raises(GrammarError, match="key_order 'sorted' is not 'schema' or 'any'"):
        Grammar.json_schema(schema, key_order="sorted")  # type: ignore[arg-type]
