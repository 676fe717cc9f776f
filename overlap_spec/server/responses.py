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
from overlap_spec.server.response_items import Event, ItemWriter
from overlap_spec.server.service import Format, Service, findings, interleaved, new_id
from overlap_spec.types import FinishReason, Output, TokenLogprobs

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
        http, shown, [chat.request], [label], chat.field, stream=body.stream
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
            **({} if output is None else findings(output)),
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
