"""``/v1/messages`` in Anthropic's shape, and its equality with chats."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.serving import PAIR, Server

TEXT = "Maria Lopez is 34 years old and lives in Lisbon."
ASKED = [{"role": "user", "content": TEXT}]
TOOL = {"name": "zyx_tool", "description": "Takes a pair.", "input_schema": PAIR}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "zyx_tool", "description": "Takes a pair.", "parameters": PAIR},
}


def ask(server: Server, body: dict[str, Any]) -> Any:
    return server.ask("/v1/messages", {"max_tokens": 24, "messages": ASKED} | body)


def chat(server: Server, body: dict[str, Any]) -> Any:
    whole = server.ask("/v1/chat/completions", {"max_tokens": 24, "messages": ASKED} | body)
    return whole["choices"][0]["message"]["content"]


def count(server: Server, **more: Any) -> Any:
    return server.ask("/v1/messages/count_tokens", {"messages": ASKED} | more)["input_tokens"]


def events_of(server: Server, body: dict[str, Any]) -> list[Any]:
    return server.events("/v1/messages", {"max_tokens": 24, "messages": ASKED} | body)


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    error: dict[str, Any] = body["error"]
    return error


def test_a_text_is_that_of_the_chat(server: Server) -> None:
    message = ask(server, {})
    assert message["content"] == [{"type": "text", "text": chat(server, {})}]
    assert message["role"] == "assistant"
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count(server)
    block = {"type": "text", "text": "Answer in JSON.", "cache_control": {"type": "ephemeral"}}
    system = [{"role": "system", "content": "Answer in JSON."}, *ASKED]
    want = chat(server, {"messages": system})
    for given in ("Answer in JSON.", [block]):
        told = ask(server, {"system": given})
        assert told["content"][0]["text"] == want


def test_why_a_message_ended(server: Server) -> None:
    cut = ask(server, {"max_tokens": 3, "ignore_eos": True})
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert cut["usage"]["output_tokens"] == 3
    ended = ask(server, {"regex": "abc"})
    assert (ended["stop_reason"], ended["content"][0]["text"]) == ("end_turn", "abc")
    stopped = ask(server, {"regex": "abcd", "stop_sequences": ["c", "nonesuch"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "c")
    assert stopped["content"][0]["text"] == "ab"
    # More than the context holds is what it holds.
    whole = ask(server, {"regex": "abc", "max_tokens": 10**6})
    assert whole["stop_reason"] == "end_turn"


@pytest.mark.ci
def test_a_context_that_is_full_ends_the_message(server: Server) -> None:
    def said(words: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "word " * words}]}

    words = 4000 * 1000 // (count(server, **said(1200)) - count(server, **said(200)))
    left = 4096 - count(server, **said(words))
    assert 0 < left < 200
    message = ask(server, {"max_tokens": 1000, "ignore_eos": True} | said(words))
    assert message["usage"]["output_tokens"] == left
    error = server.post("/v1/messages", {"max_tokens": 9, "messages": ASKED, "min_tokens": 10})
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert "min_tokens" in error_of(error)["message"]


def test_a_reply_goes_on_with_its_beginning(server: Server) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "The answer is"}]
    message = ask(server, {"messages": begun})
    body = {"messages": begun, "continue_final_message": True}
    assert message["content"][0]["text"] == chat(server, body)


def test_a_tool_is_used_and_its_result_read(server: Server) -> None:
    body = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    message = ask(server, body | {"max_tokens": 200})
    assert message["stop_reason"] == "tool_use"
    (use,) = message["content"]
    assert (use["type"], use["name"]) == ("tool_use", "zyx_tool")
    jsonschema.validate(use["input"], PAIR)
    events = events_of(server, body | {"max_tokens": 200})
    text = "".join(
        event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"
    )
    assert json.loads(text) == use["input"]
    assert events[1]["content_block"]["name"] == "zyx_tool"
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    named = ask(
        server, body | {"tool_choice": {"type": "tool", "name": "zyx_tool"}, "max_tokens": 200}
    )
    assert named["content"][0]["input"] == use["input"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": '{"ok":true}'}
    turns = [
        *ASKED,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    after = ask(server, {"messages": turns, "tools": [TOOL], "tool_choice": {"type": "none"}})
    function = {"name": "zyx_tool", "arguments": json.dumps(use["input"])}
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": '{"ok":true}'},
    ]
    want = chat(server, {"messages": messages, "tools": [CHAT_TOOL], "tool_choice": "none"})
    assert after["content"][0]["text"] == want


def test_events_come_in_order_and_give_the_message(server: Server) -> None:
    whole = ask(server, {})
    events = events_of(server, {})
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[0]["message"]["content"] == []


def test_a_format_holds(server: Server) -> None:
    form = {"format": {"type": "json_schema", "schema": PAIR}}
    message = ask(server, {"output_config": form, "max_tokens": 200})
    jsonschema.validate(json.loads(message["content"][0]["text"]), PAIR)


def test_tokens_are_counted_with_tools_and_system(server: Server) -> None:
    system = {"system": "Answer in JSON."}
    assert count(server) < count(server, **system) < count(server, **system, tools=[TOOL])
    usage = ask(server, {"tools": [TOOL], "tool_choice": {"type": "none"}})["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count(server, tools=[TOOL])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    (
        {"messages": [{"role": "system", "content": "x"}]},
        "messages[0]: 'system' is not supported: send 'user', 'assistant'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "messages[0].content[0]: 'thinking' is not supported: send 'text', 'tool_result'",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice goes with tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"stop": "x"}, "stop is not supported: send stop_sequences"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
    ({"output_config": {"effort": "high"}}, "output_config.effort is not supported"),
    ({"container": "x"}, "container is not supported"),
    ({"nonesuch": 1}, "nonesuch: unknown field"),
    ({"temperature": "1"}, "temperature"),
]


@pytest.mark.parametrize(("body", "words"), WRONG)
def test_wrong_requests_name_the_field(server: Server, body: dict[str, Any], words: str) -> None:
    reply = server.post("/v1/messages", {"max_tokens": 9, "messages": ASKED} | body)
    error = error_of(reply)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_every_refusal_has_the_shape(server: Server) -> None:
    other = {"max_tokens": 9, "messages": ASKED, "model": "nonesuch"}
    assert error_of(server.post("/v1/messages", other), 404)["type"] == "not_found_error"
    large = {"max_tokens": 9, "messages": [{"role": "user", "content": "x" * (9 * 2**20)}]}
    assert error_of(server.post("/v1/messages", large), 413)["type"] == "request_too_large"
    error_of(server.get("/v1/messages"), 405)
    error_of(server.post("/v1/messages/batches", {}), 404)
    assert "not JSON" in error_of(server.post("/v1/messages", b"{"))["message"]
