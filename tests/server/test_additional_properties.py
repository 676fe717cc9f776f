"""Members that a schema does not name: the setting, for each way to ask, and the field."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from overlap_spec import Engine, Generator, Grammar
from overlap_spec.errors import ConfigError, InvalidRequest
from overlap_spec.server.chat import ChatBody
from overlap_spec.server.completions import CompletionBody
from overlap_spec.server.constraints import Constraints, ResolvedConstraint
from overlap_spec.server.settings import ServerSettings
from overlap_spec.server.sglang import SGLangSampling
from overlap_spec.server.task import ToolAsk

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "go"}]}
Value = Literal["closed", "schema"]


class Point(BaseModel):
    x: int


def constraints(value: Value) -> Constraints:
    return Constraints(ServerSettings(tool_call_parser="hermes"), value)


def asked(made: Constraints, body: Any, form: Any = None) -> Grammar:
    grammar = asyncio.run(made.of(body, form)).grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("value", ["closed", "schema"])
def test_the_setting_holds_for_each_way_to_ask(value: Value) -> None:
    made = constraints(value)
    bodies: list[Any] = [
        CompletionBody(prompt="go", json_schema=json.dumps(SCHEMA)),
        SGLangSampling(json_schema=json.dumps(SCHEMA)),
        CompletionBody(prompt="go", guided_json=SCHEMA),
        CompletionBody(prompt="go", structural_tag=json.dumps(TAG)),
        CompletionBody(prompt="go", structured_outputs={"json": SCHEMA}),
        CompletionBody(prompt="go", structured_outputs={"structural_tag": TAG}),
    ]
    found = [asked(made, body) for body in bodies]
    strict = {"name": "n", "schema": SCHEMA, "strict": True}
    for form in ({"type": "json_schema", "json_schema": strict}, TAG):
        chat = ChatBody(**CHAT, response_format=form)
        found.append(asked(made, chat, chat.response_format))
    ask = ToolAsk([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])
    tools = asyncio.run(made.tools(ask, ResolvedConstraint())).grammar
    assert tools is not None
    assert {grammar.additional_properties for grammar in (*found, tools)} == {value}


def test_the_field_goes_before_the_setting() -> None:
    for setting, field in (("closed", "schema"), ("schema", "closed")):
        for given in ({"json": SCHEMA}, {"structural_tag": TAG}):
            outputs = {**given, "additional_properties": field}
            body = CompletionBody(prompt="go", structured_outputs=outputs)
            grammar = asked(constraints(setting), body)  # type: ignore[arg-type]
            assert grammar.additional_properties == field
    wrong = {"regex": "a", "additional_properties": "schema"}
    body = CompletionBody(prompt="go", structured_outputs=wrong)
    with pytest.raises(InvalidRequest, match="additional_properties goes with json or structural"):
        asked(constraints("closed"), body)
    with pytest.raises(ValueError, match='send "additional_properties": "closed"'):
        CompletionBody(
            prompt="go", structured_outputs={"json": SCHEMA, "disable_additional_properties": True}
        )


def test_a_requests_white_space_holds_for_schemas_and_tags() -> None:
    for kind, given, make in (
        ("json", SCHEMA, Grammar.json_schema),
        ("structural_tag", TAG, Grammar.structural_tag),
    ):
        outputs = {kind: given, "disable_any_whitespace": False}
        body = CompletionBody(prompt="go", structured_outputs=outputs)
        assert asked(constraints("closed"), body) == make(given, whitespace="bounded")


@pytest.fixture(scope="module")
def free(tiny: dict[str, str]) -> Iterator[Engine]:
    with Engine(**tiny, additional_properties="schema") as made:
        yield made


def test_the_setting_of_an_engine_holds_for_types_and_dicts(free: Engine) -> None:
    wanted = Grammar.json_schema(Point, additional_properties="schema")
    assert Generator(free, Point).grammar == wanted
    for given in (Point, Point.model_json_schema()):
        assert free.input_processor.process("go", given).grammar == wanted
    own = Grammar.json_schema(Point)
    assert free.input_processor.process("go", own).grammar == own != wanted
    with pytest.raises(ConfigError, match="additional_properties must be one of closed, schema"):
        Engine(additional_properties="open")
