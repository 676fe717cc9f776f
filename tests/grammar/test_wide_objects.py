"""Objects of many properties: taken up to a bound that is told, and as exact as small ones."""

from __future__ import annotations

import json

import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, Vocabulary, backends
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.lowering.members import MOST_NAMED

STOP = 256
VOCABULARY = Vocabulary((*(bytes([i]) for i in range(256)), b""), 257, (STOP,))


def wide(properties: int, required: slice) -> Grammar:
    names = [f"p{i}" for i in range(properties)]
    return Grammar.json_schema(
        {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in names},
            "required": names[required],
            "additionalProperties": False,
        }
    )


def allows(compiled: CompiledGrammar, value: dict[str, int]) -> bool:
    matcher = compiled.matcher()
    text = json.dumps(value, separators=(",", ":")).encode()
    return all(matcher.accept(byte) for byte in text) and matcher.accept(STOP)


@pytest.mark.parametrize("name", ["xgrammar", "llguidance", "auto"])
def test_hundreds_of_properties_of_which_every_other_one_is_optional(name: str) -> None:
    compiled = backends.load(name)(VOCABULARY).compile(wide(600, slice(0, None, 2)))
    every = {f"p{i}": i for i in range(600)}
    needed = {key: i for key, i in every.items() if i % 2 == 0}
    assert allows(compiled, every)
    assert allows(compiled, needed)
    assert not allows(compiled, {key: i for key, i in needed.items() if key != "p598"})
    assert not allows(compiled, needed | {"p600": 1})


@pytest.mark.parametrize("required", [slice(0), slice(None), slice(MOST_NAMED // 2, None)])
def test_the_widest_object_is_lowered_and_a_wider_one_refused(required: slice) -> None:
    assert "root" in lower(wide(MOST_NAMED, required)).rules
    with pytest.raises(GrammarError, match=f"{MOST_NAMED + 1} named properties: at most"):
        lower(wide(MOST_NAMED + 1, required))


def test_rules_do_not_depend_on_how_deep_the_recursion_went() -> None:
    """The rules of the first and the last properties of a small object, in their order."""
    names = ["a", "b", "c"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": ["b"],
        "additionalProperties": False,
    }
    compiled = backends.load("reference")(VOCABULARY).compile(Grammar.json_schema(schema))

    def given(text: str) -> bool:
        matcher = compiled.matcher()
        return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(STOP)

    assert given('{"b":true}')
    assert given('{"a":true,"b":true,"c":false}')
    assert given('{"b":true,"c":false}')
    assert not given('{"a":true}')
    assert not given('{"b":true,"a":true}')
    assert not given("{}")
