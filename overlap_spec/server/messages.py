"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle, count_characters
from overlap_spec.server.constraints import ResolvedConstraint
from overlap_spec.server.conversation import Conversation, rendering_of
from overlap_spec.server.errors import ApiError, Json
from overlap_spec.server.events import Wire
from overlap_spec.server.protocol.messages import CountBody, MessagesBody
from overlap_spec.server.service import Format, Service, findings, interleaved, new_id, speculation
from overlap_spec.types import Output

Event = dict[str, Any]
# Type of a block → type and field of its deltas.
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


async def messages(service: Service, body: MessagesBody, http: HttpRequest) -> Response:
    """Answer a chat, as one reply or as a stream of events."""
    model, label = service.check_model(body.model), new_id("msg_")
    chat = await service.run_until_disconnect(http, Conversation.prepare(service, body.task))
    # Clients ask for more than a context may hold, which ends a message, and does not refuse it.
    is_cut = body.max_tokens > chat.request.max_tokens
    request = replace(chat.request, max_tokens=min(body.max_tokens, chat.request.max_tokens))
    shown = MessageFormatter(chat, label, model, is_cut)
    return await service.answer(
        http, shown, [request], [label], chat.field, stream=body.stream, model=model
    )


async def count_tokens(service: Service, body: CountBody, http: HttpRequest) -> Response:
    """Tokens that messages have as a prompt."""
    service.check_model(body.model)
    task = body.task()
    service.engine.check_length(count_characters(task.messages))
    await service.constraints.tools(task.tools, ResolvedConstraint())
    rendering, engine = rendering_of(service, task), service.engine
    work = partial(
        engine.input_processor.prompt_ids,
        task.messages,
        tools=task.tools.tools,
        rendering=rendering,
    )
    ids = await service.run_until_disconnect(http, engine.in_thread(work))
    return Json({"input_tokens": len(ids)})


class MessageFormatter(Format):
    """Formats one output as a message.

    Args:
        is_cut: Whether the context leaves less than was asked.
    """

    wire = Wire(ApiError.anthropic_body, b"", named=True)

    def __init__(self, conversation: Conversation, label: str, model: str, is_cut: bool) -> None:
        self._conversation, self._is_cut = conversation, is_cut
        self._writer = BlockWriter()
        own = {"id": label, "type": "message", "role": "assistant", "model": model}
        self._head: dict[str, Any] = own

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The message as one object."""
        (output,) = outputs
        for piece in self._conversation.assembler().take(output):
            self._writer.push(piece)
        self._writer.finish()
        ended = self._ended(output) | {"usage": _usage(output)} | speculation(outputs)
        return self._head | {"content": self._writer.blocks, **ended, **findings(output)}

    async def events(self, handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Event]:
        """The message in events."""
        (handle,), assembler = handles, self._conversation.assembler()
        tokens = {"input_tokens": len(handle.request.prompt_ids), "output_tokens": 0}
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        begun = self._head | nothing | {"usage": CACHE | tokens}
        yield {"type": "message_start", "message": begun}
        async for _, delta in interleaved(handles):
            for piece in assembler.take(delta):
                for event in self._writer.push(piece):
                    yield event
        for event in self._writer.finish():
            yield event
        output = await handle.finish()
        ended = {"delta": self._ended(output), "usage": _usage(output), **findings(output)}
        ended |= speculation([output])
        yield {"type": "message_delta", **ended}
        yield {"type": "message_stop"}

    def _ended(self, output: Output) -> dict[str, Any]:
        """Why the message ended."""
        reason: str | None
        match output.finish_reason:
            case "length":
                reason = "model_context_window_exceeded" if self._is_cut else "max_tokens"
            case "stop" if isinstance(output.stop_match, str):
                return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_match}
            case "stop" if any(block["type"] == "tool_use" for block in self._writer.blocks):
                reason = "tool_use"
            case "stop":
                reason = "end_turn"
            case _:
                # The caller aborted it.
                reason = None
        return {"stop_reason": reason, "stop_sequence": None}


CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _usage(output: Output) -> dict[str, Any]:
    """Anthropic's usage, where tokens that were found in the cache do not count as input."""
    stats = output.stats
    read = min(stats.cached_tokens, stats.prompt_tokens)
    own = {"input_tokens": stats.prompt_tokens - read, "cache_read_input_tokens": read}
    return CACHE | own | {"output_tokens": stats.output_tokens}


class BlockWriter:
    """Takes the deltas of a chat's answer; gives the Messages API's events, and the blocks.

    Attributes:
        blocks: Of the message; the last one may be open.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = False
        # Of the open block, whose fields are set when it ends.
        self._text = ""

    def push(self, delta: dict[str, Any]) -> list[Event]:
        """The events of a delta in chat completions' form."""
        events: list[Event] = []
        if "reasoning_content" in delta:
            events += self._begin("thinking", {"thinking": "", "signature": ""})
            events += self._add(delta["reasoning_content"])
        if "content" in delta:
            events += self._begin("text", {"text": ""})
            events += self._add(delta["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self.finish()
                own = {"id": call["id"], "name": call["function"]["name"], "input": {}}
                events += self._begin("tool_use", own)
            if text := call["function"]["arguments"]:
                events += self._add(text)
        return events

    def finish(self) -> list[Event]:
        """End the open block, if there is one."""
        if not self._open:
            return []
        block, self._open = self.blocks[-1], False
        if block["type"] == "tool_use":
            block["input"] = _read(self._text)
        else:
            block[block["type"]] = self._text
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _begin(self, kind: str, own: dict[str, Any]) -> list[Event]:
        """Go on with the open block if it is of this kind, else end it and start one."""
        if self._open and self.blocks[-1]["type"] == kind:
            return []
        events = self.finish()
        self.blocks.append({"type": kind, **own})
        self._open, self._text = True, ""
        shown = {"index": len(self.blocks) - 1, "content_block": dict(self.blocks[-1])}
        return [*events, {"type": "content_block_start", **shown}]

    def _add(self, text: str) -> list[Event]:
        self._text += text
        kind, field = DELTAS[self.blocks[-1]["type"]]
        delta = {"type": kind, field: text}
        return [{"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}]


def _read(text: str) -> dict[str, Any]:
    """The object that a call's arguments are the text of; nothing of one that was cut short."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
