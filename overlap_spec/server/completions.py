"""``/v1/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.engine.input_processor import check_prompt_logprobs
from overlap_spec.errors import InvalidRequest
from overlap_spec.server.logprobs import prompt_logprobs, text_logprobs
from overlap_spec.server.origins import TokenOrigins
from overlap_spec.server.protocol import MOST_ENTRIES, Count, Items, OpenAIBody, Top
from overlap_spec.server.service import (
    STREAMS,
    Format,
    RequestGroup,
    Service,
    Serving,
    check_repeated,
    fan_out,
    findings,
    interleaved,
    new_id,
    routes,
    stop_reason,
    usages,
)
from overlap_spec.server.task import ResponseFormat
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Output, Request, SamplingParams

TokenIds = Annotated[Items[Count], Field(min_length=1)]
Texts = Annotated[Items[str], Field(min_length=1, max_length=MOST_ENTRIES)]
ManyTokenIds = Annotated[Items[TokenIds], Field(min_length=1, max_length=MOST_ENTRIES)]
Prompts = str | TokenIds | Texts | ManyTokenIds


def each_prompt(prompts: Any) -> list[str | list[int]]:
    """The prompts of a field that holds one or many, as text or as token ids."""
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


class CompletionBody(OpenAIBody):
    """A request for text completions."""

    example: ClassVar[Mapping[str, Any]] = {"prompt": "The order AB-1234", "max_tokens": 8}

    prompt: Prompts
    max_tokens: Count | None = Field(
        None, description="0, with `echo`: score the prompt, and answer nothing."
    )
    logprobs: Top | None = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None

    refused: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.refused,
        "messages": "send prompt, or ask /v1/chat/completions",
        "max_completion_tokens": "send max_tokens",
        "top_logprobs": "send logprobs with their number",
        "suffix": "text is only written behind the prompt: send that alone",
    }
    neutral: ClassVar[Mapping[str, Any]] = {**OpenAIBody.neutral, "suffix": ""}

    def sampling(self) -> SamplingParams:
        """The sampling parameters; InvalidRequest where fields contradict each other."""
        if self.tells_prompt and self.stream and (self.n or 1) > 1:
            raise InvalidRequest("echo with logprobs in a stream goes without n", "n")
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise InvalidRequest("0 goes with echo: true, and without stream: true", "max_tokens")
        asked = [self.prompt_logprobs, self.logprobs if self.tells_prompt else None]
        return self.parameters(
            # A prompt is scored with the one token behind it, which is left out of the reply.
            max_tokens=1 if self.max_tokens == 0 else self.max_tokens,
            complete=False if self.max_tokens == 0 else self.complete,
            logprobs=self.logprobs,
            prompt_logprobs=max((top for top in asked if top is not None), default=None),
        )

    @property
    def tells_prompt(self) -> bool:
        """Whether ``logprobs`` of a choice begin with the prompt's."""
        return bool(self.echo) and self.logprobs is not None


router = routes()


@router.post("/v1/completions", responses=STREAMS)
async def completions(service: Serving, body: CompletionBody, http: HttpRequest) -> Response:
    """OpenAI's text completions."""
    model, count = service.check_model(body.model), body.n or 1
    label = body.own_id("cmpl-") or new_id("cmpl-")
    prompts = each_prompt(body.prompt)
    service.check_choices(len(prompts) * count)
    requests, field = await service.run_until_disconnect(http, _prepare(service, body, prompts))
    head = {"id": label, "object": "text_completion", "created": int(time.time()), "model": model}
    shown = CompletionFormatter(service.engine.tokenizer, body, head, requests)
    all_of_them = fan_out(requests, count)
    group = RequestGroup([label] * len(all_of_them), all_of_them, field, body.id_field)
    return await service.answer(http, shown, group, stream=body.stream, model=model)


async def _prepare(
    service: Service, body: CompletionBody, prompts: Sequence[str | list[int]]
) -> tuple[list[Request], str | None]:
    """The requests, checked and tokenised, and the body's field that their grammar comes from."""
    for prompt in prompts:
        service.engine.input_processor.check_length(len(prompt))
    sampling = body.sampling()
    constraint = await service.constraints.of(body, body.response_format)
    requests = []
    for prompt in prompts:
        request = await service.engine.prepare(
            prompt,
            constraint.grammar,
            sampling,
            raw=True,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        requests.append(request)
        await asyncio.sleep(0)
    # Each choice has them.
    tokens = sum(len(request.prompt_ids) for request in requests) * (body.n or 1)
    check_prompt_logprobs(tokens, sampling.prompt_logprobs)
    if body.return_token_ids:
        check_repeated(tokens, "return_token_ids")
    return requests, constraint.field


class CompletionFormatter(Format):
    """Formats the outputs of some prompts as text completions, ``n`` of each.

    Args:
        head: Fields of the reply and of each chunk.
        requests: One a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionBody,
        head: dict[str, Any],
        requests: Sequence[Request],
    ) -> None:
        self.tokenizer, self.body, self.head, self.requests = tokenizer, body, head, requests
        echoed = [self._echo(prompt) for prompt in each_prompt(body.prompt)]
        self._count = body.n or 1
        check_repeated(sum(map(len, echoed)) * self._count, "echo")
        self._echoes = [echo for echo in echoed for _ in range(self._count)]

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The reply as one object."""
        choices = []
        if self.body.max_tokens == 0:
            outputs = [_scored(output) for output in outputs]
        for index, output in enumerate(outputs):
            # The first of those with the same prompt tells of it.
            told = outputs[index - index % self._count].prompt_logprobs
            request = self.requests[index // self._count]
            choices.append(self._choice(index, output, request, told))
        return self.head | {"choices": choices} | usages(outputs, self.requests)

    def _choice(self, index: int, output: Output, request: Request, told: Any) -> dict[str, Any]:
        shown, eos_ids = None, self.tokenizer.eos_ids
        if (top := self.body.logprobs) is not None:
            ids, entries = output.token_ids, output.logprobs
            if self.body.tells_prompt:
                ids, entries = (*request.prompt_ids, *ids), (*told, *entries)
            shown = text_logprobs(self.tokenizer, ids, entries, 0, top)
        choice = _piece(index, self._echoes[index] + output.text, shown, output.finish_reason)
        choice |= {"stop_reason": stop_reason(output, eos_ids), **findings(output)}
        if (top := self.body.prompt_logprobs) is not None:
            ids = request.prompt_ids
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, ids, told, top)
        return choice | self.body.told_ids(output.token_ids) | self.body.told_prompt(request)

    async def events(self, handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Any]:
        """The reply in chunks: for each choice its prompt where it is echoed, and its pieces."""
        head, so_far = self.head, self.body.usage_so_far
        offsets, told, tokens = ([0] * len(handles) for _ in range(3))
        decoders = [TokenOrigins(self.tokenizer) for _ in handles]
        for index, text in enumerate(self._echoes):
            request = handles[index].request
            first = self.body.told_ids(()) | self.body.told_prompt(request)
            if text or first:
                usage = so_far(request, 0)
                yield head | usage | {"choices": [_piece(index, text, None, None) | first]}
        async for index, delta in interleaved(handles):
            shown, entries = None, delta.prompt_logprobs or delta.logprobs
            if entries:
                ids, top = delta.token_ids, self.body.logprobs or 0
                if delta.prompt_logprobs:
                    ids = handles[index].request.prompt_ids[told[index] :][: len(entries)]
                    told[index] += len(entries)
                shown = text_logprobs(self.tokenizer, ids, entries, offsets[index], top)
                offsets[index] += sum(map(len, shown["tokens"]))
            tokens[index] += len(delta.token_ids)
            reason = delta.finish_reason
            extra = decoders[index].chunk_fields(delta)
            own = self.body.told_ids(delta.token_ids) if delta.token_ids else {}
            if reason != "error" and (delta.text or shown or reason or extra or own):
                choice = _piece(index, delta.text, shown, reason) | findings(delta) | own
                usage = so_far(handles[index].request, tokens[index])
                yield head | usage | {"choices": [choice]} | extra
        if self.body.include_usage:
            outputs = [handle.output for handle in handles if handle.output is not None]
            yield head | {"choices": []} | usages(outputs, self.requests)

    def _echo(self, prompt: str | list[int]) -> str:
        if not self.body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)


def _scored(output: Output) -> Output:
    """An output without its tokens."""
    stats = replace(output.stats, output_tokens=0)
    left = replace(output, finish_reason="length", stop_match=None, stats=stats)
    return replace(left, text="", token_ids=(), logprobs=())


def _piece(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
