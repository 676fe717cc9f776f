"""The policy that nobody tunes: each tier's expected tokens over its measured time.

    rate(tier) = (batch + Σ E[accepted of a request | tier]) / T(tier, batch, contexts)

E comes from observed survival (``memory``), T from the cost model that learns from every step
(``online_cost``). Both are known to some precision, and so is each rate. What is drafted would be
best in a world drawn from those that are likely (Thompson, 1933): a tier is tried as often as it
may be the best, so what is clearly worse is left alone, and what was not tried for long, and is
known less and less, is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np

from overlap_spec.speculation import cost as costs
from overlap_spec.speculation.cost import CostModel, Vector
from overlap_spec.speculation.memory import Memory
from overlap_spec.speculation.online_cost import OnlineCost
from overlap_spec.speculation.policy import (
    LengthPolicy,
    StepOutcome,
    StepView,
    slot_snapshot,
    snapshot_of,
)
from overlap_spec.tiers import Budget, Tier

# Gain that a move must promise: below it lies what no clock tells.
MARGIN = 0.03
# Share of their spread by which worlds are drawn. With all of it half of the time would go to tiers
# that are worse by a spread, in the hope of many more steps than one kind of text lasts.
HOPE = 0.4
# Verifies between two decisions at most; how many is drawn, lest a kind of text that comes in every
# second one decides for the other.
STRIDE = 3
# Share of all time that recordings for a tier may take.
RECORD_SHARE = 0.1


@dataclass
class Slot:
    """What is active at a range of batch sizes, and why; ``left``: verifies until it is decided
    anew; ``behind``: share of its time that it loses to what seems best."""

    tier: Tier
    reason: str
    left: int = STRIDE
    behind: float = 0.0
    count: int = 0
    switches: int = 0


class AutoPolicy(LengthPolicy):
    """Depth and width by survival and measured cost; off where drafts do not pay.

    - Slots: one for each range of batch sizes, a power of two. Survival is shared by all.
    - Start: with the launch tier, and at another range with the tier of the nearest one, unless
      another one should gain even then. Off waits for a draft to be refused: beside other work what
      was measured before the first request may be far from so.
    - Recordings: a tier whose passes are not recorded yet is taken when they take no more than
      :data:`RECORD_SHARE` of all time, or than its gain would have brought since the start.
    - Target: among the tiers whose step keeps the strictest TPOT target, if there are any.

    Args:
        tiers: Those to choose from; one of them is off, and one ``launch``.
        cost: What is known of their time; None: nothing yet.
    """

    weighs_cost = True

    def __init__(self, tiers: Sequence[Tier], launch: Tier, cost: OnlineCost | None = None) -> None:
        self.tiers = tuple(sorted(tiers, key=lambda t: (t.steps, t.top_k)))
        self._launch = launch
        self.cost = cost or OnlineCost(costs.ASSUMED, costs.ASSUMED_SPREAD)
        self._budgets = {tier: Budget(tier) for tier in tiers}
        self._memories: dict[bool, Memory] = {}
        self._slots: dict[int, Slot] = {}
        self._wait_ms: Callable[[Tier], float] = lambda _: 0.0
        self._rng, self._last = np.random.default_rng(0), StepView(())
        self._all_ms, self._probes_ms, self.count = 0.0, 0.0, 0

    def tell_waits(self, wait_ms: Callable[[Tier], float]) -> None:
        self._wait_ms = wait_ms

    def calibrate(self, model: CostModel, spread: float) -> None:
        self.cost = OnlineCost(model, spread)

    def choose(self, view: StepView) -> Budget:
        if not view.batch:
            return self._budgets[self.tiers[0]]
        tier, target = self._slot(view).tier, view.tpot_slo_ms
        if target is not None:
            log_tokens, log_ms, _ = self._weigh(view)
            late = log_ms > log(target)
            if late[self.tiers.index(tier)] and not late.all():
                tier = self.tiers[int(np.where(late, -np.inf, log_tokens - log_ms).argmax())]
        return self._budgets[tier]

    def observe(self, outcome: StepOutcome) -> None:
        view, budget, tier = outcome.view, outcome.budget, outcome.budget.tier
        if not view.batch or tier not in self._budgets:
            return
        slot = self._slot(view)
        if outcome.step_ms is not None:
            self.cost.observe(view.shape(budget), budget, outcome.step_ms)
            self._all_ms += outcome.step_ms
            self._probes_ms += slot.behind * outcome.step_ms * (tier == slot.tier)
        if not outcome.requests:
            return
        self._last = view
        self.count += 1
        slot.count += 1
        slot.left -= tier == slot.tier
        for kind in (False, True):
            runs = [r.accepted for r in outcome.requests if r.constrained == kind]
            if runs and self._memory(kind).add(tier, runs):
                for each in self._slots.values():
                    each.left = 0
        if slot.left <= 0 and tier == slot.tier:
            self._decide(view, slot)

    def snapshot(self) -> dict[str, Any]:
        slots, steps = [], [tier.steps for tier in self.tiers]
        active: tuple[Any, ...] = (self.tiers[0], "nothing has run yet")
        if self._last.batch:
            here = self._slot(self._last)
            log_tokens, log_ms, _ = self._weigh(self._last)
            lengths = dict(zip(self.tiers, np.exp(log_tokens).tolist(), strict=True))
            step_ms = exp(log_ms[self.tiers.index(here.tier)])
            active = here.tier, here.reason, lengths[here.tier], step_ms
            for bound, s in sorted(self._slots.items()):
                ema = lengths[s.tier] - 1
                slots.append(slot_snapshot(bound, s.tier, steps, ema, s.count, s.switches))
        return snapshot_of("auto", slots, *active) | {
            "cost": self.cost.model().to_dict(),
            "probe_share": self._probes_ms / self._all_ms if self._all_ms else 0.0,
        }

    def _memory(self, constrained: bool) -> Memory:
        """What is known of text with a grammar, or without; each begins like the other."""
        if constrained not in self._memories:
            self._memories[constrained] = Memory(self.tiers, self._memories.get(not constrained))
        return self._memories[constrained]

    def _weigh(self, view: StepView) -> tuple[Vector, Vector, Vector]:
        """Logarithms of each tier's tokens a request and of its milliseconds, ``(tiers,)`` each,
        and the covariance of their difference.

        Tiers of one width share the rates of their depths, and all share the step's coefficients:
        what is unknown of two tiers alike says nothing of which is better.
        """
        budgets = [self._budgets[tier] for tier in self.tiers]
        log_ms, spread = self.cost.compare([(view.shape(b), b) for b in budgets])
        kinds = ((False, view.batch - view.constrained), (True, view.constrained))
        known = [(self._memory(kind).weigh(), runs / view.batch) for kind, runs in kinds if runs]
        tokens = np.ones(len(budgets))
        for (accepted, _), share in known:
            tokens += share * accepted
        for (_, by_rate), share in known:
            error = share * by_rate / tokens[:, None]
            spread += error @ error.T
        return np.log(tokens), log_ms, spread

    def _slot(self, view: StepView) -> Slot:
        bound = 1 << max(0, view.batch.bit_length() - 1)
        if bound not in self._slots:
            near = min(self._slots, key=lambda b: abs(log(b / bound)), default=None)
            tier, reason = self._launch, "launch"
            if near is not None:
                tier, reason = self._slots[near].tier, f"as at batch {near}"
            self._slots[bound] = Slot(tier, reason)
            self._decide(view, self._slots[bound], hope=0.0)
        return self._slots[bound]

    def _decide(self, view: StepView, slot: Slot, hope: float = HOPE) -> None:
        """Take the best tier of a world that may be this one."""
        log_tokens, log_ms, spread = self._weigh(view)
        logs, before = log_tokens - log_ms, self.tiers.index(slot.tier)
        gains = logs - logs[before]
        values, vectors = np.linalg.eigh(spread)
        drawn = np.maximum(values, 0.0) ** 0.5 * self._rng.standard_normal(len(values))
        maybe = gains + hope * (vectors @ drawn)
        maybe[before] += MARGIN
        # A tier's recordings are there, or are worth their time: who has come so far is taken to go
        # on as long again.
        pays = [
            (tier.steps > 0 or self.count > 0 or n == before)
            and self._wait_ms(tier) <= max(gain, RECORD_SHARE) * self._all_ms
            for n, (tier, gain) in enumerate(zip(self.tiers, gains.tolist(), strict=True))
        ]
        now = int(np.where(pays, maybe, -np.inf).argmax())
        slot.left = 1 + int(self._rng.integers(STRIDE))
        slot.behind = 1 - exp(gains[now] - gains[pays].max())
        if now != before:
            said = f"gains {gains[now]:.1%} over" if gains[now] > 0 else "may gain over"
            slot.tier, slot.reason = self.tiers[now], f"{said} {_name(slot.tier)}"
            slot.switches += 1


def _name(tier: Tier) -> str:
    wide = f", top-k {tier.top_k}" if tier.top_k > 1 else ""
    return f"{tier.steps} steps{wide}" if tier.steps else "off"
