"""``/v1/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import Request as HttpRequest
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.engine.input_processor import check_prompt_logprobs
from overlap_spec.server.logprobs import prompt_logprobs, text_logprobs
from overlap_spec.server.middleware import OWNER
from overlap_spec.server.origins import TokenOrigins
from overlap_spec.server.protocol.text import CompletionBody, each_prompt
from overlap_spec.server.service import (
    RequestGroup,
    Service,
    check_repeated,
    fan_out,
    findings,
    interleaved,
    new_id,
    stop_reason,
    usage,
)
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Output, PromptLogprobs, Request


async def completions(service: Service, body: CompletionBody, http: HttpRequest) -> Response:
    """Complete texts, as one reply or as a stream."""
    model = service.check_model(body.model)
    label = body.own_id("cmpl-") or new_id("cmpl-")
    prompts, count = each_prompt(body.prompt), body.n or 1
    service.check_choices(len(prompts) * count)
    prepared = _prepare(service, body, prompts)
    requests, field = await service.run_until_disconnect(http, prepared)
    tokenizer = service.engine.tokenizer
    echoed = [_echo(tokenizer, body, prompt) for prompt in prompts]
    check_repeated(sum(map(len, echoed)) * count, "echo")
    echoes = [echo for echo in echoed for _ in range(count)]
    head = {"id": label, "object": "text_completion", "created": int(time.time()), "model": model}
    with_usage = body.include_usage
    made = fan_out(requests, count)
    labels, owner = [label] * len(made), http.scope[OWNER]
    group = RequestGroup(labels, made, field, owner, body.id_field)
    if body.stream:

        def events(handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Any]:
            counted = requests if with_usage else None
            return _events(tokenizer, handles, body, head, echoes, counted)

        return await service.stream(http, group, events)
    outputs = await service.outputs(http, group)

    def whole() -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            # The first of those with the same prompt tells of it.
            told = Told(made[index].prompt_ids, outputs[index - index % count].prompt_logprobs)
            choice = _choice(tokenizer, body, index, echoes[index], output, told)
            choices.append(choice | _token_ids(body, output.token_ids, made[index]))
        return head | {"choices": choices, "usage": usage(outputs, requests)}

    return await service.reply(outputs, whole)


async def _prepare(
    service: Service, body: CompletionBody, prompts: Sequence[str | list[int]]
) -> tuple[list[Request], str | None]:
    """The requests, checked and tokenised, and the body's field that their grammar comes from."""
    for prompt in prompts:
        service.engine.check_length(len(prompt))
    sampling = body.sampling()
    constraint = await service.constraints.of(body, body.response_format)
    requests, priority = [], body.priority or 0
    for prompt in prompts:
        request = await service.engine.prepare(
            prompt,
            constraint.grammar,
            sampling,
            raw=True,
            priority=priority,
            cache_salt=body.cache_salt or "",
        )
        requests.append(replace(request, warnings=request.warnings + body.warnings))
        await asyncio.sleep(0)
    # Each choice has them.
    tokens = sum(len(request.prompt_ids) for request in requests) * (body.n or 1)
    check_prompt_logprobs(tokens, sampling.prompt_logprobs)
    if body.return_token_ids:
        check_repeated(tokens, "return_token_ids")
    return requests, constraint.field


class Told(NamedTuple):
    """A prompt, and what was told of its tokens, if that was asked for."""

    ids: Sequence[int]
    logprobs: Sequence[PromptLogprobs | None]


def _choice(
    tokenizer: Tokenizer, body: CompletionBody, index: int, echo: str, output: Output, told: Told
) -> dict[str, Any]:
    """A choice of a reply as a whole."""
    shown = None
    if (top := body.logprobs) is not None:
        ids, entries = output.token_ids, output.logprobs
        if body.tells_prompt:
            shown = text_logprobs(tokenizer, (*told.ids, *ids), (*told.logprobs, *entries), 0, top)
        else:
            shown = text_logprobs(tokenizer, ids, entries, 0, top)
    choice = _piece(index, echo + output.text, shown, output.finish_reason)
    choice |= {"stop_reason": stop_reason(output, tokenizer.eos_ids), **findings(output)}
    if (top := body.prompt_logprobs) is not None:
        choice["prompt_logprobs"] = prompt_logprobs(tokenizer, *told, top)
    return choice


def _echo(tokenizer: Tokenizer, body: CompletionBody, prompt: str | list[int]) -> str:
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


async def _events(
    tokenizer: Tokenizer,
    handles: Sequence[AsyncRequestHandle],
    body: CompletionBody,
    head: dict[str, Any],
    echoes: Sequence[str],
    counted: Sequence[Request] | None,
) -> AsyncIterator[Any]:
    if counted is not None:
        head = head | {"usage": None}
    offsets, told = [0] * len(handles), [0] * len(handles)
    decoders = [TokenOrigins(tokenizer) for _ in handles]
    for index, text in enumerate(echoes):
        first = _token_ids(body, (), handles[index].request)
        if text or first:
            yield head | {"choices": [_piece(index, text, None, None) | first]}
    async for index, delta in interleaved(handles):
        shown, entries = None, delta.prompt_logprobs or delta.logprobs
        if entries:
            ids = delta.token_ids
            if delta.prompt_logprobs:
                ids = handles[index].request.prompt_ids[told[index] :][: len(entries)]
                told[index] += len(entries)
            shown = text_logprobs(tokenizer, ids, entries, offsets[index], body.logprobs or 0)
            offsets[index] += sum(map(len, shown["tokens"]))
        reason = delta.finish_reason
        extra = decoders[index].chunk_fields(delta)
        own = _token_ids(body, delta.token_ids) if delta.token_ids else {}
        if reason != "error" and (delta.text or shown or reason or extra or own):
            choice = _piece(index, delta.text, shown, reason) | findings(delta) | own
            yield head | {"choices": [choice]} | extra
    if counted is not None:
        outputs = [handle.output for handle in handles if handle.output is not None]
        yield head | {"choices": [], "usage": usage(outputs, counted)}


def _token_ids(
    body: CompletionBody, ids: Sequence[int], request: Request | None = None
) -> dict[str, Any]:
    """Fields of a choice's tokens and its prompt's, if they are asked for."""
    if not body.return_token_ids:
        return {}
    prompt = {} if request is None else {"prompt_token_ids": list(request.prompt_ids)}
    return {"token_ids": list(ids), **prompt}


def _piece(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
