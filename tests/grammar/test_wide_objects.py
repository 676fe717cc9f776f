"""Objects of many properties: taken up to a bound that is told, and as exact as small ones."""

import json

import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.lowering.members import MOST_NAMED
from tests.support.grammars import by_bytes, takes


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
    return takes(compiled, json.dumps(value, separators=(",", ":")))


@pytest.mark.parametrize("name", ["xgrammar", "llguidance", "auto"])
def test_hundreds_of_properties_of_which_every_other_one_is_optional(name: str) -> None:
    compiled = by_bytes(name).compile(wide(600, slice(0, None, 2)))
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
    compiled = by_bytes("reference").compile(Grammar.json_schema(schema))
    assert takes(compiled, '{"b":true}')
    assert takes(compiled, '{"a":true,"b":true,"c":false}')
    assert takes(compiled, '{"b":true,"c":false}')
    assert not takes(compiled, '{"a":true}')
    assert not takes(compiled, '{"b":true,"a":true}')
    assert not takes(compiled, "{}")
