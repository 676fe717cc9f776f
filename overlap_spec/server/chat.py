"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.server.conversation import ChatAssembler, Conversation
from overlap_spec.server.logprobs import (
    chat_logprobs,
    cut_stop,
    prompt_logprobs,
    without_stop,
)
from overlap_spec.server.origins import TokenOrigins
from overlap_spec.server.protocol.chat import ChatBody
from overlap_spec.server.service import (
    Format,
    Service,
    fan_out,
    findings,
    interleaved,
    new_id,
    stop_reason,
    usages,
)
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import FinishReason, Output, Request, TokenLogprobs


async def chat_completions(service: Service, body: ChatBody, http: HttpRequest) -> Response:
    """Complete a chat, as one reply or as a stream."""
    model, count = service.check_model(body.model), body.n or 1
    label = body.own_id("chatcmpl-") or new_id("chatcmpl-")
    service.check_choices(count)
    chat = await service.run_until_disconnect(http, Conversation.prepare(service, body.task))
    return await service.answer(
        http,
        ChatFormatter(chat, body, label, model),
        fan_out([chat.request], count),
        [label] * count,
        chat.field,
        stream=body.stream,
        id_field=body.id_field,
        model=model,
    )


@dataclass
class ChatFormatter(Format):
    """Formats the outputs of one chat as chat completions."""

    conversation: Conversation
    body: ChatBody
    id: str
    model: str

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The reply as one object."""
        choices, request = [], self.conversation.request
        for index, output in enumerate(outputs):
            assembler = self.conversation.assembler()
            assembler.take(output)
            reason = self._reason(assembler, output.finish_reason)
            ids, logprobs = without_stop(output)
            message = self._named(assembler.message())
            choice = self._choice(index, {"message": message}, ids, logprobs, reason)
            ended = {"stop_reason": stop_reason(output, self.tokenizer.eos_ids), **findings(output)}
            choices.append(choice | ended | self._token_ids(output.token_ids))
        head = self._head("chat.completion") | self._prompt_ids(request)
        if (top := self.body.prompt_logprobs) is not None:
            told = outputs[0].prompt_logprobs
            shown = prompt_logprobs(self.tokenizer, request.prompt_ids, told, top)
            head |= {"prompt_logprobs": shown}
        return head | {"choices": choices} | usages(outputs, [request])

    async def events(self, handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Any]:
        """The reply in chunks: for each choice its role, its deltas, and its finish reason."""
        head = self._head("chat.completion.chunk")
        if self.body.include_usage:
            head["usage"] = None
        assemblers = [self.conversation.assembler() for _ in handles]
        decoders = [TokenOrigins(self.tokenizer) for _ in handles]
        for index, handle in enumerate(handles):
            first = {"role": "assistant", "content": ""}
            choice = self._choice(index, {"delta": first})
            shown = self._prompt_ids(handle.request) if index == 0 else {}
            yield head | {"choices": [choice]} | shown
        async for index, delta in interleaved(handles):
            assembler = assemblers[index]
            pieces = assembler.take(delta)
            ids, logprobs = cut_stop(handles[index].request, delta)
            extra, own = decoders[index].chunk_fields(delta), self._token_ids(delta.token_ids)
            if not pieces and (logprobs or extra or (own and delta.token_ids)):
                pieces = [{"content": ""}]
            for number, piece in enumerate(pieces):
                # Of the deltas of one run of tokens, the first carries what there is a token.
                mine = (ids, logprobs) if number == 0 else ((), ())
                choice = self._choice(index, {"delta": self._named(piece)}, *mine)
                choice |= own if number == 0 else {}
                yield head | {"choices": [choice]} | (extra if number == 0 else {})
            if delta.finish_reason is not None and delta.finish_reason != "error":
                reason = self._reason(assembler, delta.finish_reason)
                choice = self._choice(index, {"delta": {}}, reason=reason) | findings(delta)
                yield head | {"choices": [choice]}
        if self.body.include_usage:
            outputs = [handle.output for handle in handles if handle.output is not None]
            yield head | {"choices": []} | usages(outputs, [handles[0].request])

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
            shown = chat_logprobs(self.tokenizer, ids, logprobs)
        return {"index": index, **inside, "logprobs": shown, "finish_reason": reason}

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.conversation.service.engine.tokenizer

    def _named(self, delta: dict[str, Any]) -> dict[str, Any]:
        return delta if self.body.functions is None else _legacy(delta)

    def _reason(self, assembler: ChatAssembler, reason: FinishReason) -> str:
        ended = assembler.finish_reason(reason)
        legacy = ended == "tool_calls" and self.body.functions is not None
        return "function_call" if legacy else ended

    def _token_ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self.body.return_token_ids else {}

    def _prompt_ids(self, request: Request) -> dict[str, Any]:
        return {"prompt_token_ids": list(request.prompt_ids)} if self.body.return_token_ids else {}


def _legacy(delta: dict[str, Any]) -> dict[str, Any]:
    """A delta or message whose call is named as where ``functions`` were sent, of which one is
    called at most."""
    calls = delta.pop("tool_calls", None)
    if calls:
        delta["function_call"] = calls[0]["function"]
    return delta
