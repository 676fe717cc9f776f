"""From a caller's arguments to a Request: checks, tokens, defaults and limits.

Needs no model, so that the client of an engine process can do it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from overlap_spec.chat_messages import template_messages
from overlap_spec.chat_template import Rendering
from overlap_spec.engine.arguments import (
    GrammarLike,
    Prompt,
    Sampling,
    as_grammar,
    as_tools,
    is_token_ids,
)
from overlap_spec.errors import InvalidRequest, unknown
from overlap_spec.grammar.automata.search import search
from overlap_spec.grammar.spec import Grammar
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import BANNED_TOKENS, MOST_BANNED, Request, SamplingParams

# Log-probabilities of a prompt: tokens × (1 + the most probable ones of each).
MOST_PROMPT_LOGPROBS = 2**18
# Patterns that end an output, and words that it may not have.
MOST_PATTERNS, MOST_WORDS = 8, 1024
# What is told of variables that nobody reads.
MOST_TOLD, LONGEST_TOLD = 4, 64
# Names that others have for arguments → ours.
ELSEWHERE = {
    "lora_request": "lora",
    "stop_sequences": "stop",
    "sampling_params": "sampling",
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), "max_tokens"),
    **dict.fromkeys(("messages", "prompts"), "prompt"),
    **dict.fromkeys(
        ("output_type", "response_format", "schema", "json_schema", "regex", "ebnf", "choice"),
        "grammar",
    ),
}

One = TypeVar("One", covariant=True)
Many = TypeVar("Many", covariant=True)
Nested = TypeVar("Nested", covariant=True)


class PromptOptions(TypedDict, total=False):
    """Keyword arguments of every call that takes a prompt.

    ``raw``: use a text prompt as it is, without the chat template. ``tools``: tool definitions for
    the chat template, or plain functions. ``priority``: waiting requests with a higher one start
    first. ``rendering``: how a chat is rendered. ``cache_salt``: computed pages are shared only
    with requests of the same salt. ``lora``: name of an adapter, of those in ``lora_modules``.
    """

    raw: bool
    tools: Sequence[Any] | None
    priority: int
    rendering: Rendering
    cache_salt: str
    lora: str | None


class SamplingOptions(TypedDict, total=False):
    """The fields of :class:`overlap_spec.SamplingParams` as keyword arguments."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    min_tokens: int
    max_tokens: int | None
    complete: bool | None
    thinking_budget: int | None
    stop: str | Sequence[str]
    stop_regex: str | Sequence[str]
    include_stop_str_in_output: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    speculate: bool
    origins: bool
    draft_trees: bool
    parts: Sequence[str]
    tpot_slo_ms: float | None


class GenerateOptions(PromptOptions, SamplingOptions, total=False):
    """Keyword arguments of every call that generates; they go before its ``sampling``."""


class Generates(Protocol[One, Many, Nested]):
    """What a call that generates returns for one prompt and for several, without ``n`` and with."""

    @overload
    def __call__(
        self,
        prompt: Prompt,
        grammar: GrammarLike = None,
        sampling: Sampling = None,
        n: None = None,
        **options: Unpack[GenerateOptions],
    ) -> One: ...

    @overload
    def __call__(
        self,
        prompt: Prompt,
        grammar: GrammarLike = None,
        sampling: Sampling = None,
        *,
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> Many: ...

    @overload
    def __call__(
        self,
        prompt: Sequence[Prompt],
        grammar: GrammarLike | Sequence[GrammarLike] = None,
        sampling: Sampling | Sequence[Sampling] = None,
        n: None = None,
        **options: Unpack[GenerateOptions],
    ) -> Many: ...

    @overload
    def __call__(
        self,
        prompt: Sequence[Prompt],
        grammar: GrammarLike | Sequence[GrammarLike] = None,
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> Nested: ...


@dataclass(frozen=True)
class Limits:
    """Limits on prompt + output of one request, in tokens: of the model's context, and of the whole
    KV cache."""

    context_tokens: int
    cache_tokens: int


class InputProcessor:
    """Checks and tokenises the requests of one model; ``adapters``: names of the target's."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        additional_properties: str = "closed",
        adapters: Collection[str] = (),
    ) -> None:
        self.tokenizer, self.limits, self._adapters = tokenizer, limits, adapters
        self._additional_properties = additional_properties
        self._longest = max(map(len, tokenizer.vocabulary.text))
        self._most_characters = limits.context_tokens * self._longest

    def process(
        self,
        prompt: Prompt,
        grammar: GrammarLike = None,
        sampling: Sampling = None,
        **options: Unpack[GenerateOptions],
    ) -> Request:
        """The request, checked and tokenised; its id is -1 until an engine numbers it.
        InvalidRequest names the field at fault.

        Args:
            prompt: Text (one user turn), a list of messages (a chat), or token ids.
            grammar: See :func:`as_grammar`.
            options: See :class:`GenerateOptions`.
        """
        arrival_ns = time.perf_counter_ns()
        self.check_length(prompt)
        grammar = as_grammar(grammar, self._additional_properties)
        fields, tools = sampling_fields(options), as_tools(options.get("tools"))
        rendering = options.get("rendering", Rendering())
        params = self._sampling(sampling, fields)
        check_text(params.stop, "stop")
        check_text(tools, "tools")
        _check_patterns(params)
        if grammar is not None:
            check_text(grammar.source, "grammar")
            _check_weighed(grammar, params)
        ids = self.prompt_ids(prompt, options.get("raw", False), tools, rendering)
        check_prompt_logprobs(len(ids), params.prompt_logprobs)
        # Under a grammar, an end-of-text token is allowed only where the output may end.
        ignore = params.ignore_eos and grammar is None
        eos = frozenset[int]() if ignore else self.tokenizer.eos_ids
        return Request(
            id=-1,
            prompt_ids=tuple(ids),
            sampling=params,
            grammar=grammar,
            max_tokens=self._max_tokens(params, len(ids)),
            stop_ids=eos | frozenset(params.stop_token_ids),
            seed=params.seed if params.seed is not None else secrets.randbits(62),
            arrival_ns=arrival_ns,
            priority=options.get("priority", 0),
            cache_salt=options.get("cache_salt", ""),
            lora=self._adapter(options.get("lora")),
            banned=self._banned(params.bad_words),
            warnings=_unread(self.tokenizer.unread(rendering.variables)),
        )

    def check_length(self, prompt: Any) -> int:
        """Characters of a prompt, as :func:`count_characters`; InvalidRequest if none with so many
        fits the context. Cheap, unlike tokenising it and counting its tokens."""
        characters = count_characters(prompt)
        if characters > self._most_characters:
            context, most = self.limits.context_tokens, self._most_characters
            raise InvalidRequest(
                f"the prompt has {characters} characters; the context of {context} tokens holds at "
                f"most {most}, which leaves no room for output: shorten the prompt",
                "prompt",
            )
        return characters

    def prompt_ids(
        self,
        prompt: Prompt,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
        rendering: Rendering = Rendering(),  # noqa: B008, frozen
    ) -> list[int]:
        """Token ids of a prompt; arguments and errors as for :meth:`process`."""
        check_text(prompt, "prompt")
        check_text(rendering.variables, "chat_template_kwargs")
        ids = self._encode(prompt, raw, tools, rendering)
        if not ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        return ids

    def _encode(
        self, prompt: Prompt, raw: bool, tools: Sequence[Any] | None, rendering: Rendering
    ) -> list[int]:
        if isinstance(prompt, str):
            if raw:
                return self.tokenizer.encode(prompt, special=True)
            return self.tokenizer.chat([{"role": "user", "content": prompt}], tools, rendering)
        if is_token_ids(prompt):
            for token in prompt:
                self._check_token("prompt", cast("int", token))
            return [cast("int", token) for token in prompt]
        return self.tokenizer.chat(template_messages(prompt), tools, rendering)

    def _adapter(self, name: str | None) -> str:
        if name is not None and name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise InvalidRequest(f"lora: there is no adapter {name!r}; there is {known}", "lora")
        return name or ""

    def _max_tokens(self, params: SamplingParams, prompt_tokens: int) -> int:
        """Most output tokens of a request; InvalidRequest if they do not fit."""
        context, asked = self.limits.context_tokens, params.max_tokens
        room, space = context - prompt_tokens, self.limits.cache_tokens - prompt_tokens
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens; the context of {context} "
                "leaves no room for output: shorten the prompt",
                "prompt",
            )
        max_tokens = min(room, space) if asked is None else asked
        if max_tokens > room:
            raise InvalidRequest(
                f"max_tokens {max_tokens} and the prompt's {prompt_tokens} tokens exceed the "
                f"context of {context}",
                "max_tokens",
            )
        if max_tokens < 1 or max_tokens > space:
            raise InvalidRequest(
                f"{prompt_tokens + max(max_tokens, 1)} tokens of prompt and output exceed the "
                "whole KV cache: lower max_tokens, or raise mem_fraction_static or "
                "max_total_tokens",
                "max_tokens",
            )
        return max_tokens

    def _sampling(self, sampling: Sampling, fields: Mapping[str, Any]) -> SamplingParams:
        if sampling is None:
            sampling = SamplingParams()
        elif isinstance(sampling, Mapping):
            sampling = SamplingParams.from_mapping(sampling)
        elif not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"sampling must be SamplingParams: {sampling!r}", "sampling")
        if fields:
            sampling = replace(sampling, **fields)
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(sampling, name) or ():
                self._check_token(name, token)
        return self.tokenizer.sampling_defaults(sampling)

    def _banned(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word at the start of a text, and behind a space where they differ."""
        check_text(words, "bad_words")
        if len(words) > MOST_WORDS:
            raise InvalidRequest(f"{len(words)} words; {MOST_WORDS} are allowed", "bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            # Measured first: a megabyte would take a second to cut into tokens.
            is_long = len(word) > BANNED_TOKENS * self._longest
            for text in () if is_long else (word, " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(text))
                is_long = is_long or len(ids) > BANNED_TOKENS
                found[ids] = None
            if is_long:
                raise InvalidRequest(
                    f"{word[:60]!r} has over {BANNED_TOKENS} tokens: shorten it", "bad_words"
                )
        found.pop((), None)
        if sum(len(ids) > 1 for ids in found) > MOST_BANNED:
            raise InvalidRequest(
                f"over {MOST_BANNED} of the words' spellings have several tokens: send fewer",
                "bad_words",
            )
        return tuple(found)

    def _check_token(self, name: str, token: int) -> None:
        size = self.tokenizer.vocab_size
        if not 0 <= token < size:
            raise InvalidRequest(f"{name}: token {token} is outside the vocabulary of {size}", name)


def sampling_fields(options: GenerateOptions) -> dict[str, Any]:
    """The fields of sampling among keyword arguments; InvalidRequest names an unknown one."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in SamplingOptions.__annotations__:
            found[name] = value
        elif name not in PromptOptions.__annotations__:
            known = [*GenerateOptions.__annotations__, "prompt", "grammar", "sampling"]
            raise InvalidRequest(unknown("argument", name, known, ELSEWHERE), name)
    return found


def _check_weighed(grammar: Grammar, params: SamplingParams) -> None:
    """Refuse what has no meaning where whole texts are weighed or chosen."""
    if not grammar.faithful:
        return
    wrong = {
        "logprobs": params.logprobs is not None,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > 0,
        "repetition_penalty": params.repetition_penalty not in (None, 1.0),
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
    }
    for name, given in wrong.items():
        if given:
            raise InvalidRequest(
                f"{name} is for tokens, and a faithful choice is made among whole texts: leave it "
                "out, or give its neutral value",
                name,
            )


def _check_patterns(params: SamplingParams) -> None:
    """Refuse patterns that cannot be searched for."""
    check_text(params.stop_regex, "stop_regex")
    if (count := len(params.stop_regex)) > MOST_PATTERNS:
        raise InvalidRequest(f"{count} patterns; {MOST_PATTERNS} are allowed", "stop_regex")
    for pattern in params.stop_regex:
        search(pattern, "stop_regex")


def _unread(names: Sequence[str]) -> tuple[str, ...]:
    """Warnings of the chat template's variables that it does not read."""
    shown = ", ".join(name[:LONGEST_TOLD] for name in names[:MOST_TOLD])
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    told = f"chat_template_kwargs: the model's chat template does not read {shown}{more}"
    return (told,) if names else ()


def check_prompt_logprobs(tokens: int, top: int | None) -> None:
    """Raise InvalidRequest where ``top`` most probable tokens at each of ``tokens`` prompt tokens
    are more than the memory of one request is for."""
    values = 0 if top is None else tokens * (1 + top)
    if values > MOST_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"1 + {top} log-probabilities of each of {tokens} prompt tokens are {values}; "
            f"{MOST_PROMPT_LOGPROBS} are allowed: ask for fewer, or shorten the prompt",
            "prompt_logprobs",
        )


def count_characters(prompt: Any) -> int:
    """Characters of all texts in a prompt: text, or a chat as plain data; a token id counts one."""
    count, stack = 0, [prompt]
    while stack:
        value = stack.pop()
        listed = isinstance(value, list | tuple)
        if isinstance(value, str) or (listed and value and isinstance(value[0], int)):
            count += len(value)
        elif isinstance(value, Mapping):
            stack += value.values()
        elif listed:
            stack += value
    return count


def check_text(data: Any, param: str | None) -> None:
    """Raise InvalidRequest if a text inside plain data has a lone surrogate."""
    stack = [data]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                reason = f"{error.reason} at {error.start}"
                raise InvalidRequest(f"a text is not valid Unicode: {reason}", param) from None
        elif isinstance(value, Mapping):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple) and not is_token_ids(value):
            stack += value
