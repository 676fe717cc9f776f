"""What is measured on one request, and where it stands while it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

State = Literal["compiling", "waiting", "prefill", "decode"]


@dataclass
class RequestStats:
    """Measured on one request. Times in milliseconds, rates over what was really drafted.

    ``grafted_tokens``: drafts that the grammar forced. ``illegal_drafts``: drafts that it forbade,
    or whose path it did.

    ``grammar_ms``: its matcher's time. ``exposed_ms``: its share of the time that compute waited
    for masks, by grammar time. ``idle_ms``: its share of all time that compute stood idle in its
    steps, in equal parts. ``lossy``: whether thresholds of acceptance changed its distribution.
    ``relaxed_steps``: its steps under relaxed acceptance, which does so too. ``narrowed_tokens``:
    tokens that were chosen from fewer than the grammar allows, so that the output comes to its end
    within the room it has.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    verifies: int = 0
    verified_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    grafted_tokens: int = 0
    accepted_grafts: int = 0
    illegal_drafts: int = 0
    accept_histogram: list[int] = field(default_factory=list)
    ttft_ms: float = 0.0
    end_to_end_ms: float = 0.0
    itl_ms: list[float] = field(default_factory=list)
    grammar_ms: float = 0.0
    exposed_ms: float = 0.0
    idle_ms: float = 0.0
    limited_steps: int = 0
    grammar_compile_ms: float = 0.0
    lossy: bool = False
    relaxed_steps: int = 0
    narrowed_tokens: int = 0

    @property
    def accept_length(self) -> float:
        """Tokens a verify emitted, bonus included; the prefill's token is not counted."""
        return self.verified_tokens / self.verifies if self.verifies else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.accepted_drafts / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def graft_accept_rate(self) -> float:
        """Share of grafted tokens that were accepted."""
        return self.accepted_grafts / self.grafted_tokens if self.grafted_tokens else 0.0

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first."""
        rest = self.output_tokens - 1
        return (self.end_to_end_ms - self.ttft_ms) / rest if rest > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        rates = ("accept_length", "accept_rate", "graft_accept_rate", "tpot_ms")
        return data | {name: getattr(self, name) for name in rates}


@dataclass(frozen=True)
class Standing:
    """Where a request under way stands: figures, and nothing of what it says.

    ``age_ms``: since it came. ``pages``: of the KV cache. ``accept_length``: tokens a verify so
    far, the bonus included; ``draft_length``: drafts that a verify checked; both None before the
    first.
    """

    id: int
    state: State
    age_ms: float
    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    pages: int = 0
    constrained: bool = True
    accept_length: float | None = None
    draft_length: float | None = None
