"""Policies on recorded texts at the step times of a 0.75B model."""

from __future__ import annotations

import pytest

from overlap_spec.speculation.cost import PROFILE_SPREAD
from overlap_spec.speculation.policy import LengthPolicy, StaticPolicy
from overlap_spec.speculation.presets import load_policy
from overlap_spec.tiers import OFF, Tier
from tests.support.replay import Recorded, read_recorded, replay

SEEDS = range(8)
TIERS = load_policy("auto", 5, 1, None).tiers
# What two seconds at the start are enough for.
MEASURED = (Tier(5, 1, 6), Tier(5, 4, 16), Tier(7, 1, 8), OFF)


@pytest.fixture(scope="module")
def drawn() -> list[Recorded]:
    recorded = read_recorded()
    return [recorded.drawn(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def fixed(drawn: list[Recorded]) -> list[list[dict[str, float]]]:
    return [[replay(StaticPolicy(tier), texts, 1) for tier in TIERS] for texts in drawn]


def make(name: str, texts: Recorded, seed: int) -> LengthPolicy:
    policy = load_policy(name, 5, 1, None)
    policy.calibrate(texts.start(MEASURED, seed, 0.03), PROFILE_SPREAD)
    return policy


def whole(name: str, drawn: list[Recorded]) -> float:
    """Milliseconds of all phases and seeds."""
    ran = (replay(make(name, texts, n), texts, n) for n, texts in enumerate(drawn))
    return sum(sum(phases.values()) for phases in ran)


def test_above_each_fixed_tier_and_the_published_tiers(
    drawn: list[Recorded], fixed: list[list[dict[str, float]]]
) -> None:
    took = whole("auto", drawn)
    single = min(sum(sum(tiers[n].values()) for tiers in fixed) for n in range(len(TIERS)))
    assert took < single / 1.02
    assert took < whole("default", drawn)


def test_near_the_best_fixed_tier_of_each_phase(
    drawn: list[Recorded], fixed: list[list[dict[str, float]]]
) -> None:
    """Phases of 40 to 230 verifies, each with the tier that turned out best for its own texts."""
    ran = [replay(make("auto", texts, n), texts, n) for n, texts in enumerate(drawn)]
    shares = {}
    for phase in ran[0]:
        best = sum(min(tier[phase] for tier in tiers) for tiers in fixed)
        shares[phase] = best / sum(each[phase] for each in ran)
    assert min(shares.values()) > 0.95, shares
    assert sum(shares.values()) / len(shares) > 0.97, shares


def test_few_moves_on_texts_that_stay_as_they_are(drawn: list[Recorded]) -> None:
    """The first phase ten times over: in the end in one of the tiers that are about as good."""
    easy = drawn[0].phases[0]
    again = Recorded(drawn[0].step_ms, drawn[0].saves, (easy,) * 10)
    policy = make("auto", drawn[0], 0)
    replay(policy, again, 0)
    assert policy.snapshot()["switches"] <= 8
