"""What callers in Python give besides texts: messages, functions, and a number of outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from overlap_spec import Engine, Generator, Grammar
from overlap_spec.chat_template import Rendering
from overlap_spec.engine.arguments import as_tools
from overlap_spec.errors import GrammarError, InvalidRequest
from overlap_spec.stats import RequestStats
from overlap_spec.types import Output, Verdict

SAID = {"role": "user", "content": "go"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


@pytest.fixture(scope="module")
def engine(tiny: dict[str, str]) -> Iterator[Engine]:
    with Engine(**tiny, num_steps=3) as made:
        yield made


def prompt(engine: Engine, messages: Any, **more: Any) -> tuple[int, ...]:
    return engine.input_processor.process(messages, **more).prompt_ids


@pytest.mark.parametrize(
    ("message", "place", "said"),
    [
        ({"role": "usr", "content": "go"}, "messages[1].role", "'usr' is not one of system"),
        ({}, "messages[1].role", "None is not one of"),
        ({"role": "user"}, "messages[1].content", "no content"),
        ({"role": "user", "content": None}, "messages[1].content", "no content"),
        ({"role": "user", "content": 7}, "messages[1].content", "7 is not text"),
        ({"role": "user", "content": "go", "contents": ""}, "messages[1].contents", "unknown"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[1].content[0].type", "only text is read"),
        ({"role": "user", "content": ["go"]}, "messages[1].content[0]", "not a part"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "text"),
        ({"role": "assistant"}, "messages[1].content", "no content or tool_calls"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[1].tool_calls", "unk"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]},
            "messages", "tool_calls[0].function.arguments is not the text"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_named(engine: Engine, message: Any, place: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.generate([SAID, message])
    assert caught.value.param == place
    assert said in str(caught.value)


def test_forms_of_a_message_make_one_prompt(engine: Engine) -> None:
    wanted = prompt(engine, "go")
    parts = [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]
    assert prompt(engine, [{"role": "user", "content": parts}]) == wanted
    system = [{"role": "system", "content": "be"}, SAID]
    assert prompt(engine, [{"role": "developer", "content": "be"}, SAID]) == prompt(engine, system)


def test_variables_that_the_template_does_not_read_are_told_of(engine: Engine) -> None:
    rendering = Rendering(variables={"nothing_reads": 1, "messages": [], "bos_token": "x"})
    plain = engine.generate("go", max_tokens=4, temperature=0.0)
    output = engine.generate("go", max_tokens=4, temperature=0.0, rendering=rendering)
    assert output.token_ids == plain.token_ids
    (warning,) = output.warnings
    assert "does not read nothing_reads, messages, bos_token" in warning
    assert not plain.warnings


def set_light(room: Literal["hall", "attic"], level: int = 3) -> str:
    """Sets the light of a room."""
    raise AssertionError((room, level), "nobody calls it")


def test_an_output_shows_itself_in_a_line_and_in_a_notebook() -> None:
    stats = RequestStats(output_tokens=3, verifies=2, verified_tokens=3, end_to_end_ms=9.0)
    out = Output("<b>\n" + "x" * 80, (1, 2, 3), "stop", stats, warnings=("not\nheld",))
    want = "stop, 3 tokens, accept length 1.50, 4.5 ms a token, warning: not held>"
    assert repr(out) == f"<Output '<b>\\n{'x' * 55}…': {want}"
    html = out._repr_html_()
    assert f"&lt;b&gt;\n{'x' * 80}</pre>" in html
    assert "stop · 3 tokens · accept length 1.50" in html
    failed = Output("", (), "error", RequestStats(), error="lost", verdict=Verdict(False, "$: no"))
    assert repr(failed) == "<Output '': error: lost, 0 tokens, invalid: $: no>"


def test_a_function_stands_for_its_arguments(engine: Engine) -> None:
    for grammar in (set_light, Grammar.of(set_light)):
        output = engine.generate("go", grammar, max_tokens=60, seed=1)
        assert output.parsed["room"] in ("hall", "attic")
        assert set(output.parsed) <= {"room", "level"}
    values = Generator(engine, set_light)("go", max_tokens=60, n=2)
    assert len(values) == 2


def test_a_function_is_a_tool(engine: Engine) -> None:
    function = {
        "name": "set_light",
        "description": "Sets the light of a room.",
        "parameters": {"type": "object", "properties": {"room": {"enum": ["hall", "attic"],
            "title": "Room", "type": "string"}, "level": {"title": "Level", "type": "integer",
            "default": 3}}, "required": ["room"], "additionalProperties": False},
    }  # fmt: skip
    tool = {"type": "function", "function": function}
    for choice in ("auto", "required"):
        made, wanted = (Grammar.tools([each], choice=choice) for each in (set_light, tool))
        assert json.loads(made.source) == json.loads(wanted.source)
    assert as_tools([set_light]) == [tool]
    assert len(prompt(engine, "go", tools=[set_light])) == len(prompt(engine, "go", tools=[tool]))
    output = engine.generate("go", Grammar.tools([set_light], choice="required"), max_tokens=120)
    assert "set_light" in output.text


def spread(*numbers: int) -> None: ...


def untold(value: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "said"),
    [(spread, "named arguments alone"), (untold, "are not known"), (print, "named arguments")],
)
def test_a_function_without_a_schema_is_refused(engine: Engine, function: Any, said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        engine.generate("go", function)
    with pytest.raises(GrammarError, match=said):
        engine.generate("go", tools=[function])
    with pytest.raises(InvalidRequest, match=r"tools\[0\] is no definition"):
        engine.generate("go", tools=[7])


def test_n_outputs_of_a_prompt(engine: Engine) -> None:
    asked: dict[str, Any] = {"temperature": 1.2, "max_tokens": 12, "seed": 5}
    three = engine.generate("go", n=3, **asked)
    alone = [engine.generate("go", **{**asked, "seed": 5 + k}) for k in range(3)]
    assert [output.token_ids for output in three] == [output.token_ids for output in alone]
    one = engine.generate("go", n=1, **asked)
    assert isinstance(one, list)
    assert len(one) == 1
    pairs = engine.generate(["go", "on"], [None, {"enum": [4]}], n=2, **asked)
    assert [len(pair) for pair in pairs] == [2, 2]
    assert [output.parsed for output in pairs[1]] == [4, 4]
    assert pairs[0][0].token_ids == three[0].token_ids
    for wrong in (0, -1, True, "2"):
        with pytest.raises(InvalidRequest, match="n must be an integer") as caught:
            engine.generate("go", n=wrong)  # type: ignore[call-overload]
        assert caught.value.param == "n"
    assert engine.core.scheduler.allocator.in_use == 0
