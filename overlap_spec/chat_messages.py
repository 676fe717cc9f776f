"""A chat's messages as plain data: what they may hold, and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from overlap_spec.errors import InvalidRequest
from overlap_spec.memory import collector_off

# Roles, and what chat templates call them.
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool",
}  # fmt: skip
# Fields of a message besides role and content, by its role. The last three of a reply are for one
# that is sent back unchanged; templates do not get these.
NAMED = frozenset({"name"})
REPLY = {"reasoning_content", "tool_calls", "function_call", "refusal", "audio", "annotations"}
FIELDS: dict[str, frozenset[str]] = {
    **dict.fromkeys(ROLES, NAMED),
    "assistant": NAMED | REPLY,
    "tool": NAMED | {"tool_call_id"},
}
# Those that templates get as they are.
KEPT = ("name", "tool_call_id", "reasoning_content")


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content as text, arguments of calls as objects.
    InvalidRequest: a message that no chat has; names its place, such as
    ``messages[0].content[1].type``."""
    if not messages:
        raise InvalidRequest("there is no message: send at least one", "messages")
    return [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _message(message: Any, place: str) -> dict[str, Any]:
    _expect(message, Mapping, "an object with role and content", place)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(ROLES)
        _refuse(f"{_shown(role)} is not one of {known}", f"{place}.role")
    _known(message, {"role", "content"} | FIELDS[role], place)
    content, calls = message.get("content"), message.get("tool_calls")
    older = message.get("function_call") if not calls else None
    if content is None and not calls and older is None and message.get("reasoning_content") is None:
        optional = " or tool_calls" if role == "assistant" else ""
        _refuse(f"the message has no content{optional}", f"{place}.content")
    plain: dict[str, Any] = {"role": ROLES[role]}
    plain["content"] = _content(content, f"{place}.content")
    for name in KEPT:
        if message.get(name) is not None:
            _expect(message[name], str, "text", f"{place}.{name}")
            plain[name] = message[name]
    if older is not None:
        plain["tool_calls"] = [{"id": "", **_function(older, f"{place}.function_call")}]
    elif calls:
        at = f"{place}.tool_calls"
        _expect(calls, list | tuple, "a list of calls", at)
        plain["tool_calls"] = [_call(call, f"{at}[{n}]") for n, call in enumerate(calls)]
    return plain


def _content(content: Any, place: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    _expect(content, list | tuple, "text, or a list of parts of type text", place)
    return "".join([_part(part, f"{place}[{n}]") for n, part in enumerate(content)])


def _part(part: Any, place: str) -> str:
    _expect(part, Mapping, 'a part, {"type": "text", "text": …}', place)
    if part.get("type") != "text":
        _refuse(f"{_shown(part.get('type'))} is not 'text': only text is read", f"{place}.type")
    _known(part, {"type", "text"}, place)
    text = part.get("text")
    _expect(text, str, "text", f"{place}.text")
    return str(text)


def _call(call: Any, place: str) -> dict[str, Any]:
    _expect(call, Mapping, "a call with a function", place)
    _known(call, {"id", "type", "function", "index"}, place)
    if call.get("type", "function") != "function":
        _refuse(f"{_shown(call['type'])} is not 'function'", f"{place}.type")
    return {"id": call.get("id") or "", **_function(call.get("function"), f"{place}.function")}


def _function(function: Any, place: str) -> dict[str, Any]:
    _expect(function, Mapping, "an object with name and arguments", place)
    _known(function, {"name", "arguments"}, place)
    _expect(function.get("name"), str, "text", f"{place}.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = read_arguments(arguments, f"{place}.arguments")
    _expect(arguments, Mapping, "a JSON object, or its text", f"{place}.arguments")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_arguments(text: str, place: str) -> dict[str, Any]:
    """The object that a call's arguments are the text of; InvalidRequest names ``place``."""
    try:
        with collector_off():
            arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return arguments
    raise InvalidRequest(f"{place} is not the text of a JSON object", place.partition("[")[0])


def _known(value: Mapping[str, Any], names: set[str] | frozenset[str], place: str) -> None:
    for name in value:
        if name not in names:
            _refuse("unknown field", f"{place}.{name}")


def _expect(value: Any, kind: Any, what: str, place: str) -> None:
    if not isinstance(value, kind):
        _refuse(f"{_shown(value)} is not {what}", place)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _refuse(reason: str, place: str) -> None:
    raise InvalidRequest(f"{place}: {reason}", place)
