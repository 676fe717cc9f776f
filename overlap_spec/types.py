"""What is asked of an engine and what it answers. Frozen values; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from math import inf
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from overlap_spec.config import setting
from overlap_spec.errors import InvalidRequest, unknown
from overlap_spec.stats import RequestStats
from overlap_spec.tiers import Tier

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
# Drafts of one request that are told of a step.
MOST_TOLD_DRAFTS = 128
# Of an output's text in its repr.
SHOWN_CHARS = 60
# Sequences of several tokens that a request's output may not have, and tokens of one.
MOST_BANNED, BANNED_TOKENS = 256, 16
Origin = Literal["grafted", "drafted", "bonus", "forced"]
Fate = Literal["accepted", "masked", "rejected", "late", "cut"]
# Fields of sampling that are true or false; the last may be None.
SWITCHES = (
    "ignore_eos", "include_stop_str_in_output", "speculate", "origins", "draft_trees", "complete"
)  # fmt: skip
# What numbers may be: from the first to the second, of whole ones the least.
RANGES = {
    "temperature": (0.0, inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, inf), "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}  # fmt: skip
LEAST = {
    "min_tokens": 0, "max_tokens": 1, "thinking_budget": 0, "logprobs": 0, "prompt_logprobs": 0,
    "top_k": -1,
}  # fmt: skip
# Of a field of sampling: it asks for the optional part of its name.
OPTIONAL: Mapping[str, bool] = {"optional": True}
# What optional parts tell, by name, where there are none.
NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. None means: the model's ``generation_config.json``, else the default.

    Attributes:
        temperature: 0 is greedy; default 1.
        top_k: Keep the k most probable tokens; -1 keeps all, and so does 0.
        top_p: Of these, keep the smallest set whose mass reaches p.
        min_p: Of these, drop tokens less probable than ``min_p`` times the most probable.
        repetition_penalty: Of tokens in prompt or output, positive logits are divided by it and
            negative ones multiplied (CTRL, arXiv 1909.05858).
        presence_penalty, frequency_penalty: Subtracted from the logit of a token in the output,
            once, and once an occurrence.
        logit_bias: Token id → value added to its logit.
        allowed_token_ids: No other token is chosen, stop tokens included; None allows all.
        bad_words: Texts that the output does not have, written in the tokens that they have at the
            start of a text or behind a space: the last of these tokens is not chosen behind the
            others. A text that other tokens make up is not seen.
        min_tokens: No stop token before this many output tokens.
        max_tokens: At most this many output tokens; None is what the context leaves.
        complete: Whether an output under a grammar comes to its end within ``max_tokens``: near the
            end of the room, no token is chosen behind which the rest does not fit; None is the
            engine's.
        thinking_budget: Most tokens of a model's thinking before its answer, its markers not
            counted: behind them comes the end marker; None is no limit.
        stop: Strings that end the output, which does not contain them.
        stop_regex: Patterns that end the output where a match first ends; it keeps what matched.
        include_stop_str_in_output: Whether the text keeps the stop string, or the text of the stop
            token, that ended it.
        stop_token_ids: Tokens that end the output, besides the model's own.
        ignore_eos: The model's own end-of-text tokens do not end the output.
        seed: Noise depends on (seed, position, token) alone; None draws a seed.
        logprobs: None: none. n: the log-probability of each output token and of the n most
            probable ones, after mask and penalties and before temperature.
        prompt_logprobs: None: none. n: of each prompt token but the first, its log-probability,
            its rank, and the n most probable tokens at its place, as the model has them: before
            bias, mask, penalties and temperature. Nothing of the prompt is taken from the cache.
        speculate: Whether drafts may be accepted; the text is the same either way, unless
            acceptance is by thresholds or relaxed.
        origins: Whether to tell of each output token how it came: an accepted draft, an accepted
            draft whose text the grammar had forced (grafted), the target's own choice behind these
            (bonus), or the only token that the mask allowed (forced).
        draft_trees: Whether to tell of each step what it drafted, and what became of each draft.
        parts: Optional parts of one's own, each as ``package.module:Class``; what they tell is in
            :attr:`Output.told`. Python alone: no server takes them from a client.
        tpot_slo_ms: Target of the time per output token, in milliseconds: adaspec and auto plan no
            step that takes longer, where they can; None is the engine's.
    """

    temperature: float | None = setting("0 is greedy.")
    top_k: int | None = setting("The k most probable tokens; -1 is all.")
    top_p: float | None = setting("Smallest set of tokens whose mass reaches this.")
    min_p: float = setting("No token less probable than this times the best one.", 0.0)
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = setting("Most output tokens.")
    complete: bool | None = None
    thinking_budget: int | None = None
    stop: str | Sequence[str] = ()
    stop_regex: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = setting("Same seed, same text.")
    logprobs: int | None = None
    prompt_logprobs: int | None = field(default=None, metadata=OPTIONAL)
    speculate: bool = True
    origins: bool = field(default=False, metadata=OPTIONAL)
    draft_trees: bool = field(default=False, metadata=OPTIONAL)
    parts: Sequence[str] = ()
    tpot_slo_ms: float | None = None

    def __post_init__(self) -> None:
        """Take None for the default; InvalidRequest names the first field out of its range."""
        for one in fields(self):
            if getattr(self, one.name) is None:
                none = {} if one.name == "logit_bias" else one.default
                object.__setattr__(self, one.name, none)
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_number(value) or not low <= value <= high or value == inf:
                span = f"in [{low}, {high}]" if high < inf else f"of at least {low}"
                raise InvalidRequest(f"{name} must be a finite number {span}: {value!r}", name)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise InvalidRequest(f"{name} must be over 0", name)
        target = self.tpot_slo_ms
        if target is not None and not (_is_number(target) and 0 < target < inf):
            raise InvalidRequest(f"tpot_slo_ms must be a number over 0: {target!r}", "tpot_slo_ms")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value >= least):
                raise InvalidRequest(f"{name} must be an integer >= {least}: {value!r}", name)
        if self.top_k == 0:
            object.__setattr__(self, "top_k", -1)
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed < 2**63):
            raise InvalidRequest(f"seed must be a 64-bit integer: {self.seed!r}", "seed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens is over max_tokens", "min_tokens")
        for name in SWITCHES:
            value = getattr(self, name)
            if not (isinstance(value, bool) or value is getattr(type(self), name)):
                raise InvalidRequest(f"{name} must be true or false: {value!r}", name)
        self._check_collections()

    def _check_collections(self) -> None:
        for name in ("stop", "stop_regex", "bad_words", "parts"):
            given = getattr(self, name)
            texts = (given,) if isinstance(given, str) else _items(given)
            if texts is None or not all(isinstance(text, str) and text for text in texts):
                raise InvalidRequest(f"{name} must be non-empty strings: {given!r}", name)
            object.__setattr__(self, name, texts)
        for name in ("stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            if given is None:
                continue
            ids = _items(given)
            if ids is None or not all(_is_int(token) and token >= 0 for token in ids):
                raise InvalidRequest(f"{name} must be token ids", name)
            object.__setattr__(self, name, ids)
        if self.allowed_token_ids == ():
            said = "allowed_token_ids allows no token: name at least one"
            raise InvalidRequest(said, "allowed_token_ids")
        said = "logit_bias maps token ids to numbers"
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"{said}: {self.logit_bias!r}", "logit_bias")
        for token, value in self.logit_bias.items():
            if not (_is_int(token) and token >= 0) or not _is_number(value):
                raise InvalidRequest(f"{said}: {token!r}: {value!r}", "logit_bias")

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the optional parts that are asked for (`overlap_spec/worker/extras`)."""
        return (*[name for name, none in EXTRAS if getattr(self, name) != none], *self.parts)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from plain data; InvalidRequest names a field that does not exist."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidRequest(unknown("sampling field", name, known), name)
        return cls(**values)


# Fields that ask for optional parts, and what they are where nothing is asked for.
EXTRAS = tuple((f.name, f.default) for f in fields(SamplingParams) if f.metadata == OPTIONAL)


def _items(value: object) -> tuple[Any, ...] | None:
    return tuple(value) if isinstance(value, Iterable) else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


@dataclass(frozen=True)
class Request:
    """What is asked of the engine, in tokens. ``sampling`` has its defaults filled in.

    ``grammar`` is the caller's specification (None: free text), opaque to all but the grammar
    room; ``stop_ids`` are all tokens that end the output. Of those that wait, the higher
    ``priority`` starts first; ``holder`` is who asks, and holders take turns. Computed pages are
    shared among requests of one ``cache_salt`` alone. ``lora``: name of the target's adapter; empty
    is none. ``banned``: sequences of tokens that the output may not have; ``warnings``: what the
    caller asked for and nothing heeds.
    """

    id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    grammar: Any
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    arrival_ns: int
    priority: int = 0
    cache_salt: str = ""
    lora: str = ""
    banned: tuple[tuple[int, ...], ...] = ()
    warnings: tuple[str, ...] = ()
    holder: str = ""

    @property
    def page_salt(self) -> str:
        """Computed pages are shared among requests of which this is the same."""
        return f"\0{self.lora}\0{self.cache_salt}" if self.lora else self.cache_salt


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output token: its own, and the most probable ones, descending,
    without tokens that the mask forbids."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class DraftTree:
    """What one step drafted for one request, and what became of it.

    Attributes:
        step: The step's number, as in the timeline.
        tokens: Of the drafts that were verified; parents come before their children.
        parents: The draft before each one, as an index; -1 is the last committed token.
        fates: Of each draft. ``accepted``; ``masked``: the grammar forbids it, or its path;
            ``rejected``: the target chose another token there, or on its path; ``late``: its mask
            was not there in time; ``cut``: accepted, behind the output's end.
        left_out: Further drafts, of more than :data:`MOST_TOLD_DRAFTS`, none of them accepted.
    """

    step: int
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    fates: tuple[Fate, ...] = ()
    left_out: int = 0

    def cut(self, kept: int) -> DraftTree:
        """The same where only ``kept`` of the step's tokens are part of the output."""
        if self.fates.count("accepted") <= kept:
            return self
        depths = np.cumsum([fate == "accepted" for fate in self.fates])
        each = zip(self.fates, depths, strict=True)
        fates = ("cut" if fate == "accepted" and depth > kept else fate for fate, depth in each)
        return replace(self, fates=tuple(fates))


@dataclass(frozen=True)
class PromptLogprobs(TokenLogprobs):
    """Log-probabilities at one token of a prompt; ``rank`` is 1 where no token is more probable."""

    rank: int


@dataclass(frozen=True)
class Verdict:
    """Whether a best-effort output is valid under its whole schema; ``reason``: where and how it
    breaks the schema, or why that could not be told."""

    valid: bool
    reason: str | None = None


@dataclass(frozen=True)
class ChoiceProbability:
    """How probable one text of a choice is, as the model itself has it: before temperature.

    ``logprob``: of the text's tokens after the prompt, and of the output's end after them.
    ``probability``: its share among all texts of the choice.
    """

    text: str
    logprob: float
    probability: float


class Delta(NamedTuple):
    """A piece of a streamed output; the last one has a ``finish_reason``.

    ``logprobs`` and ``origins``: one entry a token, if asked for. ``tier``: of the step that it
    comes from, with ``origins``. ``tree``: that step's drafts, if asked for. ``verdict``,
    ``choices`` and ``warnings``: of the whole output, in the last piece. ``prompt_logprobs``: of
    the prompt's next tokens, as in :class:`Output`; these pieces come before those of the output.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    origins: tuple[Origin, ...] = ()
    tier: Tier | None = None
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    choices: tuple[ChoiceProbability, ...] = ()
    warnings: tuple[str, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()


@dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        text: The output, without stop strings and special tokens.
        parsed: The text as the grammar's type (pydantic object, dict …); None without a grammar
            or where a length cut left it unfinished.
        token_ids: Output tokens, a stop token included.
        stop_match: The stop string or stop token id that ended it, if one did.
        error: What went wrong where ``finish_reason`` is ``error``.
        verdict: What validation found of a best-effort output that came to its end; None of any
            other.
        choices: Each text of a choice with ``probabilities``, in its order.
        warnings: What was asked for and nothing holds or heeds, such as formats that nobody knows.
        prompt_logprobs: One entry a prompt token if asked for; the first, before which nothing
            stands, is None. Of a request that ended before its output began, those that came.
        told: What ``parts`` of one's own tell, by their names.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats
    parsed: Any = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop_match: str | int | None = None
    error: str | None = None
    verdict: Verdict | None = None
    choices: tuple[ChoiceProbability, ...] = ()
    warnings: tuple[str, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: the text's beginning, how it ended, and the figures."""
        text = self.text if len(self.text) <= SHOWN_CHARS else self.text[: SHOWN_CHARS - 1] + "…"
        return f"<Output {text!r}: {', '.join(' '.join(told.split()) for told in self._told())}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the whole text, and beneath it the figures."""
        figures = " · ".join(map(escape, self._told()))
        style = "white-space: pre-wrap; margin: 0"
        return f'<pre style="{style}">{escape(self.text)}</pre><small>{figures}</small>'

    def _told(self) -> list[str]:
        """How it ended and what it took, in words."""
        stats = self.stats
        told = [self.finish_reason if self.error is None else f"error: {self.error}"]
        told.append(f"{len(self.token_ids)} token{'' if len(self.token_ids) == 1 else 's'}")
        if stats.verifies:
            told.append(f"accept length {stats.accept_length:.2f}")
        if stats.output_tokens > 1:
            told.append(f"{stats.tpot_ms:.1f} ms a token")
        if self.verdict is not None:
            told.append("valid" if self.verdict.valid else f"invalid: {self.verdict.reason}")
        return [*told, *(f"warning: {warning}" for warning in self.warnings)]
