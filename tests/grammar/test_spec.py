"""Grammars as values, and the errors of invalid ones."""

import json
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Literal

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


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1
    HIGH = 2


def test_types_give_their_schema_and_come_back() -> None:
    person = Grammar.json_schema(Person)
    assert json.loads(person.source)["required"] == ["name", "age"]
    assert person.parse('{"name":"Ada","age":36}') == Person(name="Ada", age=36)
    assert Grammar.json_schema(Point).parse('{"x":1,"y":2}') == Point(1, 2)
    assert Grammar.json_schema(Movie).parse('{"title":"M"}') == {"title": "M"}


@pytest.mark.parametrize(
    ("source", "text", "value"),
    [
        (int, "3", 3),
        (list[Person], '[{"name":"Ada","age":36}]', [Person(name="Ada", age=36)]),
        (dict[str, int], '{"a":1}', {"a": 1}),
        (int | None, "null", None),
        (Person | Literal["none"], '"none"', "none"),
        (Literal["a", 1], "1", 1),
        (Level, "2", Level.HIGH),
        (Colour, '"red"', Colour.RED),
    ],
)
def test_other_types_are_schemas_too(source: object, text: str, value: object) -> None:
    grammar = Grammar.json_schema(source)
    assert grammar.kind == "json_schema"
    assert grammar.parse(text) == value
    assert pickle.loads(pickle.dumps(grammar)) == grammar
    with pytest.raises(ValueError, match="alidation"):
        grammar.parse('"green"')


def test_grammars_of_output_types() -> None:
    own = Grammar.regex("a")
    assert Grammar.of(own) is own
    assert Grammar.of(re.compile(r"\d+")) == Grammar.regex(r"\d+")
    assert Grammar.of(dict) == Grammar.json_object()
    assert Grammar.of({"type": "null"}) == Grammar.json_schema({"type": "null"})
    assert Grammar.of(Person, whitespace=2) == Grammar.json_schema(Person, whitespace=2)
    assert Grammar.of(Colour) == Grammar.choice(["red", "blue"])
    assert Grammar.of(Colour).parse("blue") is Colour.BLUE
    assert Grammar.of(Literal["yes", "no"]) == Grammar.choice(["yes", "no"])
    assert Grammar.of(Literal["yes", "no"]).parse("yes") == "yes"
    assert Grammar.of(Level).parse("1") is Level.LOW
    assert Grammar.of(Literal["a", 1]).kind == "json_schema"
    for grammar in (Grammar.of(Colour), Grammar.of(Literal["yes", "no"])):
        with pytest.raises(ValueError, match="green"):
            grammar.parse("green")


def test_wrapped_grammars_are_values() -> None:
    wrapped = Grammar.json_schema(Person).after_thinking()
    assert wrapped.inner == Grammar.json_schema(Person)
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped
    assert wrapped == Grammar.json_schema(Person.model_json_schema()).after_thinking()
    others = [
        Grammar.json_schema(Person),
        Grammar.json_schema(Person, whitespace=1).after_thinking(),
        Grammar.json_schema(Person, best_effort=True).after_thinking(),
        Grammar.json_schema(Person).after_thinking("[/THINK]"),
        Grammar.json_schema(Person).after_thinking(begin="<think>"),
    ]
    assert len({wrapped, *others}) == 6
    assert Grammar.choice(["a"]).inner is None
    assert wrapped.parse('hm</think>\n{"name":"Ada","age":36}') == Person(name="Ada", age=36)


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
        (lambda: Grammar.json_schema(object()), "not a schema"),
        (lambda: Grammar.json_schema(None), "None is not a schema"),
        (lambda: Grammar.json_schema(3), r"^3 is not a schema: [^\n]*$"),
        (lambda: Grammar.json_schema(subprocess.Popen), "Popen is not a schema"),
        (lambda: Grammar.json_schema(type(len)), "no JSON schema|not a schema"),
        (lambda: Grammar.json_schema("[" * 100000), "too deep"),
        (lambda: Grammar.json_schema('{"not":' * 5000 + "{}" + "}" * 5000), "too deep|deep"),
        (lambda: Grammar.of(str), "free text"),
        (lambda: Grammar.of(re.compile("a", re.IGNORECASE)), "without flags"),
        (lambda: Grammar.of(re.compile(b"a")), "str pattern"),
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
        (lambda: Grammar.ebnf('root ::= "\ud800"'), "half a surrogate"),
        (lambda: Grammar.choice(["\udfff"]), "half a surrogate"),
        (lambda: Grammar.json_schema('{"const":"\\ud800"}'), "half a surrogate"),
    ],
)
def test_broken_grammars_name_the_culprit(make, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        make()


def test_importing_the_room_loads_no_library() -> None:
    code = (
        "import sys, overlap_spec.grammar as g; g.Grammar.choice(['a']); g.MatcherPool;"
        "g.GrammarCompiler;"
        "print([m for m in ('xgrammar', 'torch', 'pydantic', 'jsonschema') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
