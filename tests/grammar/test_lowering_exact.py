"""Combined schemas allow exactly the instances that are valid by jsonschema."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator, validators

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.automata.dfa import NONE, Dfa, both, from_node, neither
from overlap_spec.grammar.automata.escape import plain
from overlap_spec.grammar.automata.regex_ast import Node, Ref
from overlap_spec.grammar.ir.rules import Holding
from overlap_spec.grammar.ir.tokens import Except
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.lowering.shapes import Strings
from overlap_spec.grammar.lowering.strings import automaton, string_language
from tests.support.grammars import by_bytes, takes

D4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
D7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
SCALARS: list[Any] = [None, True, False, 0, 1, 2, 3, 4, 6, -1, 12, 0.5, 1.5, 0.25, 2.75, -0.5]
STRINGS = ["", "a", "b", "ab", "ba", "abc", "aab", "x1", "foo", "foobar", "a b", "é", "\n", "12"]
ARRAYS: list[Any] = [
    list(items) for n in range(4) for items in itertools.product([1, 2, "a"], repeat=n)
]
VALUES: list[Any] = [1, "a", None]
OBJECTS: list[Any] = [
    dict(zip(names, values, strict=True))
    for n in range(4)
    for names in itertools.combinations(["a", "b", "c", "ab", "x1"], n)
    for values in itertools.product(VALUES if n < 3 else [1, "a"], repeat=n)
]
NESTED: list[Any] = [{"a": {"b": 1}}, {"a": {"b": "a"}, "b": [1]}, [[1], {"a": 1}], [[], {}]]
EVERYTHING = [*SCALARS, *STRINGS, *ARRAYS, *OBJECTS, *NESTED]


def spellings(value: Any) -> Iterator[str]:
    """Compact JSON of a value in each order of its outermost keys."""
    orders: Any = [value]
    if isinstance(value, dict):
        orders = map(dict, itertools.permutations(value.items()))
    for ordered in orders:
        yield json.dumps(ordered, separators=(",", ":"), ensure_ascii=False)


def wrong(schema: Any, pool: list[Any]) -> list[tuple[bool, str]]:
    """Instances on which grammar and oracle disagree, with the oracle's verdict."""
    oracle = validators.validator_for(schema, Draft202012Validator)(schema)
    grammar = Grammar.json_schema(schema, additional_properties="schema")
    compiled = by_bytes().compile(grammar)
    found = []
    for value in pool:
        valid = oracle.is_valid(value)
        taken = [text for text in spellings(value) if takes(compiled, text)]
        if valid != bool(taken):
            found.append((valid, taken[0] if taken else json.dumps(value)))
    return found


def obj(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


INT, STR, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
REWRITES: dict[str, Any] = {
    "draft-4 exclusive bounds": {**D4, "minimum": 1, "exclusiveMinimum": True, "maximum": 3},
    "draft-4 tuple": {**D4, "type": "array", "items": [INT, STR], "additionalItems": False},
    "draft-4 definitions": {**D4, "definitions": {"t": INT}, "$ref": "#/definitions/t"},
    "draft-7 lone $ref": {**D7, "definitions": {"t": INT}, "$ref": "#/definitions/t", "minimum": 2},
    "2020 $ref with siblings": {"$defs": {"t": INT}, "$ref": "#/$defs/t", "minimum": 2},
    "draft-7 dependencies": {**D7, "dependencies": {"a": ["b"], "c": obj("a", a=INT)}},
    "draft-7 string dependency": {**D7, **obj(a=INT), "dependencies": {"a": {"required": ["b"]}}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"], "b": ["c"]}},
    "dependentSchemas": {**obj(a={}, b={}), "dependentSchemas": {"a": {"maxProperties": 1}}},
    "oneOf by type": {"oneOf": [INT, STR]},
    "oneOf by const": {
        "oneOf": [obj("a", a={"const": 1}, b=INT), obj("a", a={"const": "a"}, b=STR)]
    },
    "oneOf by presence": {**obj(a={}, b={}), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "oneOf that overlaps": {"oneOf": [INT, {"type": "number", "minimum": 2}]},
    "oneOf of strings": {"oneOf": [{"type": "string", "pattern": "a"}, {"enum": ["b", "ab"]}]},
    "oneOf thrice": {"oneOf": [{"minimum": 0}, {"multipleOf": 2}, STR]},
    "not a type": {"not": {"type": ["integer", "string"]}},
    "not an enum": {"not": {"enum": [1, "a", None, [1], {"a": 1}, True]}},
    "not required": {"type": "object", "not": {"required": ["a", "b"]}},
    "not a pattern": {"type": "string", "not": {"pattern": "^a|b$"}},
    "not bounds": {"type": "number", "not": {"minimum": 1, "exclusiveMaximum": 3}},
    "not lengths": {"type": "string", "not": {"minLength": 1, "maxLength": 2}},
    "not multipleOf": {"type": "integer", "minimum": 0, "not": {"multipleOf": 3}},
    "not properties": {"not": {"type": "object", "properties": {"a": INT}}},
    "not items": {"type": "array", "not": {"items": INT}},
    "not a tuple": {"type": "array", "not": {"prefixItems": [INT, STR], "items": False}},
    "not closed": {"type": "object", "not": {**obj(a={}), "additionalProperties": False}},
    "not patternProperties": {"type": "object", "not": {"patternProperties": {"^a": INT}}},
    "not propertyNames": {"type": "object", "not": {"propertyNames": {"pattern": "^a"}}},
    "one member that is free twice": {"type": "object", "maxProperties": 1,
        "allOf": [{"not": {"propertyNames": {"not": {"pattern": "b"}}}},
        {"not": {"propertyNames": {"not": {"pattern": "^a"}}}}]},
    "a free member that another one is": {"type": "object", "minProperties": 1,
        "allOf": [{"not": {"properties": {"a": {}, "b": {}}, "additionalProperties": False}},
        {"not": {"properties": {"a": {}}, "additionalProperties": False}}]},
    "keys of one kind": {"type": "object", "propertyNames": {"maxLength": 1, "pattern": "[ab]"},
        "additionalProperties": {"type": "integer"}},
    "not not": {"not": {"not": obj("a", a=INT)}},
    "De Morgan over anyOf": {"not": {"anyOf": [{"required": ["a"]}, {"type": "string"}]}},
    "De Morgan over allOf": {"not": {"allOf": [{"minimum": 1}, {"type": "number"}]}},
    "not oneOf": {"not": {"oneOf": [INT, {"minimum": 2}]}},
    "not minItems": {"type": "array", "not": {"minItems": 1, "maxItems": 2}},
    "not maxProperties": {"type": "object", "not": {"maxProperties": 0}},
    "if then else": {"if": obj("a", a=INT), "then": {"required": ["b"]}, "else": STR},
    "if then": {"type": "object", "if": obj(a=INT), "then": {"required": ["b"]}},
    "if else": {"if": {"type": "string"}, "else": {"minimum": 2}},
    "if chain": {
        "type": "object",
        "required": ["a"],
        "allOf": [
            {"if": obj("a", a={"const": 1}), "then": {"required": ["b"]}},
            {"if": obj("a", a={"const": "a"}), "then": obj(b=False)},
            {"if": obj("a", a=NULL), "then": obj("c", c=INT)},
        ],
    },
    "patternProperties beside free": {"type": "object", "patternProperties": {"^a": INT}},
    "two patterns": {"type": "object", "patternProperties": {"a": {"type": ["integer", "null"]},
        "b": {"type": ["integer"]}}, "additionalProperties": STR},
    "pattern on a named property": {**obj(a={"minimum": 1}), "patternProperties": {"a": INT}},
    "patterns combined": {"allOf": [{"patternProperties": {"a": INT}},
        {"patternProperties": {"b": INT}}], "type": "object"},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 1}},
    "propertyNames beside properties": {**obj(ab=INT), "propertyNames": {"pattern": "^[ac]"}},
    "propertyNames by enum": {"type": "object", "propertyNames": {"enum": ["a", "x1"]}},
    "maxProperties": {**obj(a={}, b={}), "maxProperties": 1},
    "minProperties": {"type": "object", "minProperties": 1},
    "multipleOf": {"type": "integer", "multipleOf": 3},
    "multipleOf a fraction": {"type": "number", "multipleOf": 0.25},
    "multipleOf with bounds": {"multipleOf": 2, "minimum": 1, "exclusiveMaximum": 12},
    "two multipleOf": {"allOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "number"},
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2, "a"]}, "uniqueItems": True},
    "uniqueItems of one": {"type": "array", "uniqueItems": True, "maxItems": 1},
    "contains": {"type": "array", "contains": STR},
    "contains at most": {"type": "array", "contains": INT, "minContains": 0, "maxContains": 2},
    "contains several": {"type": "array", "contains": INT, "minContains": 2},
    "contains some of three": {"contains": INT, "minContains": 2, "maxContains": 2, "minItems": 3},
    "does not contain several": {"type": "array", "not": {"contains": INT, "minContains": 2},
        "maxItems": 3},
    "contains exactly": {"type": "array", "contains": INT, "maxContains": 1, "maxItems": 2},
    "contains beside items": {"type": "array", "items": INT, "contains": {"const": 2}},
    "patterns and a length": {"type": "string", "pattern": "a", "minLength": 2, "maxLength": 3},
    "two string patterns": {"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"},
    "look-ahead": {"type": "string", "pattern": "^(?!foo)[a-z]+$"},
    "positive look-ahead": {"type": "string", "pattern": "^(?=.*b)a"},
    "look-ahead in a group": {"type": "string", "pattern": "^((?!a)[a-z]|ab)"},
    "unknown format": {"type": "string", "format": "no-such-format"},
    "unevaluatedProperties": {**obj(a=INT), "unevaluatedProperties": False},
    "allOf of arrays": {"allOf": [{"prefixItems": [INT]}, {"items": {"maximum": 1}}]},
    "anyOf beside properties": {**obj(a=INT), "anyOf": [{"required": ["a"]}, obj("b", b=STR)]},
    "const and enum": {"const": 1, "enum": [1.0, "a"]},
}  # fmt: skip


@pytest.mark.parametrize("name", REWRITES)
def test_rewrites_accept_the_same_instances(name: str) -> None:
    schema = REWRITES[name]
    oracle = validators.validator_for(schema, Draft202012Validator)(schema)
    verdicts = {oracle.is_valid(value) for value in EVERYTHING}
    assert verdicts == {True, False} or name == "unknown format"
    assert wrong(schema, EVERYTHING) == []


def test_recursion_through_combined_schemas() -> None:
    tree = {"type": "object", "properties": {"b": {"$ref": "#/$defs/t"}}, "required": ["b"]}
    leaf = {"not": {"type": ["object", "array"]}}
    schema = {"$ref": "#/$defs/t", "$defs": {"t": {"oneOf": [tree, leaf]}}}
    values = [
        1,
        {"b": 1},
        {"b": {"b": "x"}},
        {"b": []},
        {"b": {"b": {}}},
        {},
        [],
        {"b": {"b": None}},
    ]
    assert wrong(schema, values) == []
    both = {"allOf": [{"$ref": "#/$defs/t"}, {"not": {"const": 1}}], "$defs": schema["$defs"]}
    assert wrong(both, values) == []


LENGTHS = [(0, 0), (1, 1), (0, 5), (2, 9), (0, 30), (5, None)]
BESIDE_LENGTHS = [
    "^a", "a$", "^https?://", r"^\S.*\S$", "^(foo|ba)-", "^a|b$", "^(a|bc){0,2}x*$", "^.{3}x",
    "^[A-Z]{2,4}-[0-9]+$", "^a?b?c?", "^(a|b*)$", "^a{2}|^b{0,40}$", "^(a?){2}b*", "^[ab]{5}c",
    "^.*$", "aa$", "^((ab)*c)?y", "^x((ab)+|c){1,2}$", "^(a|bc){30,31}.*", "^a{900,902}.*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", BESIDE_LENGTHS)
def test_a_pattern_beside_lengths_is_an_expression_of_the_same_texts(pattern: str) -> None:
    for least, most in LENGTHS:
        shape = Strings(least, most, (pattern,))
        found, wanted = string_language(shape, "$", plain) or NONE, automaton(shape)
        assert not isinstance(found, Except | Holding)
        made = found if isinstance(found, Dfa) else from_node(found)
        assert both(made, neither(wanted)).is_empty
        assert both(wanted, neither(made)).is_empty


HOLDING = ["a", r"\S", "[^a]", r".*\S.*", r"[\s\S]", "x|[y-\U0001f600]"]


@pytest.mark.parametrize("pattern", HOLDING)
def test_a_character_anywhere_beside_lengths_is_rules_of_the_same_texts(pattern: str) -> None:
    for least, most in [(0, 1), (1, 1), (0, 2), (0, 5), (2, 2), (2, 9), (5, 6), (9, 9), (0, 30)]:
        shape = Strings(least, most, (pattern,))
        found, wanted = string_language(shape, "$", plain), automaton(shape)
        assert isinstance(found, Holding)
        # Each rule stands for itself here.
        made = from_node(found.written(lambda body: body, plain))
        assert both(made, neither(wanted)).is_empty
        assert both(wanted, neither(made)).is_empty


def test_a_large_bound_takes_few_rules() -> None:
    rules = list[Node]()
    found = string_language(Strings(3, 100_000, (r"\S",)), "$", plain)
    assert isinstance(found, Holding)
    found.written(lambda body: rules.append(body) or Ref(f"r{len(rules)}"), plain)
    assert len(rules) < 100


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize(("least", "most"), [(0, 300), (7, 300), (0, 40_000)])
def test_a_character_anywhere_beside_large_bounds(backend: str, least: int, most: int) -> None:
    schema = {"type": "string", "pattern": r"\S", "minLength": least, "maxLength": most}
    compiled = by_bytes(backend).compile(Grammar.json_schema(schema))
    texts = [
        "",
        "x",
        " " * 6 + "x",
        " " * 7,
        "\u2028" * 6 + '"',
        "\\ \U0001f600\n",
        " " * 299 + "x",
    ]
    texts += [" " * 300 + "x", "x" * 300, "x" * 301, " " * 150 + "x" * 150, " " * 300]
    for text in texts:
        valid = Draft202012Validator(schema).is_valid(text)
        assert takes(compiled, json.dumps(text, ensure_ascii=False)) == valid, text
    # Behind the one that is asked for, a character has each form that JSON allows.
    assert takes(compiled, f'"{" " * 9}x\\u0061"')


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize(
    ("pattern", "most", "head"),
    [("^/", 255, "/"), ("^https?://", 2048, "http://"), ("^x", 65535, "x")],
)
def test_a_prefix_beside_a_large_bound_compiles(
    backend: str, pattern: str, most: int, head: str
) -> None:
    schema = {"type": "string", "pattern": pattern, "maxLength": most}
    compiled = by_bytes(backend).compile(Grammar.json_schema(schema))
    assert takes(compiled, json.dumps(head + "a" * 90))
    assert not takes(compiled, json.dumps("a" + head))
    if most < 300:
        assert takes(compiled, json.dumps(head + "a" * (most - len(head))))
        assert not takes(compiled, json.dumps(head + "a" * (most - len(head) + 1)))


@pytest.mark.parametrize("keyword", ["maxLength", "maxItems", "maxProperties", "maxContains"])
def test_a_bound_that_no_text_reaches_is_none(keyword: str) -> None:
    schema = {
        keyword: 10**12,
        "contains": {"type": "integer"},
        "type": ["string", "array", "object"],
    }
    assert wrong(schema, EVERYTHING) == []


def random_schema(rng: random.Random, depth: int) -> Any:
    """A schema of keywords that interact, all of which are held to exactly."""
    if depth == 0:
        return rng.choice(
            [{}, INT, STR, NULL, {"enum": [1, "a"]}, {"const": "ab"}, {"minimum": 2},
             {"required": ["a"]}, {"maxProperties": 1}, {"minItems": 1}, {"pattern": "^a"},
             {"properties": {"a": INT}}, {"items": INT}, {"maxLength": 1}, {"type": "array"}]
        )  # fmt: skip
    inner = [random_schema(rng, depth - 1) for _ in range(3)]
    kind = rng.randrange(10)
    if kind == 0:
        return {"not": inner[0]}
    if kind == 1:
        return {"anyOf": inner[:2]}
    if kind == 2:
        return {"oneOf": inner}
    if kind == 3:
        return {"allOf": inner[:2]}
    if kind == 4:
        return {"if": inner[0], "then": inner[1], "else": inner[2]}
    if kind == 5:
        return obj(*rng.sample(["a", "b"], rng.randrange(3)), a=inner[0], b=inner[1])
    if kind == 6:
        return {"properties": {"a": inner[0]}, "additionalProperties": inner[1]}
    if kind == 7:
        return {"patternProperties": {"^a": inner[0], "b$": inner[1]}}
    if kind == 8:
        return {"items": inner[0], "maxItems": rng.randrange(1, 4)}
    return {"dependentSchemas": {"a": inner[0]}, "anyOf": inner[1:]}


def test_random_schemas_accept_the_same_instances() -> None:
    rng = random.Random(17)
    pool = [*SCALARS[:9], *STRINGS[:7], *ARRAYS[:13], *OBJECTS[:60], *NESTED]
    exact = refused = 0
    while exact < 120:
        schema = random_schema(rng, rng.choice([1, 2, 2, 3]))
        try:
            assert wrong(schema, pool) == [], json.dumps(schema)
        except GrammarError as error:
            if "no value is valid" in str(error):
                check = Draft202012Validator(schema)
                assert not any(map(check.is_valid, pool)), json.dumps(schema)
            else:
                refused += 1
        exact += 1
    assert refused <= 12


def test_too_many_cases_are_refused_by_name() -> None:
    parts = [{"oneOf": [obj(**{f"k{i}{j}": INT}) for j in range(6)]} for i in range(6)]
    with pytest.raises(GrammarError, match=r"keyword '(oneOf|allOf|not)' combines into too many"):
        by_bytes().compile(Grammar.json_schema({"type": "object", "allOf": parts}))
    far = {"type": "string", "pattern": "^(a|b)*a(a|b){40}$", "not": {"pattern": "b$"}}
    with pytest.raises(GrammarError, match="keyword 'pattern' needs too large an automaton"):
        by_bytes().compile(Grammar.json_schema(far))


def test_drafts_differ_where_they_should() -> None:
    schema = {"definitions": {"t": INT}, "$ref": "#/definitions/t", "minimum": 2}
    for dialect, head in ((Draft4Validator, D4), (Draft7Validator, D7)):
        assert dialect({**head, **schema}).is_valid(1)
        assert wrong({**head, **schema}, [1, 2, "a"]) == []
    assert wrong(schema, [1, 2, "a"]) == []


def test_a_schema_is_lowered_to_the_same_rules_each_time() -> None:
    contains = [{"contains": {"const": name}} for name in "abcd"]
    grammar = Grammar.json_schema({"allOf": contains, "unevaluatedItems": False})
    found = set()
    for turn in range(12):
        found.add(repr(lower(grammar).rules))
        # Behind two others it is not remembered.
        for other in ("a", "b"):
            lower(Grammar.regex(f"{other}{turn}"))
    assert len(found) == 1
