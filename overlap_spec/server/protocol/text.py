"""Bodies of ``/v1/completions``, SGLang's ``/generate``, and the token and abort routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from overlap_spec.errors import InvalidRequest
from overlap_spec.server.protocol.base import (
    MOST_ENTRIES,
    Body,
    Constraint,
    Count,
    Int,
    Items,
    Label,
    OpenAIBody,
    Sampling,
)
from overlap_spec.server.protocol.chat import ResponseFormat
from overlap_spec.types import SamplingParams

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
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = None
    response_format: ResponseFormat | None = None

    def sampling(self) -> SamplingParams:
        """The sampling parameters.

        Raises:
            InvalidRequest: fields that contradict each other.
        """
        self.check_shown()
        if self.tells_prompt and self.stream and (self.n or 1) > 1:
            raise InvalidRequest("echo with logprobs in a stream goes without n", "n")
        asked = [self.prompt_logprobs, self.logprobs if self.tells_prompt else None]
        return self.parameters(
            max_tokens=self.max_tokens,
            stop=self.stop,
            seed=self.seed,
            logit_bias=self.bias(),
            logprobs=self.logprobs,
            prompt_logprobs=max((top for top in asked if top is not None), default=None),
            origins=self.with_origins or None,
            draft_trees=self.with_draft_trees or None,
        )

    @property
    def tells_prompt(self) -> bool:
        """Whether ``logprobs`` of a choice begin with the prompt's."""
        return bool(self.echo) and self.logprobs is not None


class SGLangSampling(Sampling, Constraint):
    """SGLang's ``sampling_params``."""

    max_new_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    min_new_tokens: Count | None = None
    stop: str | Annotated[Items[str], Field(max_length=64)] | None = None
    sampling_seed: Int | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128)] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: bool | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "max_tokens": "send max_new_tokens",
        "seed": "send sampling_seed",
        "custom_params": "there are no custom processors",
    }

    def sampling(self, logprobs: int | None) -> SamplingParams:
        """The sampling parameters; ``logprobs`` as in SamplingParams."""
        if self.min_new_tokens is not None and self.min_tokens is not None:
            raise InvalidRequest("min_new_tokens and min_tokens: send one", "min_new_tokens")
        minimum = self.min_new_tokens if self.min_tokens is None else self.min_tokens
        more = {"max_tokens": self.max_new_tokens, "stop": self.stop, "seed": self.sampling_seed}
        return self.parameters(**more, min_tokens=minimum, logprobs=logprobs)


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
    top_logprobs_num: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Computed prompts are shared among requests of the same salt alone."
    )

    refused: ClassVar[Mapping[str, str]] = {
        "logprob_start_len": "for those of a prompt, send prompt_logprobs to /v1/completions",
        "image_data": "there are no images",
        "input_embeds": "send text or input_ids",
        "lora_path": "an adapter is asked for by its name as the model, on OpenAI's routes",
        "session_params": "there are no sessions: prompts that start alike share their cache",
    }
    neutral: ClassVar[Mapping[str, Any]] = {"logprob_start_len": -1}

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


class TokenizeBody(Body):
    """A text or a chat to tokenise."""

    example: ClassVar[Mapping[str, Any]] = {"prompt": "Hello"}

    model: Label | None = None
    prompt: str | None = None
    messages: Annotated[Items[dict[str, Any]], Field(max_length=MOST_ENTRIES)] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """Token ids to decode."""

    example: ClassVar[Mapping[str, Any]] = {"tokens": [72, 101]}

    model: Label | None = None
    tokens: Annotated[Items[Count], Field(max_length=2**18)]
