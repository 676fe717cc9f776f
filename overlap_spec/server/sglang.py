"""SGLang's ``/generate`` and ``/abort_request``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.errors import InvalidRequest
from overlap_spec.server.completions import ManyTokenIds, Texts, TokenIds, each_prompt
from overlap_spec.server.errors import ApiError, Json
from overlap_spec.server.events import InParts
from overlap_spec.server.logprobs import SGLangLogprobs
from overlap_spec.server.middleware import IS_ADMIN, OWNER
from overlap_spec.server.protocol import (
    MOST_ENTRIES,
    NO_SPECIAL,
    Body,
    Choices,
    Constraint,
    Count,
    Int,
    Items,
    Label,
    Positive,
    Sampling,
    Top,
)
from overlap_spec.server.service import (
    STREAMS,
    Format,
    RequestGroup,
    Service,
    Serving,
    fan_out,
    findings,
    interleaved,
    new_id,
    routes,
)
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta, Output, Request, SamplingParams

# Above this (characters, tokens and log-probabilities together), an event has to add this part.
SMALL_OUTPUT = 8192
LEAST_GROWTH = 1 / 16
# Of fields that the engine knows by others.
SGLANG_NAMES = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}


class SGLangSampling(Sampling, Constraint):
    """SGLang's ``sampling_params``."""

    max_new_tokens: Positive | None = None
    min_new_tokens: Count | None = None
    stop: str | Annotated[Items[str], Field(max_length=64)] | None = None
    sampling_seed: Int | None = None
    n: Choices | None = None
    spaces_between_special_tokens: bool | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "max_tokens": "send max_new_tokens",
        "seed": "send sampling_seed",
        "custom_params": "there are no custom processors",
        "skip_special_tokens": f"{NO_SPECIAL}read output_ids",
        "stream_interval": "each piece is sent as it comes",
        "beam_width": "tokens are sampled; send temperature 0 for the most probable",
    }
    neutral: ClassVar[Mapping[str, Any]] = {"skip_special_tokens": True}

    def sampling(self, logprobs: int | None) -> SamplingParams:
        """The sampling parameters; ``logprobs`` as in SamplingParams."""
        if self.min_new_tokens is not None and self.min_tokens is not None:
            raise InvalidRequest("min_new_tokens and min_tokens: send one", "min_new_tokens")
        minimum = self.min_new_tokens if self.min_tokens is None else self.min_tokens
        more = {"max_tokens": self.max_new_tokens, "stop": self.stop, "seed": self.sampling_seed}
        return self.parameters(**more, min_tokens=minimum, logprobs=logprobs)


# Those that clients of other routes send beside the text.
IN_PARAMS = ("temperature", "max_new_tokens", "stop", "n", "json_schema", "regex", "ebnf")
Samplings = Annotated[Items[SGLangSampling], Field(min_length=1, max_length=MOST_ENTRIES)]


class GenerateBody(Body):
    """A request in SGLang's format: ``text`` or ``input_ids``, one or a list."""

    example: ClassVar[Mapping[str, Any]] = {
        "text": "The date is ",
        "sampling_params": {"regex": r"\d{4}-\d\d-\d\d", "temperature": 0},
    }

    text: str | Texts | None = None
    input_ids: TokenIds | ManyTokenIds | None = None
    sampling_params: SGLangSampling | Samplings | None = None
    rid: Label | Annotated[Items[Label], Field(min_length=1, max_length=MOST_ENTRIES)] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Top | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Computed prompts are shared among requests of the same salt alone."
    )

    refused: ClassVar[Mapping[str, str]] = {
        "logprob_start_len": "for those of a prompt, send prompt_logprobs to /v1/completions",
        "prompt": "send text",
        "messages": "ask /v1/chat/completions",
        **dict.fromkeys(IN_PARAMS, "send it in sampling_params"),
        "token_ids_logprob": "send top_logprobs_num",
        **dict.fromkeys(
            ("image_data", "video_data", "audio_data", "modalities"), "the model reads texts alone"
        ),
        "return_hidden_states": "hidden states do not leave the engine",
        "custom_logit_processor": "there are no custom processors: send logit_bias or a constraint",
        "priority": "send it to /v1/completions",
        "background": "wait for the reply, or send stream: true",
        "log_metrics": "all requests are counted",
        "no_logs": "no request is logged",
        "extra_key": "send cache_salt",
        "input_embeds": "send text or input_ids",
        "lora_path": "an adapter is asked for by its name as the model, on OpenAI's routes",
        "session_params": "there are no sessions: prompts that start alike share their cache",
    }
    neutral: ClassVar[Mapping[str, Any]] = {
        "logprob_start_len": -1,
        "return_hidden_states": False,
        "background": False,
        "log_metrics": True,
        "no_logs": False,
    }

    def prompts(self) -> tuple[list[str | list[int]], bool]:
        """The prompts, and whether it is a single one."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("send either text or input_ids", "text")
        given = self.text if self.text is not None else self.input_ids
        assert given is not None
        single = isinstance(given, str) or isinstance(given[0], int)
        return each_prompt(given), single


class AbortBody(Body):
    """Which request to abort: its ``rid``, one of its ``rid``s, or its reply's first ``id``; or
    all."""

    example: ClassVar[Mapping[str, Any]] = {"rid": "my-request"}

    rid: Label | None = None
    abort_all: bool | None = None


router = routes()


@router.post("/generate", responses=STREAMS)
async def generate(service: Serving, body: GenerateBody, http: HttpRequest) -> Response:
    """SGLang's completions of raw texts; a list of prompts gives a list of results."""
    prompts, single = body.prompts()
    count = len(prompts)
    samplings = _each("sampling_params", body.sampling_params, count)
    labels = _labels(body, count)
    counts = [(given.n or 1) if given else 1 for given in samplings]
    service.check_choices(sum(counts))
    prepared = _prepare(service, body, prompts, samplings)
    requests, source = await service.run_until_disconnect(http, prepared)
    labels = [label for label, each in zip(labels, counts, strict=True) for _ in range(each)]
    is_single = single and len(requests) == 1
    shown = SGLangFormatter(service.engine.tokenizer, body, labels, is_single)
    group = RequestGroup(labels, requests, source)
    return await service.answer(http, shown, group, stream=body.stream)


def _labels(body: GenerateBody, count: int) -> list[str]:
    """The id that each prompt's requests are aborted by: its own, or one for all."""
    if not isinstance(body.rid, list):
        return [body.rid or new_id("gen-")] * count
    labels: list[str] = _each("rid", body.rid, count)
    if len(set(labels)) < count:
        raise InvalidRequest("two prompts have the same id", "rid")
    return labels


async def _prepare(
    service: Service,
    body: GenerateBody,
    prompts: Sequence[str | list[int]],
    samplings: Sequence[SGLangSampling | None],
) -> tuple[list[Request], str | None]:
    """The requests, checked and tokenised, and the body's field that their grammars come from."""
    requests: list[Request] = []
    source = None
    top = (body.top_logprobs_num or 0) if body.return_logprob else None
    for prompt in prompts:
        service.engine.input_processor.check_length(len(prompt))
    for prompt, given in zip(prompts, samplings, strict=True):
        given = given or SGLangSampling.model_validate({})
        try:
            grammar, name = await service.constraints.of(given)
            source = source or (f"sampling_params.{name}" if name else None)
            salt = body.cache_salt or ""
            request = await service.engine.prepare(
                prompt, grammar, given.sampling(top), raw=True, cache_salt=salt
            )
        except InvalidRequest as error:
            name = SGLANG_NAMES.get(error.param or "", error.param)
            if name == "min_tokens" and given.min_tokens is None:
                name = "min_new_tokens"
            if name in SGLangSampling.known:
                error.param = f"sampling_params.{name}"
            raise
        await asyncio.sleep(0)
        requests += fan_out([request], given.n or 1)
    return requests, source


@dataclass
class OutputSoFar:
    """The pieces of one stream so far, and whether they are worth an event."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: SGLangLogprobs | None = None
    size: int = 0
    sent: int = 0

    def push(self, delta: Delta) -> None:
        """Add a piece."""
        self.text += delta.text
        self.ids += delta.token_ids
        if self.logprobs is not None:
            self.logprobs.push(delta.token_ids, delta.logprobs)
        entries = sum(1 + len(entry.top) for entry in delta.logprobs)
        self.size += len(delta.text) + len(delta.token_ids) + entries

    def is_due(self) -> bool:
        """Whether to send an event now."""
        if self.size > SMALL_OUTPUT and self.size < self.sent * (1 + LEAST_GROWTH):
            return False
        self.sent = self.size
        return True


class SGLangFormatter(Format):
    """Formats outputs as SGLang does: each event of a stream holds the whole output so far.

    Args:
        labels: Of each output; the second that has one, and all after it, are numbered.
        is_single: Whether there is one output, and no list of them.
    """

    def __init__(
        self, tokenizer: Tokenizer, body: GenerateBody, labels: Sequence[str], is_single: bool
    ) -> None:
        self.tokenizer, self.body, self._is_single = tokenizer, body, is_single
        self._ids: list[str] = []
        seen: Counter[str] = Counter()
        for label in labels:
            self._ids.append(f"{label}-{seen[label]}" if seen[label] else label)
            seen[label] += 1

    def whole(self, outputs: Sequence[Output]) -> Any:
        """Finished outputs, or the one."""
        made = []
        for index, output in enumerate(outputs):
            result, logprobs = self._result(output, index), self._logprobs()
            if logprobs is not None:
                logprobs.push(output.token_ids, output.logprobs)
                result["meta_info"] |= logprobs.fields()
            made.append(result)
        return made[0] if self._is_single else made

    def _result(self, output: Output, index: int) -> dict[str, Any]:
        reason: dict[str, Any] = {"type": output.finish_reason}
        if output.finish_reason == "stop" and output.stop_match is not None:
            reason["matched"] = output.stop_match
        if output.finish_reason == "length":
            reason["length"] = output.stats.output_tokens
        stats = output.stats
        meta = {
            "id": self._ids[index],
            "finish_reason": reason,
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.output_tokens,
            "cached_tokens": stats.cached_tokens,
            "spec_accept_rate": stats.accept_rate,
            "spec_accept_length": stats.accept_length,
            "spec_verify_ct": stats.verifies,
            "spec_correct_drafts_histogram": stats.accept_histogram,
            "e2e_latency": stats.end_to_end_ms / 1e3,
            "ttft": stats.ttft_ms / 1e3,
            "grammar_compile_ms": stats.grammar_compile_ms,
            "grammar_ms": stats.grammar_ms,
            "exposed_ms": stats.exposed_ms,
            "idle_ms": stats.idle_ms,
            **findings(output),
        }
        return {"text": output.text, "output_ids": list(output.token_ids), "meta_info": meta}

    async def events(self, handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Any]:
        """The whole output so far, after each piece while it is small; then after each piece that
        makes it larger by a part of itself, so that all events together stay in proportion."""
        seen = [OutputSoFar(logprobs=self._logprobs()) for _ in handles]
        async for index, delta in interleaved(handles):
            so_far = seen[index]
            so_far.push(delta)
            if delta.finish_reason == "error":
                continue
            if delta.finish_reason is not None:
                event = self._result(await handles[index].finish(), index)
            elif so_far.is_due():
                event = self._so_far(so_far, index, handles[index].request)
            else:
                continue
            event |= {} if self._is_single else {"index": index}
            yield _in_parts(event, so_far.logprobs)

    def _so_far(self, so_far: OutputSoFar, index: int, request: Request) -> dict[str, Any]:
        meta = {
            "id": self._ids[index],
            "finish_reason": None,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(so_far.ids),
        }
        return {"text": so_far.text, "output_ids": so_far.ids, "meta_info": meta}

    def _logprobs(self) -> SGLangLogprobs | None:
        if not self.body.return_logprob:
            return None
        return SGLangLogprobs(self.tokenizer, self.body.return_text_in_logprobs is True)


def _in_parts(event: dict[str, Any], logprobs: SGLangLogprobs | None) -> Any:
    """An event with log-probabilities, which were encoded as they came."""
    if logprobs is None:
        return event
    meta = event.pop("meta_info")
    head = msgspec.json.encode(event)[:-1] + b',"meta_info":' + msgspec.json.encode(meta)[:-1]
    return InParts([head, *logprobs.parts(), b"}}"])


@router.post("/abort_request")
async def abort_request(service: Serving, body: AbortBody, http: HttpRequest) -> Response:
    """Abort the client's own requests of an id, or, for the administrator, all or anybody's; the
    reply says how many were running."""
    is_admin = http.scope[IS_ADMIN]
    if body.abort_all and not is_admin:
        message = "abort_all reaches other clients' requests: send the key of --admin-api-key"
        raise ApiError(403, message, "abort_all", code="not_admin")
    if not body.abort_all and body.rid is None:
        raise InvalidRequest("send rid, or abort_all: true", "rid")
    found = [
        handle
        for (owner, label), handles in service.by_label.items()
        if (is_admin or owner == http.scope[OWNER]) and (body.abort_all or label == body.rid)
        for handle in handles
        if handle.output is None
    ]
    for handle in found:
        handle.abort()
    return Json({"aborted": len(found)})


def _each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{len(value)} values for {count} prompts", name)
    return value
