"""The nouns that the rooms hand to each other. Frozen values; no torch.

A request becomes a row of the worker's tables; a step is planned over rows, drafts a tree for each,
verifies all trees at once, and returns what each row accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_spec.errors import InvalidRequest, unknown
from overlap_spec.stats import RequestStats

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
# Tokens of a run that a grammar forces, as far as it is drafted; the first is what was chosen last.
RUN_TOKENS = 16
# Numbers that the lane tells of a node: the run behind it, and the state of its grammar's table.
TOLD = RUN_TOKENS + 1
# States by bytes (`grammar/drafting/byte_states.py`): a state is the number at which its moves
# begin. Steps from it: by each of 256 bytes; by none; by what is no text; by a stop token; by the
# rest of a long token. States of every table: nothing is known; nothing can come; all is over. Then
# its own.
STATE_WIDTH, COMMON_STATES = 260, 3
BY_NONE, BY_OTHER, BY_STOP, BY_REST = 256, 257, 258, 259
LOST, DEAD, DONE, FIRST = (STATE_WIDTH * state for state in range(COMMON_STATES + 1))
# Steps of a token, and tokens that are listed of a state in which few can come.
TOKEN_STEPS, FEW_TOKENS = 16, 8
# Nodes of a trie that is drafted from, the prompt's end included.
TRIE_NODES = 512
# Drafts of one request that are told of a step.
MOST_TOLD_DRAFTS = 128
# Sequences of several tokens that a request's output may not have, and tokens of one.
MOST_BANNED, BANNED_TOKENS = 256, 16
Origin = Literal["grafted", "drafted", "bonus", "forced"]
Fate = Literal["accepted", "masked", "rejected", "late", "cut"]
Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]


class GrammarTable(NamedTuple):
    """A grammar's states by bytes: it allows all that the grammar does, and little more.

    Of ``S`` states, the common ones first and the start behind them. ``moves`` int32
    ``(S, STATE_WIDTH)``: the state after each step. ``few`` int32 ``(S, FEW_TOKENS + 1)``: tokens
    with which a text can go on, -1 behind their end, and last 1 where no other can. ``forced``
    int16 ``(S,)``: the only byte that can come, -1 where there is another, or none, or an end.
    """

    moves: NDArray[np.int32]
    few: NDArray[np.int32]
    forced: NDArray[np.int16]


# Fields of sampling that are true or false.
SWITCHES = (
    "ignore_eos",
    "include_stop_str_in_output",
    "speculate",
    "origins",
    "draft_trees",
)
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
        tpot_slo_ms: Target of the time per output token, in milliseconds: adaspec and auto plan no
            step that takes longer, where they can; None is the engine's.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_regex: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = field(default=None, metadata=OPTIONAL)
    speculate: bool = True
    origins: bool = field(default=False, metadata=OPTIONAL)
    draft_trees: bool = field(default=False, metadata=OPTIONAL)
    tpot_slo_ms: float | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest that names the first field out of its range."""
        ranges: dict[str, tuple[float, float]] = {
            "temperature": (0.0, float("inf")),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.0, float("inf")),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_number(value) or not low <= value <= high or value == float("inf"):
                raise InvalidRequest(f"{name} must be a number in [{low}, {high}]: {value!r}", name)
        if self.top_p == 0 or self.repetition_penalty == 0:
            name = "top_p" if self.top_p == 0 else "repetition_penalty"
            raise InvalidRequest(f"{name} must be over 0", name)
        target = self.tpot_slo_ms
        if target is not None and not (_is_number(target) and 0 < target < float("inf")):
            raise InvalidRequest(f"tpot_slo_ms must be a number over 0: {target!r}", "tpot_slo_ms")
        minima = {"min_tokens": 0, "max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0}
        for name, least in minima.items():
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value >= least):
                raise InvalidRequest(f"{name} must be an integer >= {least}: {value!r}", name)
        if self.top_k is not None and not (_is_int(self.top_k) and self.top_k >= -1):
            raise InvalidRequest(f"top_k must be an integer >= -1: {self.top_k!r}", "top_k")
        if self.top_k == 0:
            object.__setattr__(self, "top_k", -1)
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed < 2**63):
            raise InvalidRequest(f"seed must be a 64-bit integer: {self.seed!r}", "seed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens is over max_tokens", "min_tokens")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false: {getattr(self, name)!r}", name)
        self._check_collections()

    def _check_collections(self) -> None:
        for name in ("stop", "stop_regex", "bad_words"):
            given = getattr(self, name)
            texts = (given,) if isinstance(given, str) else tuple(given)
            if not all(isinstance(text, str) and text for text in texts):
                raise InvalidRequest(f"{name} must be non-empty strings: {given!r}", name)
            object.__setattr__(self, name, texts)
        for name in ("stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            if given is None:
                continue
            ids = tuple(given)
            if not all(_is_int(token) and token >= 0 for token in ids):
                raise InvalidRequest(f"{name} must be token ids", name)
            object.__setattr__(self, name, ids)
        if self.allowed_token_ids == ():
            raise InvalidRequest(
                "allowed_token_ids allows no token: name at least one", "allowed_token_ids"
            )
        for token, value in self.logit_bias.items():
            if not (_is_int(token) and token >= 0) or not _is_number(value):
                raise InvalidRequest(
                    f"logit_bias maps token ids to numbers: {token!r}: {value!r}", "logit_bias"
                )

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the optional parts that are asked for (`overlap_spec/worker/extras`)."""
        return tuple([name for name, none in EXTRAS if getattr(self, name) != none])

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
    shared among requests of one ``cache_salt`` alone. ``banned``: sequences of tokens that the
    output may not have; ``warnings``: what the caller asked for and nothing heeds.
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
    banned: tuple[tuple[int, ...], ...] = ()
    warnings: tuple[str, ...] = ()
    holder: str = ""


@dataclass(frozen=True, slots=True)
class History:
    """A request's known tokens: its prompt and its output so far, neither copied.

    The output grows while the request runs. ``forced``: the likely tokens of what the grammar
    forces behind the known ones.
    """

    request_id: int
    prompt: Sequence[int]
    output: Sequence[int]
    forced: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> list[int]:
        """Those at positions ``start .. end - 1``."""
        first, last = max(start - len(self.prompt), 0), max(end - len(self.prompt), 0)
        return [*self.prompt[start:end], *self.output[first:last]]


@dataclass(frozen=True)
class Tier:
    """How much is drafted a step: ``steps`` deep, ``top_k`` wide, ``nodes`` verified (root too).

    Tier(0, 1, 1) is speculation off. ``parents``: of a tree of a fixed shape each node's parent,
    from node 1 on; None: the drafter chooses. ``base``: of a tier with room for what the grammar
    tells, what the drafter is asked for; None: this tier itself.
    """

    steps: int
    top_k: int
    nodes: int
    parents: tuple[int, ...] | None = None
    base: Tier | None = None

    @property
    def is_chain(self) -> bool:
        """Whether its trees are the drafter's chains, and nothing else."""
        return self.top_k == 1 and self.parents is None and self.base is None

    @property
    def own(self) -> Tier:
        """What the drafter is asked for."""
        return self.base or self

    @property
    def window_tokens(self) -> int:
        """Slots behind the committed length that a step may write."""
        return max(self.own.steps * self.own.top_k, self.nodes)


@dataclass(frozen=True, eq=False)
class DraftStop:
    """When a step has drafted enough: AdaSpec's correction (SoCC 2025, Algorithm 1).

    The drafts end at the length from which on the step's goodput, its expected tokens over its
    time, does not grow. What is drafted counts with what the drafter says of it, what would come
    next with what is expected of the request. It is asked by the device, between two draft steps.

    Attributes:
        costs_ms: By draft steps, from 0 on, at most the tier's: what a step takes that drafts and
            verifies as many. 0 is a length at which the drafts do not end, infinity one at which
            the step would break a target.
        expected: float32 ``(trees,)``, in the order of the plan's decode rows: what a request's
            next draft will be accepted with, given that the one before it was.
        curves: float32 ``(trees, B)``: how often a draft is accepted to which the drafter gives
            the probability (n + 0.5) / B; straight in between. Zeros of who takes no drafts.
    """

    costs_ms: tuple[float, ...]
    expected: Floats
    curves: Floats


@dataclass(frozen=True)
class Budget:
    """How much a step drafts and verifies.

    Attributes:
        tier: What is drafted; with a ``stop``, at most.
        nodes: Nodes of the whole batch that are verified, roots included: the best by score. None
            verifies every node.
        least, most: Of each request, in the order of the plan's decode rows: its ``least`` best
            nodes are kept before the others compete, and none beyond its ``most`` best. Empty
            where ``nodes`` is None.
        stop: Ends a chain before its tier does; None: nothing does.
    """

    tier: Tier
    nodes: int | None = None
    least: tuple[int, ...] = ()
    most: tuple[int, ...] = ()
    stop: DraftStop | None = None

    def stopped(self, tier: Tier) -> Budget:
        """The same of a step whose drafts were stopped at a shorter ``tier``."""
        if self.nodes is None:
            return Budget(tier)
        most = tuple(min(nodes, tier.nodes) for nodes in self.most)
        return Budget(tier, min(self.nodes, sum(most)), self.least, most)


@dataclass(frozen=True)
class TokenTrie:
    """Texts as a tree of tokens behind a prompt, for one pass of the target.

    ``tokens``, ``parents`` (an earlier node, or -1: the prompt's end), ``depths`` (from 1 on):
    int64 ``(n,)``; what is below a node comes right after it. ``texts``, ``ends``: int64 ``(m,)``:
    numbers of texts, and each one's last node.
    """

    tokens: Int64s
    parents: Int64s
    depths: Int64s
    texts: Int64s
    ends: Int64s

    @cached_property
    def sizes(self) -> Int64s:
        """int64 ``(n,)``: nodes below each one."""
        sizes = np.zeros(len(self.tokens), np.int64)
        for node in range(len(self.tokens) - 1, -1, -1):
            if self.parents[node] >= 0:
                sizes[self.parents[node]] += sizes[node] + 1
        return sizes

    @cached_property
    def children(self) -> Mapping[tuple[int, int], int]:
        """(node, or -1 for the prompt's end, and a token) → the node of that token after it."""
        pairs = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {pair: node for node, pair in enumerate(pairs)}

    def follow(self, node: int | None, tokens: Sequence[int]) -> int | None:
        """The node that ``tokens`` lead to from ``node``; None where none does."""
        for token in tokens:
            if node is None:
                return None
            node = self.children.get((node, token))
        return node

    def path(self, node: int) -> list[int]:
        """The nodes down to ``node``, which is the last."""
        found = []
        while node >= 0:
            found.append(node)
            node = int(self.parents[node])
        return found[::-1]


@dataclass(eq=False)
class WeighedChoices:
    """The texts of a choice that are weighed behind one prompt, each cut into tokens in one way.

    All requests for the same share it: one of them has the tries weighed, one or few a step, and
    the others wait for that.

    ``tries``: each text is in one of them. ``stop_ids``: the tokens of which one ends the output.
    ``faithful``: whether the output is chosen by the texts' weights. ``logprobs``: float64
    ``(m,)``, of each text; ``tokens``: with which each would be the output, the likeliest stop
    token behind them. ``planned``, ``known``: tries that are in a step or were, and those of whose
    texts the two are known. ``leader``: the request that has them weighed.
    """

    texts: tuple[str, ...]
    tries: tuple[TokenTrie, ...]
    stop_ids: tuple[int, ...]
    faithful: bool

    def __post_init__(self) -> None:
        """Nothing is known."""
        self.leader: int | None = None
        self.forget()

    def __reduce__(self) -> Any:
        """Other ranks get what a pass needs; its tries come with the chunk."""
        return WeighedChoices, ((), (), self.stop_ids, self.faithful)

    def forget(self) -> None:
        """Nothing is known any more."""
        self.logprobs = np.zeros(len(self.texts))
        self.tokens: list[tuple[int, ...]] = [()] * len(self.texts)
        self.planned = self.known = 0

    @property
    def is_known(self) -> bool:
        """Whether all texts are weighed."""
        return self.known == len(self.tries)

    @property
    def widest(self) -> int:
        """Nodes of the largest trie."""
        return max(len(trie.tokens) for trie in self.tries)


@dataclass(frozen=True)
class Chunk:
    """A run of one request's tokens to prefill, at positions ``start ..``; starts with a page.

    ``final``: the run ends the known text, and its last token is verified as a one-node tree.
    ``page_before``: the page that ends at ``start``, 0 at the start of the text. ``choices``: what
    is weighed behind the known text, at whose end the chunk is then; ``trie``: what of it in this
    step. ``asks``: what optional parts ask of it, by name.
    """

    row: int
    start: int
    tokens: Int64s
    final: bool
    page_before: int = 0
    choices: WeighedChoices | None = None
    trie: TokenTrie | None = None
    asks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def comes_again(self) -> bool:
        """Whether a later step computes the same tokens again, to weigh more behind them."""
        return self.choices is not None and not self.final


@dataclass(frozen=True)
class StepPlan:
    """One step: trees for ``decode_rows`` and prefill for ``chunks``.

    Attributes:
        index: Number of the step.
        budget: What the step's trees may cost.
        request_ids: Request of each decode row, then of each chunk.
        grammar: Whether each of these has a grammar.
        max_keys: No key of a decode row lies at or beyond this position.
        pages: New pages of rows: (row, index of the first, page numbers).
    """

    index: int
    budget: Budget
    decode_rows: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    request_ids: tuple[int, ...]
    grammar: tuple[bool, ...]
    max_keys: int
    pages: tuple[tuple[int, int, tuple[int, ...]], ...]

    @cached_property
    def tier(self) -> Tier:
        """What the step's trees draft."""
        return self.budget.tier

    @cached_property
    def final_chunks(self) -> tuple[Chunk, ...]:
        """The chunks that end their known text: one-node trees, verified behind the others."""
        return tuple(chunk for chunk in self.chunks if chunk.final)

    @cached_property
    def verified(self) -> tuple[tuple[int, int, bool], ...]:
        """(request id, row, has a grammar) of what the step verifies, in the order of its trees."""
        rows = (*self.decode_rows, *[chunk.row for chunk in self.chunks])
        everyone = tuple(zip(self.request_ids, rows, self.grammar, strict=True))
        trees = len(self.decode_rows)
        behind = zip(everyone[trees:], self.chunks, strict=True)
        return (*everyone[:trees], *[member for member, chunk in behind if chunk.final])

    @cached_property
    def verified_ids(self) -> tuple[int, ...]:
        """The request ids of :attr:`verified`."""
        return tuple([request_id for request_id, _, _ in self.verified])


@dataclass(frozen=True)
class HostTrees:
    """The drafted trees of a step on the host, ragged: request r owns ``offsets[r]:offsets[r+1]``.

    All arrays int64; links and parents count from the request's own node 0, -1 is none. Node 0 is
    the last committed token.
    """

    tokens: Int64s
    first_child: Int64s
    next_sibling: Int64s
    offsets: Int64s


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output token: its own, and the most probable ones, descending.

    Tokens that the mask forbids are not listed.
    """

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
        fates: tuple[Fate, ...] = tuple(
            "cut" if fate == "accepted" and depth > kept else fate
            for fate, depth in zip(self.fates, depths, strict=True)
        )
        return replace(self, fates=fates)


@dataclass(frozen=True)
class PromptLogprobs(TokenLogprobs):
    """Log-probabilities at one token of a prompt; ``rank`` is 1 where no token is more probable."""

    rank: int


class RowResult(NamedTuple):
    """What one request got from a step, before the stop rules cut it.

    Attributes:
        tokens: Accepted drafts, then the bonus; the bonus is absent where its mask row was empty.
        drafted: Drafted tokens that were verified: the tree's living nodes but its root; 0 in
            prefill.
        accepted: How many of ``tokens`` are drafts.
        confidences: The drafter's probability of each accepted draft after the one before it;
            then, where the last one had children that were all refused, of the best of these.
        logprobs: One entry a token, if asked for.
        error: Why the request must end, if it must.
        limited: The masks were late: only the root's row was used.
        grafts: How many of the verified drafts the grammar had forced.
        grafted: How many of these are among the accepted ones, which they begin.
        choice_logprobs: Log-probability of each text of the chunk's choices.
        extras: What the optional parts that are asked for tell of the tokens, by name.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: Exception | None = None
    limited: bool = False
    confidences: tuple[float, ...] = ()
    grafts: int = 0
    grafted: int = 0
    choice_logprobs: tuple[float, ...] = ()
    extras: Mapping[str, Any] = NO_EXTRAS


@dataclass(frozen=True)
class StepResult:
    """Results in the order of ``plan.verified``.

    ``exposed_ms``: how long compute stood idle for the masks. ``idle_ms``: how long it stood idle
    for whatever reason since the accept of the step before; 0 where no step came right before.
    ``verified_rows``: rows that the target computed for the trees. ``told``: by request, what its
    chunk told the optional parts, by name.
    """

    plan: StepPlan
    rows: tuple[RowResult, ...]
    exposed_ms: float = 0.0
    idle_ms: float = 0.0
    verified_rows: int = 0
    told: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Whether a best-effort output is valid under its whole schema.

    ``reason``: where and how it breaks the schema, or why that could not be told.
    """

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
