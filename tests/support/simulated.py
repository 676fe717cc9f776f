"""Length policies against machines and drafters that are formulas: no model runs.

A machine is a :class:`overlap_spec.speculation.cost.CostModel`, a drafter the chance that a node's
best child is accepted. What a policy is told is what an engine would tell it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from random import Random

import numpy as np

from bench.six_machines import FORMULAS
from bench.traces import rates_of
from overlap_spec.speculation.cost import (
    CostModel,
    DraftTime,
    VerifyTime,
    fit,
    shape_of,
)
from overlap_spec.speculation.memory import expected
from overlap_spec.speculation.policy import (
    LengthPolicy,
    RequestOutcome,
    RequestView,
    StepOutcome,
    StepView,
)
from overlap_spec.tiers import Budget, Tier

MACHINES = FORMULAS
NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
QUICK_BATCHES, QUICK_STEPS = (1, 2, 3, 4, 8, 16), 5


@dataclass
class Ran:
    """What a run came to.

    Attributes:
        tokens, ms: In expectation: of the tiers that were drafted, without the noise of coins.
        tiers: Of each verify.
        phase_ms: Milliseconds a token of each phase.
    """

    tokens: float
    ms: float
    tiers: list[Tier]
    phase_ms: list[float]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.ms * 1e3

    def switches(self, start: int = 0) -> int:
        """Changes of the tier from verify ``start`` on."""
        chosen = self.tiers[start:]
        return sum(a != b for a, b in pairwise(chosen))


@cache
def tokens_of(acceptance: float, tier: Tier) -> float:
    """Expected tokens of a verify, bonus included."""
    return 1 + expected(rates_of(acceptance, tier))


def run(
    policy: LengthPolicy,
    machine: CostModel,
    phases: Sequence[tuple[float, int, int]],
    seed: int,
    noise: float = 0.05,
    load: Callable[[int], float] = lambda _: 1.0,
    context: int = 512,
) -> Ran:
    """Let a policy plan whole verifies.

    Args:
        phases: Acceptance, batch and number of verifies of each.
        noise: Standard deviation of the logarithm of a step's time.
        load: Factor of the machine's time by verify.
    """
    coins, ran = Random(seed), Ran(0.0, 0.0, [], [])
    for acceptance, batch, verifies in phases:
        view = StepView(tuple(RequestView(n, context) for n in range(batch)))
        tokens, ms = ran.tokens, ran.ms
        for _ in range(verifies):
            budget = policy.choose(view)
            tier = budget.tier
            step_ms = machine.step_ms(shape_of(budget, batch, view.context_tokens))
            ran.tokens += batch * tokens_of(acceptance, tier)
            ran.ms += step_ms
            step_ms *= load(len(ran.tiers)) * coins.lognormvariate(0.0, noise)
            if coins.random() < 0.01:
                step_ms *= 4
            ran.tiers.append(tier)
            shares = tuple(accumulate(rates_of(acceptance, tier), mul))
            requests = []
            for n in range(batch):
                coin = coins.random()
                length = sum(coin < share for share in shares)
                requests.append(RequestOutcome(n, length, tier.nodes - 1))
            policy.observe(StepOutcome(view, budget, requests, step_ms, batch * tier.nodes))
        ran.phase_ms.append((ran.ms - ms) / (ran.tokens - tokens))
    return ran


def best_static(
    tiers: Sequence[Tier], machine: CostModel, acceptance: float, batch: int, context: int = 512
) -> tuple[Tier, float]:
    """The tier of most tokens per second, and how many that are."""

    def rate(tier: Tier) -> float:
        step_ms = machine.step_ms(shape_of(Budget(tier), batch, batch * context))
        return batch * tokens_of(acceptance, tier) / step_ms * 1e3

    best = max(tiers, key=rate)
    return best, rate(best)


def profiled(machine: CostModel, seed: int, noise: float = 0.02) -> CostModel:
    """What a profile would find of a machine."""
    rng = np.random.default_rng(seed)

    def took(ms: float) -> float:
        return float(ms * np.exp(rng.normal(0.0, noise)))

    verifies = [
        VerifyTime(n, c, took(machine.verify_ms(n, c))) for n in NODES for c in (0, 8192, 65536)
    ]
    drafts = [
        DraftTime(b, c, s, k, took(machine.draft_ms(b, s, k, c)))
        for b in (1, 8, 64, 128) for s in (1, 3, 5) for k in (1, 4) for c in (0, 65536)
    ]  # fmt: skip
    return fit(verifies, drafts, "profile")


def quick(machine: CostModel, seed: int, noise: float = 0.05) -> CostModel:
    """What the fit at start-up would find: a chain at a few batches."""
    rng = np.random.default_rng(seed)

    def took(ms: float) -> float:
        return float(ms * np.exp(rng.normal(0.0, noise)))

    nodes = [b * (QUICK_STEPS + 1) for b in QUICK_BATCHES]
    verifies = [VerifyTime(n, 0, took(machine.verify_ms(n, 0))) for n in nodes]
    drafts = [
        DraftTime(b, 0, QUICK_STEPS, 1, took(machine.draft_ms(b, QUICK_STEPS, 1, 0)))
        for b in QUICK_BATCHES
    ]
    return fit(verifies, drafts, "start-up fit")
