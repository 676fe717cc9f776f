"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.grammar.reasoning import (
    ReasoningFormat,
    ReasoningStream,
    load_reasoning,
    opened_by,
)
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.tool_stream import CallStream
from overlap_spec.server.chat_assembler import ChatAssembler
from overlap_spec.server.logprobs import chat_logprobs
from overlap_spec.server.middleware import OWNER
from overlap_spec.server.origins import TokenOrigins
from overlap_spec.server.protocol.chat import ChatBody
from overlap_spec.server.service import (
    RequestGroup,
    Service,
    fan_out,
    interleaved,
    new_id,
    remarks,
    stop_reason,
    usage,
)
from overlap_spec.types import Delta, Output, Request, TokenLogprobs


async def chat_completions(service: Service, body: ChatBody, http: HttpRequest) -> Response:
    """Complete a chat, as one reply or as a stream."""
    chat = Chat(service, body, new_id("chatcmpl"), service.check_model(body.model))
    service.check_choices(body.n or 1)
    request, field = await service.run_until_disconnect(http, chat.prepare())
    made = fan_out([request], body.n or 1)
    group = RequestGroup([chat.id] * len(made), made, field, http.scope[OWNER])
    with_usage = body.include_usage
    if body.stream:
        return await service.stream(http, group, lambda handles: chat.events(handles, with_usage))
    outputs = await service.outputs(http, group)
    return await service.reply(outputs, lambda: chat.whole(outputs, request))


@dataclass
class Chat:
    """One request for a chat completion.

    Attributes:
        opened: True if the prompt ends inside the model's thinking, False if it has closed the
            thinking; None if it does neither or the model does not think.
    """

    service: Service
    body: ChatBody
    id: str
    model: str
    opened: bool | None = None

    async def prepare(self) -> tuple[Request, str | None]:
        """The request, checked and tokenised, and the body's field that its grammar comes from."""
        body, service = self.body, self.service
        service.engine.check_length(body.count_characters())
        constraint = await service.constraints.tools(body, await service.constraints.of(body))
        request = await service.engine.prepare(
            body.template_messages(),
            constraint.grammar,
            body.sampling(),
            tools=body.tools,
            priority=body.priority or 0,
        )
        form = self._reasoning()
        if form is not None:
            ending = service.engine.tokenizer.ending(request.prompt_ids)
            self.opened = opened_by(form, ending)
            request = replace(request, grammar=self._after_thinking(request.grammar, form))
        return request, constraint.field

    def whole(self, outputs: Sequence[Output], request: Request) -> dict[str, Any]:
        """The reply as one object."""
        choices = []
        for index, output in enumerate(outputs):
            assembler = self._assembler()
            assembler.push(output.text)
            assembler.finish()
            reason = assembler.finish_reason(output.finish_reason)
            ids, logprobs = _without_stop(output)
            choice = self._choice(index, {"message": assembler.message()}, ids, logprobs, reason)
            eos_ids = self.service.engine.tokenizer.eos_ids
            ended = {"stop_reason": stop_reason(output, eos_ids), **remarks(output)}
            choices.append(choice | ended)
        head = self._head("chat.completion")
        return head | {"choices": choices, "usage": usage(outputs, [request])}

    async def events(
        self, handles: Sequence[AsyncRequestHandle], with_usage: bool
    ) -> AsyncIterator[Any]:
        """The reply in chunks: for each choice its role, its deltas, and its finish reason."""
        head = self._head("chat.completion.chunk")
        if with_usage:
            head["usage"] = None
        assemblers = [self._assembler() for _ in handles]
        decoders = [TokenOrigins(self.service.engine.tokenizer) for _ in handles]
        for index in range(len(handles)):
            first = {"role": "assistant", "content": ""}
            yield head | {"choices": [self._choice(index, {"delta": first})]}
        async for index, delta in interleaved(handles):
            assembler, ended = assemblers[index], delta.finish_reason is not None
            pieces = assembler.push(delta.text) + (assembler.finish() if ended else [])
            ids, logprobs = _cut_stop(handles[index].request, delta)
            extra = decoders[index].chunk_fields(delta)
            if not pieces and (logprobs or extra):
                pieces = [{"content": ""}]
            for number, piece in enumerate(pieces):
                # Of the deltas of one run of tokens, the first carries the log-probabilities.
                mine = (ids, logprobs) if number == 0 else ((), ())
                choice = self._choice(index, {"delta": piece}, *mine)
                yield head | {"choices": [choice]} | (extra if number == 0 else {})
            if delta.finish_reason is not None and delta.finish_reason != "error":
                reason = assembler.finish_reason(delta.finish_reason)
                choice = self._choice(index, {"delta": {}}, reason=reason) | remarks(delta)
                yield head | {"choices": [choice]}
        if with_usage:
            outputs = [handle.output for handle in handles if handle.output is not None]
            yield head | {"choices": [], "usage": usage(outputs, [handles[0].request])}

    def _head(self, kind: str) -> dict[str, Any]:
        created = int(time.time())
        return {"id": self.id, "object": kind, "created": created, "model": self.model}

    def _choice(
        self,
        index: int,
        inside: dict[str, Any],
        ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        shown = None
        if self.body.logprobs and (logprobs or "message" in inside):
            shown = chat_logprobs(self.service.engine.tokenizer, ids, logprobs)
        return {"index": index, **inside, "logprobs": shown, "finish_reason": reason}

    def _assembler(self) -> ChatAssembler:
        settings, body = self.service.settings, self.body
        form = self._reasoning()
        with_calls = bool(body.tools) and body.tool_choice != "none"
        return ChatAssembler(
            ReasoningStream(form, self.opened) if form is not None else None,
            CallStream(settings.tool_call_parser)
            if with_calls and settings.tool_call_parser
            else None,
        )

    def _reasoning(self) -> ReasoningFormat | None:
        parser = self.service.settings.reasoning_parser
        return None if parser is None else load_reasoning(parser)

    def _after_thinking(self, grammar: Grammar | None, form: ReasoningFormat) -> Grammar | None:
        if grammar is None or self.opened is False:
            return grammar
        begins_inside = self.opened or form.opens_inside
        return grammar.after_thinking(form.end, None if begins_inside else form.begin)


def _without_stop(output: Output) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
    """Tokens of an output without the stop token that ended it."""
    end = -1 if isinstance(output.stop_match, int) else None
    return output.token_ids[:end], output.logprobs[:end]


def _cut_stop(request: Request, delta: Delta) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
    """Tokens of a piece without the stop token that ended the output."""
    ids = delta.token_ids
    stopped = delta.finish_reason == "stop" and ids and ids[-1] in request.stop_ids
    end = -1 if stopped else None
    return ids[:end], delta.logprobs[:end]
