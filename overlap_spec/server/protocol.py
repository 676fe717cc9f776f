"""Fields that several routes share, and their conversion to sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from overlap_spec.engine.input_processor import check_text
from overlap_spec.errors import InvalidRequest
from overlap_spec.memory import collector_off
from overlap_spec.types import Request, SamplingParams

Int = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
# Of a request, and of log-probabilities that are told of a token.
Choices = Annotated[int, Field(strict=True, ge=1, le=128)]
Top = Annotated[int, Field(strict=True, ge=0, le=20)]
Number = Annotated[float, Field(strict=True, ge=-1e9, le=1e9, allow_inf_nan=False)]
Item = TypeVar("Item")
# Stops at its first wrong item: an error for each of a million items takes a minute.
Items = Annotated[list[Item], Field(fail_fast=True)]
MOST_ENTRIES = 4096
# Of an unknown field's name: what is compared with those that are known, and how like it must be.
LONGEST_NAME, ALIKE = 64, 0.8
# What a client calls itself or a request. Replies repeat some of these, once a choice.
Label = Annotated[str, Field(max_length=256)]


def _few(data: Any) -> Any:
    # Checked first, because a dict has no fail-fast validation.
    if isinstance(data, dict) and len(data) > MOST_ENTRIES:
        raise ValueError(f"at most {MOST_ENTRIES} entries are allowed")
    return data


Few = BeforeValidator(_few)
# What OpenAI's accounts have; all are served alike.
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None
# As OpenAI bounds it: a response repeats it.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    Few,
]

UNUSED = "Accepted and not used."
CACHED = f"{UNUSED[:-1]}: whatever prompts have in common at their start is cached."
NO_SPECIAL = "special tokens are never part of the text: "

# Kinds of `structured_outputs` that vLLM once took as fields of the body itself.
GUIDED = ("json", "regex", "choice", "grammar", "json_object")
OLD: Any = Field(None, deprecated=True, description="Deprecated: send structured_outputs.")


class Strict(BaseModel):
    """A part of a body; an unknown field is an error, but for null."""

    model_config = ConfigDict(
        extra="forbid", strict=True, protected_namespaces=(), populate_by_name=False
    )

    # Unsupported fields of other servers → what to do instead.
    refused: ClassVar[Mapping[str, str]] = {}
    # Of these, values that ask for nothing.
    neutral: ClassVar[Mapping[str, Any]] = {}
    # A body as the reference shows it.
    example: ClassVar[Mapping[str, Any]] = {}
    known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add what is refused, and an example, to the description."""
        made = handler(core)
        if cls.refused:
            told = {name: cls._why(name) for name in cls.refused}
            handler.resolve_ref_schema(made)["x-refused"] = told
        if cls.example:
            handler.resolve_ref_schema(made)["examples"] = [dict(cls.example)]
        return made

    @classmethod
    def _why(cls, name: str) -> str:
        """What to do instead of a refused field."""
        value = json.dumps(cls.neutral[name]) if name in cls.neutral else "null"
        return cls.refused[name] if value == "null" else f"{cls.refused[name]}; {value} is taken"

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        # Nearly always, and tens of thousands of times for one body.
        if not isinstance(data, dict) or data.keys() <= cls.known:
            return data
        data = {name: v for name, v in data.items() if name in cls.known or cls._asks(name, v)}
        for name in data:
            if name in cls.refused:
                raise InvalidRequest(f"{name} is not supported: {cls._why(name)}", name)
            if name not in cls.known:
                meant = get_close_matches(name[:LONGEST_NAME], cls.known, 1, ALIKE)
                if meant:
                    raise InvalidRequest(f"unknown field: did you mean {meant[0]}?", name)
                # Else by pydantic, which makes an error of each.
                if len(data) > len(cls.known):
                    raise InvalidRequest("unknown field", name)
        return data

    @classmethod
    def _asks(cls, name: str, value: Any) -> bool:
        """Whether a field that is not here asks for something."""
        if value is None or name not in cls.neutral:
            return value is not None
        neutral = cls.neutral[name]
        # In Python, true is 1.
        return isinstance(value, bool) != isinstance(neutral, bool) or bool(value != neutral)


class Body(Strict):
    """A whole body."""

    @model_validator(mode="wrap")
    @classmethod
    def _without_collector(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """The collector of reference cycles would go over tens of thousands of new parts again and
        again."""
        with collector_off():
            return handler(data)

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, data: Any) -> Any:
        try:
            # Much quicker than `check_text`, which then names the place.
            msgspec.json.encode(data)
        except (UnicodeError, ValueError, OverflowError, RecursionError):
            _check_unicode(data)
        return data


def _check_unicode(data: Any) -> None:
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeError:
        check_text(data, None)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


class StructuredOutputs(Strict):
    """vLLM's ``structured_outputs``: exactly one kind of constraint."""

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    key_order: Literal["schema", "any"] | None = Field(
        None, description="With json: the order of an object's members."
    )
    formats: Literal["assertion", "annotation"] | None = Field(
        None, description="With json: whether `format` is held (`assertion`)."
    )
    additional_properties: Literal["closed", "schema"] | None = Field(
        None, description="With json or structural_tag: members that a schema does not name."
    )
    probabilities: bool | None = Field(
        None, description="With choice: the probability of each text, in `choice_probabilities`."
    )
    faithful: bool | None = Field(
        None, description="With choice: choose by the probability of the whole text."
    )

    refused: ClassVar[Mapping[str, str]] = {
        "whitespace_pattern": "white space is compact, or bounded with "
        '"disable_any_whitespace": false',
        "disable_fallback": "there is no fallback that could be disabled",
        "disable_additional_properties": 'send "additional_properties": "closed" (the default) or '
        '"schema"',
    }


class Sampling(Strict):
    """Sampling fields of OpenAI, vLLM and SGLang."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[Items[Count], Field(max_length=1024)] | None = None
    stop_regex: Label | Annotated[Items[Label], Field(max_length=8)] | None = Field(
        None, description="Patterns that end the text where a match first ends; it is kept."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Whether the text keeps the stop string that ends it."
    )
    no_stop_trim: bool | None = Field(None, description="As include_stop_str_in_output.")
    bad_words: Annotated[Items[str], Field(max_length=1024)] | None = Field(
        None, description="Words whose tokens are not written one after the other."
    )
    allowed_token_ids: Annotated[Items[Count], Field(max_length=2**18)] | None = Field(
        None, description="No other token is written, stop tokens included."
    )
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Number], Few] | None = Field(
        None, description="Of token ids; added to their logits, from -100 to 100."
    )
    complete: bool | None = Field(
        None,
        description="Whether an output under a constraint comes to its end within max_tokens; one "
        "whose shortest output does not fit is refused.",
    )
    thinking_budget: Count | None = Field(
        None,
        description="Most tokens of the thinking, for a model that thinks: behind them comes its "
        "end marker.",
    )
    thinking_token_budget: Count | None = Field(None, description="As thinking_budget.")
    speculate: bool | None = Field(None, description="False: take no drafts for this request.")
    tpot_slo_ms: Number | None = Field(
        None, description="Target of the time per output token, in milliseconds, over 0."
    )

    def parameters(self, **more: Any) -> SamplingParams:
        """The fields as SamplingParams; None is the default.

        Raises:
            InvalidRequest: fields that contradict each other.
        """
        given = {name: getattr(self, name) for name in Sampling.model_fields} | more
        given["logit_bias"] = self._bias()
        budgets = {given["thinking_budget"], given.pop("thinking_token_budget")} - {None}
        if len(budgets) > 1:
            raise InvalidRequest(
                "thinking_budget and thinking_token_budget differ: send one of them",
                "thinking_token_budget",
            )
        given["thinking_budget"] = next(iter(budgets), None)
        if given.pop("no_stop_trim"):
            given["include_stop_str_in_output"] = True
        return SamplingParams(**{name: v for name, v in given.items() if v is not None})

    def _bias(self) -> dict[int, float] | None:
        """``logit_bias`` by token id."""
        if self.logit_bias is None:
            return None
        for token, value in self.logit_bias.items():
            if not token.isascii() or not token.isdigit() or len(token) > 9:
                raise InvalidRequest(f"logit_bias: {token!r} is not a token id", "logit_bias")
            if not -100 <= value <= 100:
                message = f"logit_bias: {value} is not between -100 and 100"
                raise InvalidRequest(message, "logit_bias")
        return {int(token): value for token, value in self.logit_bias.items()}


class Constraint(Strict):
    """Constraints besides ``response_format``, under SGLang's names."""

    json_schema: str | None = Field(None, description="A JSON schema as text.")
    regex: str | None = None
    ebnf: str | None = Field(None, description="An EBNF grammar in GBNF's dialect.")
    structural_tag: str | None = Field(None, description="A structural tag as JSON text.")


class StreamOptions(Strict):
    """What a stream has besides its output."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far, of its choice, in each chunk."
    )
    # OpenAI's padding against traffic analysis: accepted, and not added.
    include_obfuscation: bool | None = None
    include_token_origins: bool | None = Field(
        None,
        description="How each token came, in `overlap_spec`: drafted, grafted (a draft that the "
        "grammar forces), bonus (the target's own behind these), forced (the mask's only token).",
    )
    include_draft_trees: bool | None = Field(
        None,
        description="The same, and of each step its drafts, with what became of each: accepted, "
        "rejected (by the target), masked (by the grammar), late (its mask came too late), cut "
        "(behind the end).",
    )


class GenerationBody(Body, Sampling, Constraint):
    """Fields that all routes under ``/v1`` share that generate."""

    model: Label | None = None
    seed: Int | None = None
    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = Field(
        None,
        description="Of the waiting requests of one API key or address, those with a higher one "
        "start first.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Computed prompts are shared among requests of the same salt alone."
    )

    def parameters(self, **more: Any) -> SamplingParams:
        """See the base class."""
        return super().parameters(**{"seed": self.seed, **more})


class Unused(Strict):
    """Fields of OpenAI's chats and responses that change nothing here."""

    metadata: Metadata | None = Field(None, description=UNUSED)
    service_tier: ServiceTier = Field(None, description=UNUSED)
    user: Label | None = Field(None, description=UNUSED)
    safety_identifier: Label | None = Field(None, description=UNUSED)
    prompt_cache_key: Label | None = Field(None, description=UNUSED)
    prompt_cache_retention: Label | None = Field(None, description=UNUSED)
    prompt_cache_options: Annotated[dict[str, Label], Few] | None = Field(None, description=CACHED)


class OpenAIBody(GenerationBody):
    """Fields that chat and text completions share."""

    n: Choices | None = None
    stop: str | Annotated[Items[str], Field(max_length=64)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    return_token_ids: bool | None = Field(
        None, description="Add `prompt_token_ids`, and `token_ids` of each choice."
    )
    prompt_logprobs: Top | None = Field(
        None,
        description="Add `prompt_logprobs`: of each prompt token its log-probability, and so many "
        "of the most probable ones, as the model has them. Not with `stream`.",
    )
    spaces_between_special_tokens: bool | None = Field(None, description=UNUSED)
    user: Label | None = Field(None, description=UNUSED)
    request_id: Label | None = Field(None, description="The end of the reply's `id`.")
    rid: Label | None = Field(None, description="The reply's `id`, by which it can be aborted.")
    best_of: Annotated[int, Field(strict=True)] | None = Field(None, description="Only 1, or n.")

    guided_decoding_backend: Label | None = Field(
        None, description="Not used: the server's own holds the whole constraint."
    )
    guided_json: str | dict[str, Any] | bool | None = OLD
    guided_regex: str | None = OLD
    guided_choice: Items[str] | None = OLD
    guided_grammar: str | None = OLD
    guided_json_object: bool | None = OLD

    refused: ClassVar[Mapping[str, str]] = {
        "guided_whitespace_pattern": "send structured_outputs.disable_any_whitespace",
        "use_beam_search": "tokens are sampled; send temperature 0 for the most probable",
        "length_penalty": "it is for beam search, which is not here",
        "truncate_prompt_tokens": "shorten the prompt",
        "skip_special_tokens": f"{NO_SPECIAL}send return_token_ids",
    }
    neutral: ClassVar[Mapping[str, Any]] = {
        "use_beam_search": False,
        "length_penalty": 1.0,
        "skip_special_tokens": True,
    }

    @property
    def guided(self) -> dict[str, Any]:
        """The deprecated names of constraints that are in use, each with its value."""
        given = {kind: self.__dict__[f"guided_{kind}"] for kind in GUIDED}
        return {kind: value for kind, value in given.items() if value not in (None, False)}

    def own_id(self, prefix: str) -> str | None:
        """The reply's id as the body names it: `rid`, or `request_id` behind a prefix.

        Raises:
            InvalidRequest: it names two.
        """
        if self.request_id is None:
            return self.rid or None
        if self.rid is not None:
            raise InvalidRequest("rid and request_id: send one of them", "request_id")
        return prefix + self.request_id

    @property
    def id_field(self) -> str:
        """The field that :meth:`own_id` comes from."""
        return "rid" if self.request_id is None else "request_id"

    def parameters(self, **more: Any) -> SamplingParams:
        """See the base class; InvalidRequest also where an answer should show what it cannot."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options goes with stream: true", "stream_options")
        if self.best_of not in (None, 1, self.n or 1):
            raise InvalidRequest("best_of is not supported: leave it out, or send n", "best_of")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs goes without stream: true", "prompt_logprobs")
        asked = self.stream_options or StreamOptions.model_validate({})
        trees = asked.include_draft_trees or None
        told = {"origins": trees or asked.include_token_origins or None, "draft_trees": trees}
        return super().parameters(stop=self.stop, **told, **more)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends in a chunk with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def usage_so_far(self, request: Request, tokens: int) -> dict[str, Any]:
        """The ``usage`` of a chunk behind so many tokens of its choice: null where a last chunk has
        it; nothing where it was not asked for."""
        asked = self.stream_options
        if asked is None or not asked.include_usage:
            return {}
        if not asked.continuous_usage_stats:
            return {"usage": None}
        prompt = len(request.prompt_ids)
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens}
        return {"usage": counts | {"total_tokens": prompt + tokens}}

    def told_ids(self, ids: Sequence[int]) -> dict[str, Any]:
        """``token_ids`` of a choice, if they are asked for."""
        return {"token_ids": list(ids)} if self.return_token_ids else {}

    def told_prompt(self, request: Request) -> dict[str, Any]:
        """``prompt_token_ids``, if they are asked for."""
        return {"prompt_token_ids": list(request.prompt_ids)} if self.return_token_ids else {}
