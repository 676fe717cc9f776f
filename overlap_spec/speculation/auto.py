"""The policy that nobody tunes: each tier's expected tokens over its measured time.

    rate(tier) = (batch + Σ E[accepted of a request | tier]) / T(tier, batch, contexts)

E comes from observed survival (``memory``), T from the cost model that learns from every step
(``online_cost``). Both are known to some precision, and a tier's gain over the active one has a
standard error. A gain that clears half of it is taken; one that may be there is probed, where a
probe costs little; what is neither is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log
from typing import Any

from overlap_spec.speculation.cost import ASSUMED, ASSUMED_SPREAD, CostModel, StepShape, shape_of
from overlap_spec.speculation.memory import Estimate, Memory
from overlap_spec.speculation.online_cost import OnlineCost
from overlap_spec.speculation.policy import (
    LengthPolicy,
    StepOutcome,
    StepView,
    active_snapshot,
    slot_snapshot,
)
from overlap_spec.tiers import Budget, Tier

# Weight that a verify keeps at the next one, in what decides and in what sees a change.
SLOW_KEPT, QUICK_KEPT = 0.995, 0.92
# Weight that what is known of one kind of text keeps at a verify of the other alone, while it is
# worth more than so many runs; and loses where all requests of a verify are new, whose text may be
# another one.
KIND_KEPT, KIND_LEAST, NEW_LOST = 0.98, 8.0, 0.5
# Gain that a move needs beyond so many standard errors, and how much each move since the last
# change of the world adds. To stay with what seems worse costs more than to have moved in vain.
MARGIN, MARGIN_GROWTH, SURE = 0.01, 1.4, 0.5
# Gain that a probe must promise at this many standard errors; and what is to be expected of a
# tier, to be started with in the launch tier's place, or probed at once if it was never active.
PROMISE, HOPE, EXPECTED = 0.02, 1.3, 0.1
# Share of all time that probes may cost.
PROBE_SHARE = 0.018
# Share of all time that recordings for a tier may take.
RECORD_SHARE = 0.1
# Verifies before a probe of a tier that was never active, where there was none yet; before any: at
# first, and the factor after a probe that failed and one that did not.
FIRST_HOLD = 12
HOLD, HOLD_GROWTH, HOLD_KEPT_GROWTH, HOLD_MOST = 50, 3, 2, 4096
# Runs that a probe, and the dwell in a tier, are good for; and their least verifies.
PROBE_RUNS, PROBE_LEAST = 24, 6
# Each probe after one that failed is twice as long, up to this factor.
PROBE_MOST = 8
DWELL_RUNS, DWELL_LEAST = 8, 2
# Verifies between two looks for a change of the world, and between decisions, after the dwell.
LOOK_EVERY, DECIDE_EVERY = 2, 2
# The same where nothing has changed for so many verifies.
SETTLED, SETTLED_EVERY = 64, 8
# Standard deviations by which quick and slow memory differ where the world has changed.
CHANGED = 3.0


@dataclass
class Slot:
    """What is active at one range of batch sizes, and how it got there."""

    tier: Tier
    reason: str
    since: int = 0
    rested: int = 0
    hold: int = HOLD
    moves: int = 0
    probes: int = 1
    due: bool = False
    tried: set[Tier] = field(default_factory=set)
    from_tier: Tier | None = None
    # Share of its time that a probe loses to the tier that seems best.
    behind: float = 0.0
    count: int = 0
    switches: int = 0


class AutoPolicy(LengthPolicy):
    """Depth and width by survival and measured cost; off where drafts do not pay.

    - Memory: two of them for each kind of text. The slow one decides. Where the quick one differs
      from it by :data:`CHANGED` standard deviations, the world has changed, and the slow one
      begins anew from it. New requests, and text of the other kind, make it less sure.
    - Move: to the tier of the best rate, where its gain is over a margin and a share of its
      standard error.
      Each move widens the margin until the world changes: near ties end in one of them.
    - Probe: of the tier that promises most, when the hold is over and the time that probes have
      cost stays under :data:`PROBE_SHARE`, or the tier should gain; at once where it was never
      active and should gain :data:`EXPECTED`. It ends early where it is clearly worse, and then
      triples the hold.
    - Recordings: a tier whose passes are not recorded yet is taken or probed when they take no more
      than :data:`RECORD_SHARE` of all time, or than its gain would have brought since the start.
    - Slots: one for each range of batch sizes, a power of two. Survival is shared by all.
    - Start: with the launch tier, and at another range of batch sizes with the tier of the nearest
      one; unless another one should gain even then: :data:`EXPECTED` over the launch tier.
    - Target: among the tiers whose step keeps the strictest TPOT target, if there are any.

    Args:
        tiers: Those to choose from; one of them is off.
        launch: The one of them to start with.
        cost: What is known of their time; None: nothing yet.
    """

    weighs_cost = True

    def __init__(self, tiers: Sequence[Tier], launch: Tier, cost: OnlineCost | None = None) -> None:
        self.tiers = tuple(sorted(tiers, key=lambda t: (t.steps, t.top_k)))
        self._widths = {tier.top_k for tier in tiers if tier.top_k > 1}
        self._launch = launch
        self.cost = cost or OnlineCost(ASSUMED, ASSUMED_SPREAD)
        self._slow = {kind: Memory(tiers, SLOW_KEPT) for kind in (False, True)}
        self._quick = {kind: Memory(tiers, QUICK_KEPT) for kind in (False, True)}
        self._kinds: set[bool] = set()
        # Requests of the last verify of each kind.
        self._ids: dict[bool, set[int]] = {False: set(), True: set()}
        self._budgets = {tier: Budget(tier) for tier in tiers}
        self._slots: dict[int, Slot] = {}
        self._last = StepView(())
        self._all_ms = self._probes_ms = 0.0
        self._wait_ms: Callable[[Tier], float] = lambda _: 0.0
        self.count = 0

    def tell_waits(self, wait_ms: Callable[[Tier], float]) -> None:
        self._wait_ms = wait_ms

    def calibrate(self, model: CostModel, spread: float) -> None:
        self.cost = OnlineCost(model, spread)

    def choose(self, view: StepView) -> Budget:
        if not view.batch:
            return self._budgets[self.tiers[0]]
        for kind, runs in ((False, view.batch - view.constrained), (True, view.constrained)):
            if runs and kind not in self._kinds:
                self._kinds.add(kind)
                for memory in (self._slow, self._quick):
                    memory[kind].begin_like(memory[not kind])
        slot = self._slot(view)
        target = view.tpot_slo_ms
        if target is None:
            return self._budgets[slot.tier]
        if self._step_ms(view, slot.tier) <= target:
            return self._budgets[slot.tier]
        fitting = [t for t in self.tiers if self._step_ms(view, t) <= target]
        best = max(fitting, key=lambda t: self._rate(view, t), default=slot.tier)
        return self._budgets[best]

    def observe(self, outcome: StepOutcome) -> None:
        view, budget = outcome.view, outcome.budget
        tier = budget.tier
        if not view.batch or tier not in self._budgets:
            return
        slot = self._slot(view)
        if outcome.step_ms is not None:
            self._clock(view, budget, outcome.step_ms, slot)
        if not outcome.requests:
            return
        self._last = view
        self.count += 1
        slot.count += 1
        slot.rested += 1
        slot.since += tier == slot.tier
        for kind in (False, True):
            self._age(kind, {r.request_id for r in outcome.requests if r.constrained == kind})
            runs = [r.accepted for r in outcome.requests if r.constrained == kind]
            for memory in (self._slow[kind], self._quick[kind]):
                if tier.steps and runs:
                    memory.add(tier, runs)
                elif runs:
                    memory.rest()
            looks = self.count % LOOK_EVERY == LOOK_EVERY - 1
            if looks and tier.steps and runs and self._changed(kind, tier):
                self._slow[kind].restart(tier, self._quick[kind])
                for other in self._slots.values():
                    other.moves, other.hold, other.probes, other.due = 0, HOLD, 1, True
        if tier == slot.tier:
            self._decide(view, slot)

    def snapshot(self) -> dict[str, Any]:
        slots = []
        for bound, slot in sorted(self._slots.items()):
            figures = {"count": slot.count, "switches": slot.switches}
            ema = self._accepted(self._last, slot.tier) if self._last.batch else None
            steps = [tier.steps for tier in self.tiers]
            slots.append(slot_snapshot(bound, slot.tier, steps) | {"ema": ema} | figures)
        active = active_snapshot(self.tiers[0], "nothing has run yet")
        if self._last.batch:
            slot = self._slot(self._last)
            accepted = self._accepted(self._last, slot.tier)
            step_ms = self._step_ms(self._last, slot.tier)
            active = active_snapshot(slot.tier, slot.reason, 1 + accepted, step_ms)
        return {
            "policy": "auto",
            "count": self.count,
            "switches": sum(slot.switches for slot in self._slots.values()),
            "active": active,
            "slots": slots,
            "cost": self.cost.model().to_dict(),
            "probe_share": self._probes_ms / self._all_ms if self._all_ms else 0.0,
        }

    # Estimates

    def _slot(self, view: StepView) -> Slot:
        bound = 1 << max(0, view.batch.bit_length() - 1)
        slot = self._slots.get(bound)
        if slot is None:
            slot = self._slots[bound] = self._begin(view, bound)
            slot.tried.add(slot.tier)
        return slot

    def _begin(self, view: StepView, bound: int) -> Slot:
        """What a range of batch sizes starts with."""
        near = min(self._slots, key=lambda b: abs(log(b / bound)), default=None)
        if near is None:
            slot = Slot(self._launch, "launch")
        else:
            slot = Slot(self._slots[near].tier, f"as at batch {near}")
        best = max(self.tiers, key=lambda tier: self._rate(view, tier))
        gain = log(self._rate(view, best) / self._rate(view, slot.tier))
        if gain > (EXPECTED if near is None else 0.0) and self._pays(best, gain):
            slot.tier, slot.reason = best, f"best estimate at batch {view.batch}"
        return slot

    def _pays(self, tier: Tier, gain: float) -> bool:
        """Whether the tier's recordings are there, or are worth their time: who has come so far is
        taken to go on as long again."""
        return self._wait_ms(tier) <= max(gain, RECORD_SHARE) * self._all_ms

    def _shape(self, view: StepView, tier: Tier) -> StepShape:
        return shape_of(
            self._budgets[tier],
            view.batch,
            view.context_tokens,
            view.constrained,
            view.chunk_tokens,
        )

    def _step_ms(self, view: StepView, tier: Tier) -> float:
        return self.cost.step_ms(self._shape(view, tier), self._budgets[tier])

    def _accepted(self, view: StepView, tier: Tier) -> float:
        """Mean accepted drafts of a request."""
        return sum(share * e.accepted for share, e in self._estimates(view, tier))

    def _estimates(self, view: StepView, tier: Tier) -> list[tuple[float, Estimate]]:
        """Each kind's share of the batch, and what it accepts."""
        constrained = view.constrained / view.batch
        shares = {False: 1 - constrained, True: constrained}
        return [(s, self._slow[kind].estimate(tier)) for kind, s in shares.items() if s]

    def _rate(self, view: StepView, tier: Tier) -> float:
        return (1 + self._accepted(view, tier)) / self._step_ms(view, tier)

    def _gains(self, view: StepView, slot: Slot) -> dict[Tier, tuple[float, float]]:
        """Each other tier's gain over the active one, a logarithm, and its standard error."""
        here = self._estimates(view, slot.tier)
        tokens = 1 + sum(share * e.accepted for share, e in here)
        tiers = [tier for tier in self.tiers if tier != slot.tier]
        slower = self.cost.compare(
            self._shape(view, slot.tier),
            self._budgets[slot.tier],
            [(self._shape(view, tier), self._budgets[tier]) for tier in tiers],
        )
        found = {}
        for tier, (log_time, spread) in zip(tiers, slower, strict=True):
            there = self._estimates(view, tier)
            others = 1 + sum(share * e.accepted for share, e in there)
            same = tier.top_k == slot.tier.top_k
            for (share, mine), (_, its) in zip(here, there, strict=True):
                spread += _difference(mine, its, share / tokens, share / others, same)
            found[tier] = log(others / tokens) - log_time, spread**0.5
        return found

    def _age(self, kind: bool, ids: set[int]) -> None:
        """Be less sure of a kind whose requests are new, or that is not verified at all."""
        if not ids:
            # In the end it is a guess that is left, and no worse one than that of nothing.
            if self._slow[kind].most_trials > KIND_LEAST:
                self._slow[kind].scale(KIND_KEPT)
            return
        new = len(ids - self._ids[kind]) / len(ids)
        if new:
            self._slow[kind].scale(1 - NEW_LOST * new)
        self._ids[kind] = ids

    def _changed(self, kind: bool, tier: Tier) -> bool:
        """Whether the quick memory contradicts the slow one."""
        slow, quick = self._slow[kind], self._quick[kind]
        if quick.trials(tier) < 4:
            return False
        before, now = slow.estimate(tier), quick.estimate(tier)
        spread = sum(
            s * s * v for e in (before, now) for s, v in zip(e.slopes, e.variances, strict=True)
        )
        return (before.accepted - now.accepted) ** 2 > CHANGED**2 * spread

    # Decisions

    def _clock(self, view: StepView, budget: Budget, step_ms: float, slot: Slot) -> None:
        shape = shape_of(
            budget, view.batch, view.context_tokens, view.constrained, view.chunk_tokens
        )
        self.cost.observe(shape, budget, step_ms)
        self._all_ms += step_ms
        if slot.from_tier is not None and budget.tier == slot.tier:
            self._probes_ms += slot.behind * step_ms

    def _decide(self, view: StepView, slot: Slot) -> None:
        """Move, probe, or end a probe; at most every second verify."""
        probing = slot.from_tier is not None
        least = _verifies(view, PROBE_RUNS, PROBE_LEAST)
        probe = least * slot.probes
        dwell = PROBE_LEAST if probing else _verifies(view, DWELL_RUNS, DWELL_LEAST)
        every = DECIDE_EVERY if probing or slot.rested < SETTLED else SETTLED_EVERY
        if slot.since < dwell or (slot.count % every and not slot.due):
            return
        slot.due = False
        found = self._gains(view, slot)
        gains = {tier: each for tier, each in found.items() if self._pays(tier, each[0])}
        best = max(gains, key=lambda tier: gains[tier][0], default=slot.tier)
        gain, error = gains.get(best, (0.0, 0.0))
        if probing:
            slot.behind = max(0.0, 1 - exp(-gain))
            paid = self._probes_ms > PROBE_SHARE * self._all_ms or slot.since >= PROBE_MOST * least
            # While it is neither better nor clearly worse, it goes on.
            if gain > error or (slot.since >= probe and (gain <= 0 or paid)):
                self._end_probe(slot, best, gain)
            return
        margin = MARGIN * MARGIN_GROWTH**slot.moves
        if gain > margin + SURE * error:
            slot.moves += 1
            self._move(slot, best, f"gains {gain:.1%} over {_name(slot.tier)}")
            return
        rested = slot.rested >= slot.hold
        first = slot.hold == HOLD and slot.rested >= FIRST_HOLD
        hopes = {
            tier: gain + HOPE * error
            for tier, (gain, error) in gains.items()
            if rested
            or (tier not in slot.tried and (gain > EXPECTED or first or self._wait_ms(tier)))
        }
        hopeful = max(hopes, key=hopes.__getitem__, default=slot.tier)
        if hopes.get(hopeful, 0.0) < PROMISE:
            return
        gain = gains[hopeful][0]
        costs = max(0.0, -gain) * probe * self._step_ms(view, hopeful)
        # One that should gain costs nothing, as far as is known.
        if not costs or self._probes_ms + costs <= PROBE_SHARE * self._all_ms:
            before = slot.tier
            self._move(slot, hopeful, f"probe: may gain up to {hopes[hopeful]:.1%}")
            slot.from_tier, slot.behind = before, max(0.0, 1 - exp(gain))

    def _end_probe(self, slot: Slot, best: Tier, gain: float) -> None:
        before, slot.from_tier = slot.from_tier, None
        slot.rested = 0
        if gain <= 0:
            slot.hold = min(HOLD_MOST, slot.hold * HOLD_KEPT_GROWTH)
            slot.reason = f"probe of {_name(slot.tier)} from {_name(before)} succeeded"
            return
        slot.hold = min(HOLD_MOST, slot.hold * HOLD_GROWTH)
        slot.probes = min(PROBE_MOST, slot.probes * 2)
        self._move(slot, best, f"probe of {_name(slot.tier)} failed: {gain:.1%} below")

    def _move(self, slot: Slot, tier: Tier, reason: str) -> None:
        for memory in self._slow.values():
            for width in self._widths:
                memory.learn_children(width)
        slot.tier, slot.reason = tier, reason
        slot.tried.add(tier)
        slot.since = slot.rested = 0
        slot.switches += 1


def _verifies(view: StepView, runs: int, least: int) -> int:
    return max(least, ceil(runs / view.batch))


def _difference(mine: Estimate, its: Estimate, here: float, there: float, same: bool) -> float:
    """Variance of the difference of two logarithms of tokens, of which ``here`` and ``there`` are
    the derivatives by accepted drafts; tiers of the ``same`` family share their rates."""
    a = [here * s for s in mine.slopes]
    b = [there * s for s in its.slopes]
    if not same:
        return sum(s * s * v for s, v in zip(a, mine.variances, strict=True)) + sum(
            s * s * v for s, v in zip(b, its.variances, strict=True)
        )
    longer = mine.variances if len(a) > len(b) else its.variances
    a += [0.0] * (len(longer) - len(a))
    b += [0.0] * (len(longer) - len(b))
    return sum((x - y) ** 2 * v for x, y, v in zip(a, b, longer, strict=True))


def _name(tier: Tier | None) -> str:
    if tier is None or not tier.steps:
        return "off"
    return f"{tier.steps} steps" + (f", top-k {tier.top_k}" if tier.top_k > 1 else "")
