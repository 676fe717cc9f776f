"""Large and odd bodies of the routes under /v1: no turn of the event loop is long by them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from overlap_spec.server.middleware import MOST_VALUES, count_values
from tests.support.serving import Server
from tests.support.skips import needs_weights
from tests.support.tiers import few

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
pytestmark = needs_weights


def response(given: Any, **more: Any) -> dict[str, Any]:
    return {"input": given, "max_output_tokens": 1, **more}


def message(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}


def most(item: Any) -> list[Any]:
    """As many of an item as a body may have."""
    return [item] * (MOST_VALUES * 15 // 16 // count_values(json.dumps(item).encode()))


PART = {"type": "input_text", "text": ""}
TEXT = {"type": "text", "text": ""}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a":1}'}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": ""}]}
SAID = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "name": "f"}
SHORT: dict[str, Any] = {"messages": HI, "max_tokens": 1}
LONG = "x " * 4_000_000
FIELDS = {str(number): number for number in range(60_000)}


def asked(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def form(schema: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": schema}}


def calls(arguments: Any) -> dict[str, Any]:
    return response([{**CALL, "arguments": json.dumps(arguments)}])


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "parts": (RESPONSES, response([asked(most(PART))])),
    "wrong_parts": (RESPONSES, response([asked([None] * 200_000)])),
    "late_wrong_part": (RESPONSES, response([asked([*most(PART), 7])])),
    "items": (RESPONSES, response([CALL, THOUGHT] * 2000)),
    "too_many_items": (RESPONSES, response(most(asked("")))),
    "wrong_items": (RESPONSES, response([None] * 200_000)),
    "annotations": (RESPONSES, response([asked([PART | {"annotations": [0] * 200_000}])])),
    "long_input": (RESPONSES, response(LONG)),
    "long_instructions": (RESPONSES, response("x", instructions=LONG)),
    "long_arguments": (RESPONSES, calls({"a": LONG[:60_000]})),
    "nested_arguments": (RESPONSES, calls([[0]] * 60_000)),
    "metadata": (RESPONSES, response("x", metadata=FIELDS)),
    "long_metadata": (RESPONSES, response("x", metadata={"a": LONG})),
    "tools": (RESPONSES, response("x", tools=most(TOOL))),
    "large_tool": (RESPONSES, response("x", tools=[TOOL | {"parameters": {"enum": [LONG]}}])),
    "schema": (RESPONSES, response("x", text=form({"enum": list(range(100_000))}))),
    "unknown_fields": (RESPONSES, response("x") | {f"x{i}": i for i in range(60_000)}),
    "blocks": (MESSAGES, message(most(TEXT))),
    "wrong_blocks": (MESSAGES, message([None] * 200_000)),
    "uses": (MESSAGES, {"messages": [{"role": "assistant", "content": most(USE)}]}),
    "results": (MESSAGES, message(most(RESULT))),
    "long_text": (MESSAGES, message(LONG)),
    "system": (MESSAGES, message("x", system=most(TEXT))),
    "cache_control": (MESSAGES, message("x", cache_control=FIELDS)),
    "user_metadata": (MESSAGES, message("x", metadata=FIELDS)),
    "stop_sequences": (MESSAGES, message("x", stop_sequences=[1] * 200_000)),
    "chat_parts": (CHAT, {"messages": [asked(most(TEXT))]}),
    "switches": (CHAT, {"messages": HI, "chat_template_kwargs": FIELDS}),
    "long_switch": (
        CHAT,
        SHORT | {"chat_template_kwargs": {"tools": LONG}},
    ),
    "many_nulls": (
        CHAT,
        SHORT | {f"x{i}": None for i in range(60_000)},
    ),
    "bad_words": (CHAT, {"messages": HI, "bad_words": [LONG]}),
    "stop_regex": (CHAT, {"messages": HI, "stop_regex": LONG}),
    "allowed": (CHAT, {"messages": HI, "allowed_token_ids": [9999] * 200_000}),
    "functions": (CHAT, {"messages": HI, "functions": most({"name": "f"})}),
    "guided_choice": (CHAT, {"messages": HI, "guided_choice": [1] * 200_000}),
    "guided_json": (CHAT, {"messages": HI, "guided_json": {"enum": list(range(100_000))}}),
    "salt": (CHAT, {"messages": HI, "cache_salt": LONG}),
    "calls": (CHAT, {"messages": [SAID] * 4000}),
}
# These are fine: what is large in them is not used.
FINE = ("parts", "chat_parts", "annotations", "cache_control", "long_switch", "many_nulls")


@pytest.mark.parametrize("name", few(BODIES, "late_wrong_part", "results", "many_nulls"))
def test_large_bodies_are_answered(server: Server, name: str) -> None:
    before = server.long_turns()
    send(server, name)
    assert server.long_turns() == before


def send(server: Server, name: str) -> None:
    """One of the bodies, which is answered as it should be."""
    path, body = BODIES[name]
    content = json.dumps(body).encode()
    assert count_values(content) <= MOST_VALUES
    reply = server.post(path, content)
    assert reply.status_code == (200 if name in FINE else 400), reply.text[:300]
    assert len(reply.content) < 3000
    if path == MESSAGES:
        assert server.post(f"{path}/count_tokens", content).status_code in (200, 400)
