"""Grammars as values, and what is said of broken ones."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Point:
    x: int
    y: int


class Movie(TypedDict):
    title: str


def test_types_give_their_schema_and_come_back() -> None:
    person = Grammar.json_schema(Person)
    assert json.loads(person.source)["required"] == ["name", "age"]
    assert person.parse('{"name":"Ada","age":36}') == Person(name="Ada", age=36)
    assert Grammar.json_schema(Point).parse('{"x":1,"y":2}') == Point(1, 2)
    assert Grammar.json_schema(Movie).parse('{"title":"M"}') == {"title": "M"}


def test_plain_grammars_parse_to_values() -> None:
    assert Grammar.json_schema({"type": "array"}).parse("[1]") == [1]
    assert Grammar.json_object().parse('{"a":null}') == {"a": None}
    assert Grammar.regex("a+").parse("aa") == "aa"
    assert Grammar.choice(["x"]).parse("x") == "x"
    with pytest.raises(ValueError, match="age"):
        Grammar.json_schema(Person).parse('{"name":"Ada"}')


def test_equal_texts_are_equal_values() -> None:
    by_type, by_text = Grammar.json_schema(Person), Grammar.json_schema(Person.model_json_schema())
    assert by_type == by_text
    assert len({by_type, by_text, Grammar.json_schema(by_text.source)}) == 1
    assert pickle.loads(pickle.dumps(by_type)) == by_type
    assert Grammar.json_schema({}, whitespace="bounded") != Grammar.json_schema({})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Grammar.json_schema({"properties": {"age": {"type": "integr"}}}),
            r"\$\.properties\.age\.type: 'integr' is not a JSON Schema type",
        ),
        (lambda: Grammar.json_schema({"required": "a"}), r"\$\.required"),
        (lambda: Grammar.json_schema('{"type":\n "string",}'), "line 2, column 11"),
        (lambda: Grammar.json_schema("[1]"), "object or a boolean"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "not JSON"),
        (lambda: Grammar.json_schema(int), "not a schema"),
        (lambda: Grammar.json_schema({}, whitespace="loose"), "whitespace 'loose'"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema({}, whitespace=9), "whitespace 9"),
        (lambda: Grammar.regex("a(b"), r"regex 'a\(b': .*position 1"),
        (lambda: Grammar.regex("(?=a)b"), "look-around"),
        (lambda: Grammar.regex(r"(a)\1"), "back-reference"),
        (lambda: Grammar.regex("a^b"), "anchors"),
        (lambda: Grammar.choice([]), "at least one"),
        (lambda: Grammar.choice("abc"), "list"),
        (lambda: Grammar.choice(["a", ""]), r"choice\[1\]"),
        (lambda: Grammar.ebnf("  "), "empty"),
    ],
)
def test_broken_grammars_name_the_culprit(make, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        make()


def test_importing_the_room_loads_no_library() -> None:
    code = (
        "import sys, overlap_spec.grammar as g; g.Grammar.choice(['a']); g.Lane; g.GrammarCompiler;"
        "print([m for m in ('xgrammar', 'torch', 'pydantic', 'jsonschema') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
