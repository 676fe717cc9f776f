"""The guarded length policy: few switches, little lost, quick to follow; and its guards by hand.

Acceptance is simulated: a draft at depth d is accepted with a probability of its own once all
before it are. A step costs 1 + 0.15 · steps and brings accepted + 1 tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from overlap_spec.speculation.guarded import GUARDED, GuardedSlot, StepClock, Survival
from overlap_spec.speculation.policy import LengthPolicy
from overlap_spec.speculation.presets import load_policy
from overlap_spec.speculation.slots import SlotPolicy
from overlap_spec.speculation.static import static_tier
from overlap_spec.speculation.tiers import EmaSlot, SlotSettings
from overlap_spec.types import Tier
from tests.support.policies import told, view

COST = 0.15
LADDER = GUARDED[1].candidate_steps
SETTLED = 200  # verifies after which switches are counted
RATES = [round(0.05 * i, 2) for i in range(2, 20)]
Rates = Sequence[float]


def tokens(rates: Rates, steps: int) -> float:
    """Expected tokens of a step."""
    share, total = 1.0, 1.0
    for rate in rates[:steps]:
        share *= rate
        total += share
    return total


def speed(rates: Rates, steps: int, cost: float = COST) -> float:
    return tokens(rates, steps) / (1 + cost * steps)


def run(
    policy: LengthPolicy, phases: Sequence[Rates], seed: int, batch: int = 1, late: int = 0
) -> list[int]:
    """Steps that were drafted at each verify; ``phases`` holds the rates by depth of each.

    Results arrive ``late`` verifies after their own.
    """
    coins = random.Random(seed)
    chosen: list[int] = []
    waiting: list[tuple[Tier, list[int]]] = []
    for rates in phases:
        tier = policy.choose(view(batch)).tier
        accepted = []
        for _ in range(batch):
            length = 0
            while length < tier.steps and coins.random() < rates[length]:
                length += 1
            accepted.append(length)
        chosen.append(tier.steps)
        waiting.append((tier, accepted))
        if len(waiting) > late:
            policy.observe(told(batch, *waiting.pop(0)))
    return chosen


def switches(chosen: Sequence[int], after: int = SETTLED) -> int:
    return sum(a != b for a, b in zip(chosen[after:], chosen[after + 1 :], strict=False))


def lost(chosen: Sequence[int], rates: Rates, ladder: Sequence[int], cost: float = COST) -> float:
    """Share of the best static tier's speed that is missing, in expectation."""
    time = sum(1 + cost * steps for steps in chosen)
    mean = sum(tokens(rates, steps) for steps in chosen) / time
    return 1 - mean / max(speed(rates, steps, cost) for steps in ladder)


def published(slot: SlotSettings) -> LengthPolicy:
    return SlotPolicy("one", {1: EmaSlot(slot, 3)}, lambda s: static_tier(s, 1, None))


@pytest.mark.parametrize("rate", RATES)
def test_few_switches_and_little_lost(rate: float) -> None:
    losses = []
    for seed, launch in enumerate((1, 5, 7)):
        rates = [rate] * 7
        chosen = run(load_policy("guarded", launch, 1, None), [rates] * 2000, seed)
        assert switches(chosen) <= 10
        losses.append(lost(chosen, rates, LADDER))
    assert sum(losses) / len(losses) < 0.03


def test_the_published_policy_switches_at_every_decision() -> None:
    """About 400 times in 2,000 verifies, where walk up and ceiling or probe and off disagree."""
    ceiling = SlotSettings((1, 3), ceiling_coeff=1.2)  # aggressive, from batch 128 on
    off = SlotSettings((0, 1, 3), down_hysteresis=0.0)  # with-off, from batch 8 on
    for slot, rate in ((ceiling, 0.65), (off, 0.2)):
        assert switches(run(published(slot), [[rate] * 7] * 2000, 0), 0) > 350
        guarded = GuardedSlot(replace(GUARDED[1], candidate_steps=slot.candidate_steps), 3)
        policy = SlotPolicy("one", {1: guarded}, lambda s: static_tier(s, 1, None))
        assert switches(run(policy, [[rate] * 7] * 2000, 0)) <= 10


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("rate", [0.3, 0.55, 0.8])
def test_late_results_change_little(rate: float, late: int) -> None:
    rates = [rate] * 7
    chosen = run(load_policy("guarded", 5, 1, None), [rates] * 2000, 1, late=late)
    assert switches(chosen) <= 10
    assert lost(chosen, rates, LADDER) < 0.03


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.6, 0.9])
def test_larger_batches(batch: int, rate: float) -> None:
    slot, rates = GUARDED[batch], [rate] * 7
    chosen = run(load_policy("guarded", 3, 1, None), [rates] * 600, 0, batch)
    assert switches(chosen) <= 6
    assert lost(chosen[SETTLED:], rates, slot.candidate_steps, slot.draft_cost) < 0.03


def test_follows_phases() -> None:
    """Easy, hard, easy: within 4% of the best tier after 50 verifies nine times in ten."""
    easy, hard, length = [0.9] * 7, [0.2] * 7, 300
    lags = []
    for seed in range(8):
        chosen = run(
            load_policy("guarded", 5, 1, None),
            [easy] * length + [hard] * length + [easy] * length,
            seed,
        )
        for start, rates in ((length, hard), (2 * length, easy)):
            enough = 0.96 * max(speed(rates, steps) for steps in LADDER)
            phase = chosen[start : start + length]
            lags.append(next(i for i, steps in enumerate(phase) if speed(rates, steps) > enough))
    assert sorted(lags)[len(lags) // 2] <= 40
    assert sum(lag <= 50 for lag in lags) >= 0.9 * len(lags)
    assert max(lags) <= 150


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ([0.45, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95], (5, 7)),  # only a probe can see it
        ([0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], (1,)),  # a guess from depth 1 is far too high
    ],
)
def test_acceptance_that_changes_with_depth(rates: list[float], best: tuple[int, ...]) -> None:
    for seed in range(3):
        chosen = run(load_policy("guarded", 1, 1, None), [rates] * 1200, seed)
        assert switches(chosen) <= 10
        assert sum(steps in best for steps in chosen[600:]) > 0.85 * 600


# Survival: acceptance by depth.


def test_survival_is_not_biased_by_the_runs_own_limit() -> None:
    """One draft always accepted, out of one or of three: depth 1 is certain either way."""
    memory = Survival(3, 0.0)
    for _ in range(1000):
        memory.add(1, [1])
    assert memory.expect(1)[0] == pytest.approx(1, abs=1e-3)
    for _ in range(1000):
        memory.add(3, [1])
    accepted, share = memory.expect(3)
    assert accepted == pytest.approx(1, abs=2e-3)
    assert share == pytest.approx(0, abs=1e-3)


def test_survival_by_hand() -> None:
    """Depth 1: (2/3 + 0.7) / 2; depth 2 tried by 2 of 3 and passed by 1 of 3."""
    memory = Survival(2, 0.5)
    memory.add(2, [0, 1, 2])
    first = (2 / 3 + 0.7) / 2
    second = (1 / 3 + first) / (2 / 3 + 1)
    accepted, share = memory.expect(2)
    assert (accepted, share) == pytest.approx((first + first * second, first * second))
    memory.add(1, [1])
    assert memory.expect(1)[0] == pytest.approx((1 / 3 + 1 + 0.7) / (1 / 2 + 1 + 1))


# StepClock: what a draft step costs.


def walk(clock: StepClock, cost: float, load: Callable[[int], float], rounds: int = 3) -> None:
    """Twenty steps at each of some tiers, on a machine whose speed changes by the step."""
    for turn, steps in enumerate([7, 5, 3, 1, 3, 1] * rounds):
        for step in range(20):
            clock.add(steps, load(20 * turn + step) * (1 + cost * steps))


@pytest.mark.parametrize("cost", [0.08, 0.15, 0.37])
def test_clock_finds_the_cost_of_a_draft_step(cost: float) -> None:
    clock = StepClock(0.15)
    assert clock.draft_cost == 0.15
    walk(clock, cost, lambda _: 12.0)
    assert clock.draft_cost == pytest.approx(cost, rel=0.15)


def test_clock_is_not_moved_by_the_load() -> None:
    """Five times as slow from the middle of a tier on, or across a switch: no cost explains it."""
    for change in (70, 80, 100):
        clock = StepClock(0.15)
        walk(clock, 0.25, lambda step, change=change: 12.0 if step < change else 60.0)
        assert clock.draft_cost == pytest.approx(0.25, rel=0.15)


def test_clock_passes_over_single_slow_steps_and_short_visits() -> None:
    clock = StepClock(0.15)
    walk(clock, 0.25, lambda step: 200.0 if step % 7 == 0 else 12.0)
    known = clock.draft_cost
    assert known == pytest.approx(0.25, rel=0.15)
    for _ in range(3):
        clock.add(7, 900.0)
        clock.add(1, 1.0)
    assert clock.draft_cost == known


def test_clock_on_a_noisy_machine() -> None:
    rng = random.Random(3)
    clock = StepClock(0.15)
    walk(clock, 0.3, lambda _: 12.0 * rng.lognormvariate(0, 0.3))
    assert clock.draft_cost == pytest.approx(0.3, rel=0.3)


def test_clock_believes_nothing_beyond_what_is_credible() -> None:
    clock = StepClock(0.15)
    walk(clock, 20.0, lambda _: 1.0)
    assert 0.2 < clock.draft_cost <= 0.45


# The guards by hand.


def drive(slot: GuardedSlot, times: int, accepted: Callable[[int], int]) -> list[int]:
    chosen = []
    for _ in range(times):
        chosen.append(slot.steps)
        slot.observe(slot.steps, [accepted(slot.steps)])
    return chosen


def test_dwell_and_a_clear_move() -> None:
    slot = GuardedSlot(GUARDED[1], 7)
    assert drive(slot, 16, lambda _: 0) == [7] * 15 + [1]


def test_results_of_another_tier_do_not_count_towards_the_dwell() -> None:
    slot = GuardedSlot(GUARDED[1], 1)
    for _ in range(30):
        slot.observe(7, [7])
    assert (slot.steps, slot.count) == (1, 30)
    drive(slot, 15, lambda steps: steps)
    assert slot.steps == 7


def test_ceiling_forbids_probes_that_cannot_pay() -> None:
    """At 10% not even certain drafts behind the first would pay: (1 + 0.3) / 1.45 < 1.1 / 1.15."""
    slot = GuardedSlot(GUARDED[1], 1)
    runs = iter([1, *[0] * 9] * 500)
    assert set(drive(slot, 5000, lambda _: next(runs))) == {1}


def test_failed_probes_wait_three_times_as_long() -> None:
    """Every second first draft is accepted and no other: a probe is worth it, and fails."""
    slot = GuardedSlot(GUARDED[1], 1)
    half = iter([1, 0] * 1000)
    chosen = drive(slot, 2000, lambda _: next(half))
    probes = [i for i in range(1, 2000) if chosen[i] > chosen[i - 1]]
    waits = [b - a for a, b in itertools.pairwise(probes)]
    assert probes[0] == 50
    assert all(wait >= 150 for wait in waits)
    assert waits == sorted(waits)
    assert slot.hold == 1024
    assert set(chosen) == {1, 3}


def test_probes_from_off_back_off() -> None:
    slot = GuardedSlot(GUARDED[8], 0)
    chosen = drive(slot, 2000, lambda _: 0)
    probes = [i for i in range(1, 2000) if chosen[i] > chosen[i - 1]]
    assert probes[0] == 50
    assert 2 <= len(probes) <= 5
    assert sum(chosen) < 0.06 * 2000
    drive(slot, 1100, lambda steps: steps)
    assert slot.steps == 3
