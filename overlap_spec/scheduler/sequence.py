"""One running request, as the scheduler alone sees and changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from overlap_spec.errors import RequestFailed
from overlap_spec.scheduler.prefix import Node
from overlap_spec.scheduler.stops import TextBuffer, cut
from overlap_spec.stats import RequestStats, Standing, State
from overlap_spec.steps import Chunk, GrammarMap, Guide, History, RowResult
from overlap_spec.tiers import Tier
from overlap_spec.types import FinishReason, Request, TokenLogprobs

# Of an output under a grammar whose rests were not told, or not in time.
UNTOLD = "the grammar is too large to tell how long its texts are: the output may be cut"


@dataclass(eq=False)
class Sequence:
    """Output, lengths, cache and matcher of one request.

    ``committed_tokens``: tokens of prompt + output whose keys are cached, as far as results are
    known: the device may be one step ahead. ``prefill_tokens``: tokens known when it was admitted,
    the last of which is verified as a one-node tree; ``planned_tokens`` of them are computed or
    under way. ``row``: -1 while it waits; ``last_step``: the last that it is part of. ``path``:
    nodes of the prefix tree that it holds; ``start``: that from whose states its first chunk
    starts, until this is planned; ``branch_tokens``: how far others have begun alike. ``maps``:
    what drafts read of its grammar: its table of states, and the trie of the texts that its whole
    output can be; ``guide``: what drafters on the host read of it. ``extras``: the optional parts
    that it asks for, by name (`overlap_spec/worker/extras/base.py`). ``untrusted``: its pages may
    hold what is no number. ``told``: its caller knows of its end. ``warnings``: what is not kept of
    what was asked for.
    """

    request: Request
    buffer: TextBuffer
    matcher: Any = None
    row: int = -1
    committed_tokens: int = 0
    prefill_tokens: int = 0
    planned_tokens: int = 0
    last_step: int = 0
    pages: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    start: Node | None = None
    branch_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tier: Tier | None = None
    confidences: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    error: Exception | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    maps: tuple[GrammarMap | None, GrammarMap | None] = (None, None)
    guide: Guide | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    untrusted: bool = False
    told: bool = False
    warnings: tuple[str, ...] = ()
    last_token_ns: int = 0

    @property
    def total_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def most_tokens(self) -> int:
        """Keys that it has after its prefill, before it goes on."""
        part = self.passing
        return self.total_tokens + (0 if part is None else part.most_behind)

    @property
    def prefilling(self) -> bool:
        """Whether some of what was known on admission is still to be computed."""
        return self.planned_tokens < self.prefill_tokens

    @property
    def reusable_tokens(self) -> int:
        """Known tokens that need not be computed where they are cached: all but the last, from
        which the next one is chosen, as far as the optional parts have no use for them."""
        most = self.prefill_tokens - 1
        for extra in self.extras.values():
            most = extra.reusable(most)
        return most

    def asking(self, chunk: Chunk) -> Chunk:
        """A chunk that is planned, with what the optional parts ask of it."""
        if not self.extras:
            return chunk
        end = chunk.start + len(chunk.tokens)
        asks = {name: extra.ask(chunk.start, end) for name, extra in self.extras.items()}
        if chunk.behind:
            asks[self.passing.name] = self.passing.ask_pass()
        return replace(chunk, asks={n: ask for n, ask in asks.items() if ask is not None})

    @property
    def passing(self) -> Any:
        """The optional part, if any, that has passes behind the prompt still to come, before any
        output."""
        if self.extras and not self.output_ids:
            return next((extra for extra in self.extras.values() if extra.passes), None)
        return None

    @property
    def key_tokens(self) -> int:
        """Keys that are cached or under way, as far as the host knows."""
        committed, planned = self.committed_tokens, self.planned_tokens
        return committed if committed > planned else planned  # max() takes three times as long.

    def standing(self, now_ns: int) -> Standing:
        """Where it stands, at ``now_ns`` of ``perf_counter_ns``."""
        state: State = "decode" if self.row >= 0 else "waiting"
        if state == "decode" and self.prefilling:
            state = "prefill"
        stats = self.stats
        return Standing(
            id=self.request.id,
            state=state,
            age_ms=(now_ns - self.request.arrival_ns) / 1e6,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=stats.cached_tokens,
            output_tokens=len(self.output_ids),
            pages=len(self.pages),
            constrained=self.matcher is not None,
            accept_length=stats.accept_length if stats.verifies else None,
            draft_length=stats.drafted_tokens / stats.verifies if stats.verifies else None,
        )

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens at positions ``start .. end - 1``."""
        return self.history.tokens(start, end)

    @property
    def history(self) -> History:
        """Its known tokens, as a drafter on the host reads them."""
        return History(self.request.id, self.request.prompt_ids, self.output_ids, (), self.guide)

    def fail(self, error: Exception) -> None:
        """End this sequence, and only this one, with an error."""
        self.finish_reason, self.error = "error", error

    def take(self, row: RowResult, verified: bool, now_ns: int) -> tuple[int, ...]:
        """Enter what a step brought, at ``now_ns`` of ``perf_counter_ns``; the tokens that the stop
        rules keep of it."""
        if row.error is not None:
            self.fail(row.error)
            return ()
        output = self.output_ids
        kept, reason, match = cut(self.request, len(output), self.buffer, row.tokens)
        tokens = row.tokens[:kept]
        output += tokens
        if row.logprobs:
            self.logprobs += row.logprobs[:kept]
        for name, told in row.extras.items():
            self.extras[name].take(told, kept)
        self._record(kept, row, verified, now_ns)
        self.committed_tokens = self.total_tokens - 1
        if reason is not None:
            self.finish_reason, self.stop_match = reason, match
        elif len(row.tokens) <= row.accepted:
            self.fail(RequestFailed(_dead_end(self.request, len(output))))
        return tokens

    def _record(self, kept: int, row: RowResult, verified: bool, now_ns: int) -> None:
        """Enter ``kept`` new tokens of one step into the statistics."""
        stats = self.stats
        stats.output_tokens += kept
        if verified:
            stats.verifies += 1
            stats.verified_tokens += kept
            stats.drafted_tokens += row.drafted
            stats.limited_steps += row.limited
            drafts = row.accepted if row.accepted < kept else kept
            stats.accepted_drafts += drafts
            if row.grafts:
                stats.grafted_tokens += row.grafts
                stats.accepted_grafts += min(row.grafted, kept)
            histogram = stats.accept_histogram
            if drafts >= len(histogram):
                histogram += [0] * (drafts + 1 - len(histogram))
            histogram[drafts] += 1
        since = (now_ns - self.request.arrival_ns) / 1e6
        stats.end_to_end_ms = since
        if stats.output_tokens == kept:
            stats.ttft_ms = since
        else:
            stats.itl_ms.append((now_ns - self.last_token_ns) / 1e6)
        self.last_token_ns = now_ns


def _dead_end(request: Request, tokens: int) -> str:
    """Why a request has no next token behind so many."""
    sampling = request.sampling
    given = {
        "the grammar": request.grammar is not None,
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": request.banned,
        "logit_bias": sampling.logit_bias,
        "min_tokens": tokens < sampling.min_tokens,
    }
    names = [name for name, is_given in given.items() if is_given]
    allow = "together allow" if len(names) > 1 else "allows"
    return f"{' and '.join(names)} {allow} no token here: a dead end"
