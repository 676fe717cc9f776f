"""Length policies against recorded texts at recorded step times: no model runs, no clock is read.

A text is what a chain of :data:`DEPTH` steps accepted of it, verify by verify, in
``bench.adaptive``: a token is easy where it was accepted, and what ended a run is hard. From any
place a chain accepts up to the next hard token; a tree also gets over a share of those. A step
takes the recorded time of its tier, times noise that only the policy sees: what a policy comes to
is told without noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from random import Random
from typing import Any

from overlap_spec.engine.cost_model import fit_times
from overlap_spec.speculation.cost import CostModel
from overlap_spec.speculation.policy import (
    LengthPolicy,
    RequestOutcome,
    RequestView,
    StepOutcome,
    StepView,
)
from overlap_spec.tiers import Tier
from overlap_spec.worker.pass_times import PassTimes, Point

RECORDED = Path(__file__).parent / "data" / "replay-0.75b.json"
# Draft steps of the recorded chain.
DEPTH = 7
PROMPT_TOKENS = 100
# Share of a step that is neither draft nor verify.
BESIDE = 0.1


@dataclass(frozen=True)
class Phase:
    """Texts of one kind: of each request, whether a token can be drafted."""

    name: str
    constrained: bool
    texts: tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class Recorded:
    """What was recorded of a machine and a drafter.

    Attributes:
        step_ms: Of a single request, by draft steps and branches.
        saves: Share of the hard tokens that a tree accepts.
    """

    step_ms: Mapping[tuple[int, int], float]
    saves: float
    phases: tuple[Phase, ...]

    def drawn(self, seed: int) -> Recorded:
        """As many texts of each phase, drawn from its own."""
        rng = Random(seed)
        phases = [
            Phase(p.name, p.constrained, tuple(rng.choices(p.texts, k=len(p.texts))))
            for p in self.phases
        ]
        return Recorded(self.step_ms, self.saves, tuple(phases))

    def start(self, tiers: Sequence[Tier], seed: int, noise: float) -> CostModel:
        """What is measured of ``tiers`` before the first request."""
        rng, times = Random(seed), []
        for tier in tiers:
            draft_ms = 1.4 * tier.steps if tier.steps else 0.0
            verify_ms = (1 - BESIDE) * self.step_ms[tier.steps, tier.top_k] - draft_ms
            draft_ms, verify_ms = (t * exp(rng.gauss(0.0, noise)) for t in (draft_ms, verify_ms))
            times.append(PassTimes(Point(tier, 1), draft_ms, verify_ms))
        return fit_times(times, "start-up fit")


def read_recorded(path: Path = RECORDED) -> Recorded:
    """Read a recording."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    step_ms = {}
    for name, ms in data["step_ms"].items():
        steps, branches = name.split()
        step_ms[int(steps), int(branches)] = float(ms)
    phases = [
        Phase(p["name"], p["constrained"], tuple(_text(runs) for runs in p["runs"]))
        for p in data["phases"]
    ]
    return Recorded(step_ms, data["saves"], tuple(phases))


def _text(runs: Sequence[int]) -> tuple[bool, ...]:
    tokens: list[bool] = []
    for accepted in runs:
        # Of the token behind a run that was accepted to its end nothing is known.
        tokens += [True] * accepted + [accepted == DEPTH]
    return tuple(tokens)


def replay(
    policy: LengthPolicy,
    recorded: Recorded,
    seed: int,
    noise: float = 0.05,
    jumps: float = 0.01,
) -> dict[str, float]:
    """Milliseconds of each phase, as the recording has them.

    Args:
        noise: Standard deviation of the logarithm of a step's time, as the policy sees it.
        jumps: Chance that the machine's load changes at a step; its logarithm's deviation is 0.12.
    """
    rng, load, number, took = Random(seed), 0.0, 0, {}
    for phase in recorded.phases:
        took[phase.name] = 0.0
        for text in phase.texts:
            at, number = 0, number + 1
            while at < len(text):
                context = PROMPT_TOKENS + at
                view = StepView((RequestView(number, context, phase.constrained),))
                budget = policy.choose(view)
                tier, accepted = budget.tier, 0
                while accepted < tier.steps and at + accepted < len(text):
                    saved = tier.top_k > 1 and rng.random() < recorded.saves
                    if not text[at + accepted] and not saved:
                        break
                    accepted += 1
                step_ms = recorded.step_ms[tier.steps, tier.top_k]
                took[phase.name] += step_ms
                load = rng.gauss(0.0, 0.12) if rng.random() < jumps else load
                seen_ms = step_ms * exp(load + rng.gauss(0.0, noise))
                run = RequestOutcome(number, accepted, tier.nodes - 1, phase.constrained)
                policy.observe(StepOutcome(view, budget, [run], seen_ms, tier.nodes))
                at += accepted + 1
    return took
