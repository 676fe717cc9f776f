"""Objects that name members have no others by default, unless their schema says of them."""

import itertools
import json
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator, validators
from pydantic import BaseModel, ConfigDict

from overlap_spec.cli.request import ConstraintFlags
from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler
from overlap_spec.grammar.contract import CompiledGrammar
from tests.support.grammars import by_bytes

INT, STR = {"type": "integer"}, {"type": "string"}
NAMES = ("a", "b", "c", "x")
OBJECTS: list[Any] = [
    dict(zip(names, values, strict=True))
    for count in range(5)
    for names in itertools.combinations(NAMES, count)
    for values in itertools.product([1, "s"] if count < 4 else [1], repeat=count)
]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(by_bytes(), cache_bytes=0, isolated=False)


def made(schema: Any, **options: Any) -> CompiledGrammar:
    return compiler().compile(Grammar.json_schema(schema, **options))


def takes(compiled: CompiledGrammar, value: Any) -> bool:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    matcher = compiled.matcher()
    return all(map(matcher.accept, text.encode())) and matcher.is_complete


def orders(value: Any) -> list[Any]:
    return [dict(pairs) for pairs in itertools.permutations(value.items())]


def obj(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


class Person(BaseModel):
    name: str
    age: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


def test_a_model_has_its_fields_alone() -> None:
    person, more = {"name": "Maria", "age": 34}, {"name": "Maria", "age": 34, "age_years": 34}
    assert takes(made(Person), person)
    assert not takes(made(Person), more)
    assert takes(made(Person, additional_properties="schema"), more)
    assert takes(made(Open), more)
    # What names no member has any.
    assert takes(made({"type": "object"}), more)
    assert takes(made({"type": "object", "properties": {}, "required": ["name"]}), more)
    inner = made({"type": "array", "items": obj(a=Person.model_json_schema())})
    assert takes(inner, [{"a": person}])
    assert not takes(inner, [{"a": more}])


A_IS_1 = obj("a", a={"const": 1})
# Ways to be valid: the names that a closed schema then takes, and when.
CLOSED: dict[str, tuple[Any, list[tuple[str, Any]]]] = {
    "allOf": ({"allOf": [obj(a=INT), obj(b=INT)]}, [("ab", True)]),
    "ref": ({"$ref": "#/$defs/base", **obj(b=STR), "$defs": {"base": obj("a", a=INT)}},
        [("ab", True)]),
    "required beside": (obj("c", a=INT), [("ac", True)]),
    "anyOf": ({"anyOf": [obj("a", a=INT), obj("b", b=INT)], **obj(c=STR)},
        [("ac", True), ("bc", True)]),
    "anyOf with all": ({"anyOf": [{}, obj("b", b=INT)], **obj(c=STR)},
        [("c", True), ("bc", obj("b", b=INT))]),
    "oneOf": ({"oneOf": [obj("a", a=INT), obj("b", b=INT)]}, [("a", True), ("b", True)]),
    "if": ({"if": A_IS_1, "then": obj(b=INT), "else": obj("c", c=INT), "type": "object"},
        [("ab", A_IS_1), ("ac", {"not": A_IS_1})]),
    "not": ({**obj(a=INT), "not": obj("b", b=INT)}, [("a", True)]),
    "dependentRequired": ({**obj(a=INT), "dependentRequired": {"a": ["c"]}},
        [("a", {"maxProperties": 0}), ("ac", {"required": ["c"]})]),
    "dependentSchemas": ({**obj(a=INT, b=INT), "dependentSchemas": {"a": obj(c=INT)}},
        [("b", True), ("abc", {"required": ["a"]})]),
    "unevaluated items": ({**obj(a=INT), "allOf": [obj(b=INT)], "unevaluatedItems": False},
        [("ab", True)]),
    "counted": ({**obj(a=INT, b=INT), "minProperties": 1}, [("ab", True)]),
    "enum": ({**obj(a=INT), "enum": [{"a": 1, "x": 1}]}, [("ax", True)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_the_names_of_a_conjunction_are_one_set(name: str) -> None:
    schema, ways = CLOSED[name]
    valid, compiled = Draft202012Validator(schema).is_valid, made(schema)
    found = 0
    for value in OBJECTS:
        wanted = valid(value) and any(
            value.keys() <= set(names) and Draft202012Validator(when).is_valid(value)
            for names, when in ways
        )
        assert any(takes(compiled, order) for order in orders(value)) == wanted, value
        found += wanted
    assert found


# What is said of other members holds as JSON Schema has it.
SAID: dict[str, Any] = {
    "true": {**obj(a=INT), "additionalProperties": True},
    "typed": {**obj(a=INT), "additionalProperties": STR},
    "pattern": {**obj(a=INT), "patternProperties": {"^x": INT}},
    "unevaluated": {**obj(a=INT), "unevaluatedProperties": True},
    "typed unevaluated": {**obj(a=INT), "unevaluatedProperties": STR},
    "in a member": {"allOf": [obj(a=INT), {**obj(b=STR), "additionalProperties": True}]},
    "in a reference": {**obj(a=INT), "$ref": "#/$defs/d",
                       "$defs": {"d": {"additionalProperties": INT}}},
    "in one alternative": {"anyOf": [{"additionalProperties": INT}, {"required": ["a"]}]},
    "older": {"$schema": "http://json-schema.org/draft-07/schema#", **obj(a=INT),
              "additionalProperties": {}},
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_schema_that_says_what_others_are_has_them(name: str) -> None:
    schema = SAID[name]
    valid = validators.validator_for(schema, Draft202012Validator)(schema).is_valid
    compiled = made(schema)
    for value in OBJECTS:
        assert any(takes(compiled, order) for order in orders(value)) == valid(value), value


def test_items_that_must_differ_may_run_out_of_closed_objects() -> None:
    items = {"type": "array", "items": obj("a", a={"enum": [1, 2]}), "uniqueItems": True}
    assert takes(made(items), [{"a": 1}, {"a": 2}])
    assert not takes(made(items), [{"a": 1}, {"a": 1}])
    assert not takes(made(items), [{"a": 1}, {"a": 1, "x": 1}])
    with pytest.raises(GrammarError, match="uniqueItems"):
        made({**items, "minItems": 3})


def test_where_nothing_is_left_the_way_out_is_told() -> None:
    schema = {**obj(a=INT), "minProperties": 2}
    with pytest.raises(
        GrammarError, match=r'no value is valid.* or additional_properties="schema"'
    ):
        made(schema)
    assert takes(made(schema, additional_properties="schema"), {"a": 1, "b": 1})
    with pytest.raises(GrammarError) as failed:
        made({"type": "integer", "minimum": 2, "maximum": 1})
    assert "additional_properties" not in str(failed.value)


def test_it_belongs_to_the_grammar() -> None:
    closed, free = (
        Grammar.json_schema(Person, additional_properties=value)  # type: ignore[arg-type]
        for value in ("closed", "schema")
    )
    assert closed == Grammar.json_schema(Person)
    assert closed != free
    assert free.after_thinking().inner == free
    assert Grammar.of(Person, additional_properties="schema") == free
    flags = ConstraintFlags(schema=json.dumps(Person.model_json_schema()))
    written = flags.grammar(None, "schema")
    assert written is not None
    assert written.additional_properties == "schema"
    with pytest.raises(GrammarError, match="additional_properties 'no' is not 'closed' or 'sch"):
        Grammar.json_schema(Person, additional_properties="no")  # type: ignore[arg-type]


TOOL = {"type": "function", "function": {"name": "f", "parameters": obj("a", a=INT)}}


@pytest.mark.parametrize("strict", [True, False])
def test_arguments_of_tools_and_tags_are_closed_too(strict: bool) -> None:
    def call(arguments: str, **options: Any) -> bool:
        grammar = Grammar.tools([TOOL], choice="required", strict=strict, **options)
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        return takes(compiler().compile(grammar), text)

    def tag(content: str, style: str = "json", **options: Any) -> bool:
        form = {"type": "json_schema", "style": style, "json_schema": obj("a", a=obj(b=INT))}
        spec = {"type": "structural_tag", "format": form}
        return takes(compiler().compile(Grammar.structural_tag(spec, **options)), content)

    assert call('{"a":1}')
    assert not call('{"a":1,"x":1}')
    assert call('{"a":1,"x":1}', additional_properties="schema")
    assert tag('{"a":{"b":1}}')
    assert not tag('{"a":{"x":1}}')
    assert tag('{"a":{"x":1}}', additional_properties="schema")
    assert tag('<parameter=a>{"b":1}</parameter>', "qwen_xml")
    assert not tag('<parameter=a>{"x":1}</parameter>', "qwen_xml")
