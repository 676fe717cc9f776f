"""OpenAI's ``/v1/responses``. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.errors import InvalidRequest
from overlap_spec.server.conversation import Conversation
from overlap_spec.server.errors import ApiError
from overlap_spec.server.events import Wire
from overlap_spec.server.logprobs import chat_logprobs, cut_stop, without_stop
from overlap_spec.server.protocol.responses import ResponsesBody
from overlap_spec.server.service import Format, Service, findings, interleaved, new_id, speculation
from overlap_spec.types import FinishReason, Output, TokenLogprobs

Event = dict[str, Any]
# Engine's finish reason → the response's status; the reason of one that is incomplete.
STATUS = {"length": "incomplete", "abort": "cancelled"}
INCOMPLETE = {"reason": "max_output_tokens"}


async def responses(service: Service, body: ResponsesBody, http: HttpRequest) -> Response:
    """Answer, as one reply or as a stream of events."""
    model, label = service.check_model(body.model), new_id("resp_")
    if body.with_logprobs and service.settings.reasoning_parser is not None:
        field = "include" if body.top_logprobs is None else "top_logprobs"
        message = "log-probabilities go with a text alone, and this model's has thinking before it"
        raise InvalidRequest(message, field)
    chat = await service.run_until_disconnect(http, Conversation.prepare(service, body.task))
    shown = ResponseFormatter(chat, body, label, model)
    return await service.answer(
        http, shown, [chat.request], [label], chat.field, stream=body.stream, model=model
    )


def no_response(_: Service, response_id: str) -> Response:
    """Raise ApiError: a response is looked for, and none is kept."""
    message = f"there is no response {response_id!r}: nothing is stored"
    raise ApiError(404, message, "response_id", code="response_not_found")


class ResponseFormatter(Format):
    """Formats one output as a response."""

    def __init__(
        self, conversation: Conversation, body: ResponsesBody, label: str, model: str
    ) -> None:
        self._conversation, self._with_logprobs = conversation, body.with_logprobs
        self.wire = Wire(self.failed, b"", named=True)
        self._writer = ItemWriter()
        self._thinking = conversation.thinking()
        self._sequence = 0
        self._head = self._fields(body, label, model)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The response as one object."""
        (output,) = outputs
        self._thinking.push(output.token_ids)
        for piece in self._conversation.assembler().take(output):
            self._writer.push(piece, [])
        status = STATUS.get(output.finish_reason, "completed")
        self._writer.finish(_item_status(output.finish_reason))
        if self._with_logprobs:
            (part,) = self._writer.items[-1]["content"]
            part["logprobs"] = self._logprobs(*without_stop(output))
        return self._response(status, output)

    async def events(self, handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Event]:
        """The response in events."""
        (handle,), assembler = handles, self._conversation.assembler()
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._response("in_progress")})
        pending: list[Any] = []
        async for _, delta in interleaved(handles):
            self._thinking.push(delta.token_ids)
            pieces = assembler.take(delta)
            if self._with_logprobs:
                pending += self._logprobs(*cut_stop(handle.request, delta))
                if pending and not pieces:
                    pieces = [{"content": ""}]
            for piece in pieces:
                for event in self._writer.push(piece, pending):
                    yield self._numbered(event)
                pending = []
        output = await handle.finish()
        for event in self._writer.finish(_item_status(output.finish_reason)):
            yield self._numbered(event)
        status = STATUS.get(output.finish_reason, "completed")
        kind = "response.completed" if status == "completed" else "response.incomplete"
        yield self._numbered({"type": kind, "response": self._response(status, output)})

    def failed(self, error: ApiError) -> Event:
        """The last event of a stream that fails."""
        told = error.body()["error"]
        response = self._response("failed")
        response["error"] = {
            "code": told["code"] or told["type"],
            "message": told["message"],
        }
        return self._numbered({"type": "response.failed", "response": response})

    def _numbered(self, event: Event) -> Event:
        self._sequence += 1
        return event | {"sequence_number": self._sequence - 1}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Any]:
        tokenizer = self._conversation.service.engine.tokenizer
        shown: list[Any] = chat_logprobs(tokenizer, ids, logprobs)["content"]
        return shown

    def _fields(self, body: ResponsesBody, label: str, model: str) -> dict[str, Any]:
        """What a response has from its beginning."""
        sampling = self._conversation.request.sampling
        # With the names of the wire, and without what was left out.
        sent = body.model_dump(by_alias=True, exclude_none=True, include=ECHOED)
        reasoning = {"effort": None, "summary": None} | sent.get("reasoning", {})
        return {
            "id": label,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": reasoning,
            "background": False,
            "service_tier": "default",
            "store": False,
            "temperature": _default(sampling.temperature, 1.0),
            "top_p": _default(sampling.top_p, 1.0),
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": sent.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": sent.get("tool_choice", "auto"),
            "tools": [TOOL | tool for tool in sent.get("tools", [])],
            "truncation": "disabled",
        }

    def _response(self, status: str, output: Output | None = None) -> dict[str, Any]:
        ended = {"completed_at": int(time.time())} if status == "completed" else {}
        return self._head | {
            "status": status,
            "incomplete_details": INCOMPLETE if status == "incomplete" else None,
            "output": list(self._writer.items) if output is not None else [],
            "usage": None if output is None else self._usage(output),
            **ended,
            **({} if output is None else findings(output) | speculation([output])),
        }

    def _usage(self, output: Output) -> dict[str, Any]:
        stats = output.stats
        return {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": stats.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": stats.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thinking.count},
            "total_tokens": stats.prompt_tokens + stats.output_tokens,
        }


# Fields that a response repeats as they were sent.
ECHOED = {"text", "reasoning", "tools", "tool_choice"}
# What a tool has where the body leaves it out.
TOOL = {"description": None, "parameters": None, "strict": None}


def _item_status(reason: FinishReason) -> str:
    return "completed" if reason == "stop" else "incomplete"


def _default(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


class ItemWriter:
    """Takes the deltas of a chat's answer; gives the Responses API's events, and the items.

    Thinking, text and each call are items of their own, in the order in which they are written.

    Attributes:
        items: Of the output; the last one may be open.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False
        # Of the open item, whose fields are set when it ends.
        self._text = ""

    def push(self, delta: dict[str, Any], logprobs: list[Any]) -> list[Event]:
        """The events of a delta in chat completions' form; ``logprobs`` are those of its text."""
        events: list[Event] = []
        if "reasoning_content" in delta:
            events += self._begin("reasoning")
            events += self._add("response.reasoning_text.delta", delta["reasoning_content"])
        if "content" in delta:
            events += self._begin("message")
            more = {"logprobs": logprobs}
            events += self._add("response.output_text.delta", delta["content"], **more)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._end()
                own = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                events += self._start("function_call", "fc_", own)
            if text := call["function"]["arguments"]:
                events += self._add("response.function_call_arguments.delta", text)
        return events

    def finish(self, status: str) -> list[Event]:
        """The events of the output's end; ``status`` is that of the item that it ends in."""
        events = [] if self.items else self._begin("message")
        return events + self._end(status)

    def _begin(self, kind: str) -> list[Event]:
        """Go on with the open item if it is of this kind, else end it and start one."""
        if self._open and self.items[-1]["type"] == kind:
            return []
        events = self._end()
        if kind == "message":
            events += self._start(kind, "msg_", {"role": "assistant", "content": []})
        else:
            events += self._start(kind, "rs_", {"summary": [], "content": []})
        part = {"part": self._part()}
        return [*events, self._event("response.content_part.added", content_index=0, **part)]

    def _start(self, kind: str, prefix: str, own: dict[str, Any]) -> list[Event]:
        item = {"id": new_id(prefix), "type": kind, "status": "in_progress", **own}
        self.items.append(item)
        self._open, self._text = True, ""
        shown = {"output_index": len(self.items) - 1, "item": dict(item)}
        return [{"type": "response.output_item.added", **shown}]

    def _add(self, kind: str, text: str, **more: Any) -> list[Event]:
        self._text += text
        index = {} if self.items[-1]["type"] == "function_call" else {"content_index": 0}
        return [self._event(kind, **index, delta=text, **more)]

    def _end(self, status: str = "completed") -> list[Event]:
        """End the open item, if there is one."""
        if not self._open:
            return []
        item, text, self._open = self.items[-1], self._text, False
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            kind, own = "response.function_call_arguments.done", {"name": item["name"]}
            events = [self._event(kind, arguments=text, **own)]
        else:
            item["content"] = [self._part()]
            is_message = item["type"] == "message"
            kind = "response.output_text.done" if is_message else "response.reasoning_text.done"
            # What came with the deltas is not repeated.
            more: dict[str, Any] = {"logprobs": []} if is_message else {}
            part = {"part": self._part()}
            events = [
                self._event(kind, content_index=0, text=text, **more),
                self._event("response.content_part.done", content_index=0, **part),
            ]
        shown = {"output_index": len(self.items) - 1, "item": dict(item)}
        return [*events, {"type": "response.output_item.done", **shown}]

    def _part(self) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **own: Any) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": index, **own}
