"""OpenAI's client; ``tests/server`` goes deeper with the one that is installed there."""

import json
from typing import Any

import pytest

from tests.clients.questions import ASKED, MODEL, MOST_TOKENS, TEXT, Pair
from tests.support.serving import Server

openai = pytest.importorskip("openai", reason="openai is not installed")
FUNCTION = {"name": "zyx_tool", "parameters": Pair.model_json_schema(), "strict": True}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_one_text_by_every_route(client: Any) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=MOST_TOKENS)
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, max_tokens=MOST_TOKENS
    ) as stream:
        streamed = stream.get_final_completion()
    ask = {"model": MODEL, "input": TEXT, "max_output_tokens": MOST_TOKENS}
    response = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        last = stream.get_final_response()
    text = chat.choices[0].message.content
    assert streamed.choices[0].message.content == text
    assert response.output_text == text
    assert last.output_text == text


def test_objects_by_every_route(client: Any) -> None:
    chat = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Pair)
    response = client.responses.parse(model=MODEL, input=TEXT, text_format=Pair)
    assert isinstance(response.output_parsed, Pair)
    assert chat.choices[0].message.parsed == response.output_parsed


def test_tools_by_every_route(client: Any) -> None:
    ask = {"model": MODEL, "tool_choice": "required", "parallel_tool_calls": False}
    tool = {"type": "function", "function": FUNCTION}
    chat = client.chat.completions.create(**ask, messages=ASKED, tools=[tool])
    (call,) = chat.choices[0].message.tool_calls
    response = client.responses.create(**ask, input=TEXT, tools=[{"type": "function", **FUNCTION}])
    (item,) = response.output
    assert (item.name, item.arguments) == (call.function.name, call.function.arguments)
    Pair.model_validate(json.loads(item.arguments))
    turns = [*ASKED, item, {"type": "function_call_output", "call_id": item.call_id, "output": "1"}]
    tools = [{"type": "function", **FUNCTION}]
    more = {"tools": tools, "tool_choice": "none", "max_output_tokens": MOST_TOKENS}
    assert client.responses.create(model=MODEL, input=turns, **more).output_text


def test_texts_models_and_errors(client: Any) -> None:
    text = client.completions.create(model=MODEL, prompt="x", extra_body={"regex": "[x-z]{4}"})
    assert len(text.choices[0].text) == 4
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=TEXT, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
