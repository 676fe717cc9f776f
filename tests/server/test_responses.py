"""``/v1/responses``, as OpenAI's client sends and reads it, and its equality with chats."""

import json
from typing import Any

import jsonschema
import openai
from pydantic import BaseModel

from tests.support.serving import PAIR, Server

MODEL = "overlap-spec"
TEXT = "Maria Lopez is 34 years old and lives in Lisbon."
ASKED = [{"role": "user", "content": TEXT}]
TOOL: dict[str, Any] = {"type": "function", "name": "zyx_tool", "parameters": PAIR, "strict": True}


def chat_text(client: openai.OpenAI, messages: Any, **more: Any) -> str | None:
    reply = client.chat.completions.create(model=MODEL, messages=messages, **more)
    return reply.choices[0].message.content


def events_of(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    events = server.events("/v1/responses", body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_text_is_that_of_the_chat(client: openai.OpenAI) -> None:
    want = chat_text(client, ASKED, max_tokens=24)
    for given in (
        TEXT,
        ASKED,
        [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}],
    ):
        reply = client.responses.create(
            model=MODEL, input=given, max_output_tokens=24, metadata={"a": "b"}
        )
        assert reply.output_text == want
    assert reply.id.startswith("resp_")
    assert reply.metadata == {"a": "b"}
    assert reply.store is False  # type: ignore[attr-defined]
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    system = [{"role": "system", "content": "Answer in JSON."}, *ASKED]
    told = client.responses.create(
        model=MODEL, instructions="Answer in JSON.", input=TEXT, max_output_tokens=24
    )
    assert told.output_text == chat_text(client, system, max_tokens=24)
    assert told.instructions == "Answer in JSON."


def test_an_output_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model=MODEL, input=TEXT, max_output_tokens=3, extra_body={"ignore_eos": True}
    )
    assert (reply.status, reply.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage is not None
    assert reply.usage.output_tokens == 3


def test_formats_hold(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": PAIR, "strict": True}}
    reply = client.responses.create(model=MODEL, input=TEXT, text=form)
    jsonschema.validate(json.loads(reply.output_text), PAIR)
    chat = {"type": "json_schema", "json_schema": {"name": "x", "schema": PAIR, "strict": True}}
    assert reply.output_text == chat_text(client, ASKED, response_format=chat)
    assert reply.text is not None
    assert reply.text.format is not None
    assert reply.text.format.type == "json_schema"
    any_object: Any = {"format": {"type": "json_object"}}
    reply = client.responses.create(model=MODEL, input=TEXT, text=any_object)
    assert isinstance(json.loads(reply.output_text), dict)
    reply = client.responses.create(model=MODEL, input=TEXT, extra_body={"regex": "[x-z]{5}"})
    assert len(reply.output_text) == 5
    assert set(reply.output_text) <= set("xyz")


class Pair(BaseModel):
    zyx: int
    wvu: bool


def test_parse_gives_objects_whole_and_streamed(client: openai.OpenAI) -> None:
    reply = client.responses.parse(model=MODEL, input=TEXT, text_format=Pair)
    assert isinstance(reply.output_parsed, Pair)
    with client.responses.stream(model=MODEL, input=TEXT, text_format=Pair) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_parsed == reply.output_parsed
    assert "".join(deltas) == reply.output_text
    assert len(deltas) > 1


def test_events_come_in_order(server: Server) -> None:
    body = {"input": TEXT, "max_output_tokens": 12, "ignore_eos": True}
    kinds = [event["type"] for event in events_of(server, body)]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    events = events_of(server, body | {"max_output_tokens": None, "regex": "ab?c"})
    first, *_, done, last = events
    assert first["response"]["status"] == "in_progress"
    assert last["type"] == "response.completed"
    assert last["response"]["output"] == [done["item"]]
    texts = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert done["item"]["content"][0]["text"] == "".join(texts)
    assert "".join(texts) in ("ac", "abc")
    whole = server.post("/v1/responses", body | {"max_output_tokens": None, "regex": "ab?c"}).json()
    assert whole["output"][0]["content"] == done["item"]["content"]
    assert whole["usage"]["output_tokens"] == last["response"]["usage"]["output_tokens"]


def test_a_tool_is_called_and_its_output_read(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "input": TEXT,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    reply = client.responses.create(**ask)
    (call,) = reply.output
    assert call.type == "function_call"
    assert call.name == "zyx_tool"
    jsonschema.validate(json.loads(call.arguments), PAIR)
    with client.responses.stream(**ask) as stream:
        told = list(stream)
        final = stream.get_final_response()
    assert final.output[0].arguments == call.arguments  # type: ignore[union-attr]
    deltas = [e.delta for e in told if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    (done,) = [
        e for e in events_of(server, ask) if e["type"] == "response.function_call_arguments.done"
    ]
    assert (done["name"], done["arguments"]) == ("zyx_tool", call.arguments)
    named: Any = {"type": "function", "name": "zyx_tool"}
    again = client.responses.create(**ask | {"tool_choice": named})
    assert again.output[0].arguments == call.arguments  # type: ignore[union-attr]
    some: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    again = client.responses.create(**ask | {"tool_choice": some})
    assert again.output[0].name == "zyx_tool"  # type: ignore[union-attr]
    # The call and its result go back, and are the chat's call and result.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"ok":true}'}
    after = client.responses.create(
        **ask | {"input": [*ASKED, call, result], "tool_choice": "none", "max_output_tokens": 24}
    )
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": '{"ok":true}'},
    ]
    function = {name: TOOL[name] for name in ("name", "parameters", "strict")}
    tools = [{"type": "function", "function": function}]
    want = chat_text(client, messages, tools=tools, tool_choice="none", max_tokens=24)
    assert after.output_text == want


def test_an_output_goes_back_as_input(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=TEXT, max_output_tokens=24)
    turns: Any = [*ASKED, *first.output, {"role": "user", "content": "And her name?"}]
    second = client.responses.create(model=MODEL, input=turns, max_output_tokens=12)
    said = {"role": "assistant", "content": first.output_text}
    messages = [*ASKED, said, {"role": "user", "content": "And her name?"}]
    assert second.output_text == chat_text(client, messages, max_tokens=12)


def test_log_probabilities(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": TEXT, "max_output_tokens": 8}
    reply = client.responses.create(**ask, top_logprobs=2, include=["message.output_text.logprobs"])
    shown = reply.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert shown
    assert "".join(entry.token for entry in shown) == reply.output_text
    assert all(len(entry.top_logprobs) <= 2 for entry in shown)
    events = events_of(server, ask | {"top_logprobs": 2})
    streamed = [
        entry
        for event in events
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert [entry["token"] for entry in streamed] == [entry.token for entry in shown]


def test_nothing_is_kept(server: Server) -> None:
    reply = server.post("/v1/responses", {"input": TEXT, "max_output_tokens": 2, "store": False})
    found = server.get(f"/v1/responses/{reply.json()['id']}")
    assert found.status_code == 404
    assert "nothing is stored" in found.json()["error"]["message"]
    server.settle()
