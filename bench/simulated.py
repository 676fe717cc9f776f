"""Length policies against machines and drafters that are formulas: no model runs.

A machine is a :class:`overlap_spec.speculation.cost.CostModel`, a drafter the chance that a node's
best child is accepted. What a policy is told is what an engine would tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from overlap_spec.speculation.acceptance import expected
from overlap_spec.speculation.cost import (
    CostModel,
    DraftTime,
    VerifyTime,
    fit,
    shape_of,
)
from overlap_spec.speculation.policy import (
    LengthPolicy,
    RequestOutcome,
    RequestView,
    StepOutcome,
    StepView,
)
from overlap_spec.tiers import Budget, DraftStop, Tier
from overlap_spec.worker.draft_stop import kept, stops

# In milliseconds: a 0.75B model on two CPU cores; an 8B model in bfloat16 with an EAGLE-3 head on
# an A100 and on an H100, which leave the memory-bound regime near 150 and 300 rows.
MACHINES: dict[str, CostModel] = {
    "cpu": CostModel(
        verify=52.0, verify_node=0.9, verify_context=2e-3,
        draft=3.0, draft_branch=0.35, draft_context=2e-4,
        knee_nodes=16, knee_node=2.6,
    ),
    "a100": CostModel(
        verify=10.5, verify_node=0.006, verify_context=9e-5,
        draft=0.55, draft_branch=0.0006, draft_context=3e-6,
        knee_nodes=150, knee_node=0.055,
    ),
    "h100": CostModel(
        verify=6.0, verify_node=0.003, verify_context=5e-5,
        draft=0.4, draft_branch=0.0003, draft_context=2e-6,
        knee_nodes=300, knee_node=0.022,
    ),
}  # fmt: skip
NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
QUICK_BATCHES, QUICK_STEPS = (1, 2, 3, 4, 8, 16), 5
# Independent children that a tree's four are worth, by depth: the node budget runs out.
CHILDREN = (2.1, 1.9, 1.7, 1.4, 1.2, 1.1, 1.0)


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


def rates_of(acceptance: float, tier: Tier) -> tuple[float, ...]:
    """Conditional acceptance by depth of a tier."""
    if tier.top_k == 1:
        return (acceptance,) * tier.steps
    return tuple(1 - (1 - acceptance) ** CHILDREN[d] for d in range(tier.steps))


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


def stopped_steps(stop: DraftStop, confidences: NDArray[np.float64]) -> int:
    """How many drafts a step makes until its stop ends them, as the device asks it.

    Args:
        confidences: ``(trees, n)``: what the drafter would say of each further draft.
    """
    scores = torch.from_numpy(confidences).float().log()
    expected, curves = torch.from_numpy(stop.expected), torch.from_numpy(stop.curves)
    costs, most = list(stop.costs_ms), min(len(stop.costs_ms) - 1, scores.shape[1])
    asked = (n for n in range(1, most) if costs[n] > 0)
    return next((n for n in asked if stops(scores[:, :n], expected, curves, costs)), most)


def verified_lengths(stop: DraftStop, confidences: NDArray[np.float64]) -> list[int]:
    """How many drafts of each chain ``(trees, steps)`` the stop leaves to be verified."""
    trees, steps = confidences.shape
    scores = torch.from_numpy(confidences).float().log()
    found = kept(pad(scores.cumsum(1), (1, 0)), stop)
    if found is None:
        return [steps] * trees
    count, worth = found
    best = worth[:, 1:].flatten().sort(descending=True, stable=True).indices[: count - trees]
    lengths: list[int] = np.bincount(best.numpy() // steps, minlength=trees).tolist()
    return lengths


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
