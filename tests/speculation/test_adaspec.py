"""AdaSpec's algorithms by hand, its policy, and the baselines that it is compared with."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from bench.baselines import ThresholdPolicy
from bench.traces import stopped_steps, verified_lengths
from overlap_spec.speculation.adaspec import (
    AdaSpecPolicy,
    Calibration,
    Confidences,
    goodput,
    predicted_steps,
)
from overlap_spec.speculation.cost import CostModel
from overlap_spec.speculation.memory import DepthCounts, expected, run_variance, slopes
from overlap_spec.speculation.online_cost import OnlineCost
from overlap_spec.speculation.policy import (
    OFF,
    RequestOutcome,
    RequestView,
    StepOutcome,
    StepView,
    static_tier,
)
from overlap_spec.speculation.presets import CHAINS
from overlap_spec.tiers import Budget, DraftStop, RowTimes, Tier, kept_nodes
from tests.support.policies import told, view

TIERS = [static_tier(steps, 1, None) for steps in CHAINS]
# 10 ms a verify, 1 ms a node, 1 ms a draft step.
FLAT = CostModel(
    verify=10.0, verify_node=1.0, verify_context=0.0,
    draft=1.0, draft_branch=0.0, draft_context=0.0,
)  # fmt: skip


def outcome(
    accepted: int,
    confidences: tuple[float, ...],
    tier: Tier = TIERS[3],
    constrained: bool = False,
    request: int = 0,
) -> StepOutcome:
    asked = StepView((RequestView(request, 10, constrained),))
    got = RequestOutcome(request, accepted, tier.steps, constrained, confidences)
    return StepOutcome(asked, Budget(tier), [got])


# Algorithm 3


def test_goodput_by_hand() -> None:
    assert goodput(3.0, 12.0, None) == 0.25
    assert goodput(3.0, 12.0, 12.0) == 0.25
    assert goodput(3.0, 12.0, 11.9) == -1.0


# Algorithm 1


def test_length_by_hand() -> None:
    """Confidence 0.5, 10 ms and 2 ms a step: 1/10, 1.5/12, 1.75/14 = 0.125, no more."""
    costs = {steps: 10.0 + 2 * steps for steps in range(8)}
    assert predicted_steps([0.5], costs, None) == 1
    # 1/10, 1.9/12 = .158, 2.71/14 = .194, 3.44/16 = .215, 4.10/18 = .228, 4.69/20 = .234,
    # 5.22/22 = .237, 5.70/24 = .237 again, and a little more.
    assert predicted_steps([0.9], costs, None) == 7
    # 1.1/12 is below 1/10.
    assert predicted_steps([0.1], costs, None) == 0
    # (2 + 1.1)/13 = .238 over 2/10; (2 + 1.1 + .91)/16 = .251; + .7381 /19 = .25.
    both = {steps: 10.0 + 3 * steps for steps in range(8)}
    assert predicted_steps([0.9, 0.2], both, None) == 2


def test_length_keeps_the_target() -> None:
    costs = {steps: 10.0 + 2 * steps for steps in range(8)}
    assert predicted_steps([0.9], costs, 16.5) == 3
    # Nothing keeps it: off is the least of all steps.
    assert predicted_steps([0.9], costs, 5.0) == 0


def test_length_counts_depths_that_are_no_tier() -> None:
    """Tiers 0, 1, 3: the third's tokens include the second depth's."""
    assert predicted_steps([0.9], {0: 10.0, 1: 12.0, 3: 16.0}, None) == 3


# Algorithm 2


def kept(confidences: list[float], target: float | None) -> tuple[int, float]:
    """Three deep, at 10 ms and 1 ms a node."""
    shares = [c**depth for c in confidences for depth in (1, 2, 3)]
    return kept_nodes(shares, len(confidences), lambda n, rows: goodput(n, 10.0 + rows, target))


def test_elimination_by_hand() -> None:
    """Two requests, three deep, at 0.9 and 0.2, 10 ms and 1 ms a node.

    All 8 nodes: 2 + .9 + .81 + .729 + .2 + .04 + .008 = 4.687 over 18. Without .008: 4.679/17;
    without .04: 4.639/16 = .290; without .2: 4.439/15 = .296; without .729: 3.71/14 = .265.
    """
    nodes, gain = kept([0.9, 0.2], None)
    assert nodes == 5
    assert gain == pytest.approx((4.439 / 15) / (4.687 / 18))


def test_elimination_until_the_target_is_kept() -> None:
    """15.5 ms allow 5 nodes, where free choice keeps 7; and the roots stay whatever is asked."""
    assert kept([0.9, 0.8], 15.5)[0] == 5
    assert kept([0.9, 0.8], 1.0)[0] == 2


# What confidences are worth


def test_calibration_begins_at_its_word_and_learns() -> None:
    calibration = Calibration()
    assert calibration.rate(0.35) == pytest.approx(0.35)
    assert calibration.snapshot() == []
    for n in range(400):
        calibration.add(0.85, n % 2 == 0)
    assert calibration.rate(0.85) == pytest.approx(0.5, abs=0.02)
    assert calibration.rate(0.25) == pytest.approx(0.25)
    (row,) = calibration.snapshot()
    assert row["confidence"] == pytest.approx(0.85, abs=0.01)


def test_calibration_takes_the_refused_draft_and_no_deeper_one() -> None:
    calibration = Calibration()
    calibration.add_run((0.9, 0.8, 0.7, 0.6), 1)
    assert sum(told["trials"] for told in calibration.snapshot()) == pytest.approx(2, abs=0.1)


def test_kinds_of_text_are_calibrated_apart() -> None:
    confidences = Confidences()
    for n in range(60):
        confidences.observe(outcome(3, (0.55, 0.55, 0.55), constrained=True, request=n))
        confidences.observe(outcome(0, (0.55,), request=1000 + n))
    free, bound = (StepView((RequestView(9999, 1, kind),)) for kind in (False, True))
    assert confidences.of(bound)[0] > 0.8
    assert confidences.of(free)[0] < 0.2


def test_requests_have_their_own_confidence() -> None:
    confidences = Confidences()
    for _ in range(20):
        confidences.observe(outcome(3, (0.95, 0.95, 0.95), request=1))
        confidences.observe(outcome(0, (0.1,), request=2))
    sure, unsure, silent = confidences.of(
        StepView((RequestView(1, 1), RequestView(2, 1), RequestView(1, 1, speculate=False)))
    )
    assert sure > 0.9
    assert unsure < 0.15
    assert silent == 0.0


def test_a_drafter_without_confidences_is_known_by_what_was_accepted() -> None:
    confidences = Confidences()
    for _ in range(30):
        confidences.observe(outcome(1, ()))
    assert confidences.of(StepView((RequestView(0, 1),)))[0] == pytest.approx(0.5, abs=0.01)


def test_depth_counts_by_hand() -> None:
    """Depth 1: 2 of 3; depth 2: 1 of 2; each leans on the depth before with 4 trials."""
    counts = DepthCounts(3)
    for accepted in (0, 1, 2):
        counts.add(2, accepted)
    assert (counts.tried, counts.passed) == ([3, 2, 0], [2, 1, 0])
    first = (2 + 4 * 0.7) / 7
    second = (1 + 4 * first) / 6
    rates, trials = counts.rates()
    assert rates == pytest.approx([first, second, second])
    assert trials == [7, 6, 4]
    counts.scale(0.5)
    assert counts.tried == [1.5, 1, 0]
    assert expected([0.5, 0.5]) == 0.75
    assert slopes([0.5, 0.5]) == [1.5, 0.5]
    # 0, 1 or 2, at shares of a half, a quarter and a quarter.
    assert run_variance([0.5, 0.5]) == pytest.approx(0.25 * 1 + 0.25 * 4 - 0.75**2 + 0.05)


# The policy


def test_adaspec_shortens_as_the_batch_grows() -> None:
    policy = AdaSpecPolicy(TIERS, OnlineCost(FLAT, 0.01))
    steps = [policy.choose(view(batch)).tier.steps for batch in (1, 4, 16, 64)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_adaspec_verifies_the_best_of_the_batch() -> None:
    policy = AdaSpecPolicy(TIERS, OnlineCost(FLAT, 0.01))
    for _ in range(30):
        policy.observe(outcome(7, (0.99,) * 7, TIERS[7], request=1))
        policy.observe(outcome(0, (0.05,), TIERS[7], request=2))
    budget = policy.choose(StepView((RequestView(1, 10), RequestView(2, 10))))
    assert budget.tier.steps > 2
    # The sure request's drafts and both roots, or a little more.
    assert budget.nodes is not None
    assert budget.tier.steps + 2 <= budget.nodes < 2 * budget.tier.nodes - 2
    assert budget.most == (budget.tier.nodes,) * 2
    assert (
        AdaSpecPolicy(TIERS, OnlineCost(FLAT, 0.01), verifier=False).choose(view(2)).nodes is None
    )


def test_adaspec_leaves_the_length_to_the_draft_where_it_can_be_stopped() -> None:
    """Its stop knows each length's time, and what each request's drafts are worth."""
    policy = AdaSpecPolicy(TIERS, OnlineCost(FLAT, 0.01))
    assert policy.choose(view(1)).stop is None
    policy.let_stop()
    asked = StepView((RequestView(0, 10, True),))
    policy.observe(outcome(1, (0.9, 0.4), constrained=True))
    curve = policy.confidences.calibrations[True].curve()
    budget = policy.choose(asked)
    assert budget.tier == TIERS[-1]
    stop = budget.stop
    assert stop is not None
    # 10 ms a verify, 1 ms a node, 1 ms a draft step.
    assert stop.costs_ms == pytest.approx([11.0 + 2 * steps for steps in CHAINS], rel=0.01)
    assert stop.expected == pytest.approx(policy.confidences.of(asked))
    assert stop.curves[0] == pytest.approx(curve)
    assert curve[6:] == pytest.approx(
        [policy.confidences.calibrations[True].rate(c) for c in (0.65, 0.75, 0.85, 0.95)]
    )


def test_adaspec_stops_before_a_target_and_asks_only_who_takes_drafts() -> None:
    policy = AdaSpecPolicy(TIERS, OnlineCost(FLAT, 0.01), verifier=False)
    policy.let_stop()
    both = StepView((RequestView(0, 10, tpot_slo_ms=20.5), RequestView(1, 10, speculate=False)))
    stop = policy.choose(both).stop
    assert stop is not None
    # 12 ms, and 3 for each length.
    assert [n for n, ms in enumerate(stop.costs_ms) if ms < float("inf")] == [0, 1, 2]
    assert stop.expected[1] == 0
    assert not stop.curves[1].any()
    assert stop.curves[0].all()


def test_adaspec_leaves_it_to_the_stop_what_is_verified_and_stops_no_step_that_is_off() -> None:
    """By what a row takes; alone a chain has nothing that its stop would not end, and AdaSpec-
    removes nothing."""
    policy = AdaSpecPolicy(TIERS, OnlineCost(FLAT, 0.01))
    policy.let_stop()
    for _ in range(60):
        mixed = (RequestOutcome(0, 3, 3, False, (0.9,) * 3), RequestOutcome(1, 0, 3, False, (0.1,)))
        policy.observe(StepOutcome(view(2), Budget(TIERS[3]), mixed))
    budget = policy.choose(view(2))
    assert budget.nodes is None
    assert budget.stop is not None
    assert budget.stop.rows == pytest.approx((1.0, 0, 0.0), rel=0.05)
    alone = policy.choose(view(1)).stop
    assert alone is not None
    assert alone.rows is None
    policy.verifier = False
    minus = policy.choose(view(2)).stop
    assert minus is not None
    assert minus.rows is None
    policy.verifier = True
    for _ in range(60):
        policy.observe(outcome(0, (0.02,)))
    assert policy.choose(view(1)) == Budget(OFF)


def test_adaspec_keeps_the_strictest_target() -> None:
    policy = AdaSpecPolicy(TIERS, OnlineCost(FLAT, 0.01))
    assert policy.choose(view(1)).tier.steps >= 3
    asked = StepView((RequestView(1, 10, tpot_slo_ms=100.0), RequestView(2, 10, tpot_slo_ms=15.6)))
    budget = policy.choose(asked)
    assert FLAT.verify + budget.tier.steps + (budget.nodes or 2 * budget.tier.nodes) <= 15.6
    assert budget.tier.steps == 1


def test_a_target_is_not_kept_by_drafting_less_beside_a_prompt() -> None:
    """What a step prefills takes its time whatever is drafted: 20 ms of 500 tokens."""
    model = replace(FLAT, prefill=1.0, prefill_token=0.04)
    asked = StepView((RequestView(1, 10, tpot_slo_ms=16.5),))
    for stopping in (False, True):
        policy = AdaSpecPolicy(TIERS, OnlineCost(model, 0.01))
        if stopping:
            policy.let_stop()
        found = [policy.choose(each) for each in (asked, replace(asked, chunk_tokens=500))]
        if stopping:
            stops = [budget.stop for budget in found]
            assert all(stop is not None for stop in stops)
            kept = [sum(ms < inf for ms in stop.costs_ms) for stop in stops if stop is not None]
        else:
            kept = [1 + budget.tier.steps for budget in found]
        # 11 ms, and 2 for each draft and its row.
        assert kept == [3, 3]


def test_adaspec_is_off_where_drafts_fail_and_looks_again() -> None:
    policy = AdaSpecPolicy(TIERS, OnlineCost(FLAT, 0.01))
    for _ in range(60):
        tier = policy.choose(view(1)).tier
        policy.observe(told(1, tier, [0]))
    chosen = []
    for _ in range(300):
        chosen.append(policy.choose(view(1)).tier)
        policy.observe(told(1, chosen[-1], [0]))
    assert 1 <= sum(tier != OFF for tier in chosen) <= 4


def threshold_steps(policy: ThresholdPolicy, rows: list[list[float]]) -> int:
    """Drafts of a step in which the drafter says so of each request's tokens."""
    stop = policy.choose(view(len(rows))).stop
    assert stop is not None
    return stopped_steps(stop, np.array(rows))


def test_threshold_by_hand() -> None:
    """A chain ends behind its first token under 0.4; the step with the last chain, at 8."""
    policy = ThresholdPolicy(OFF)
    assert policy.tiers[-1].steps == 8
    policy.let_stop()
    assert threshold_steps(policy, [[0.9, 0.41, 0.39, 0.9, 0.9, 0.9, 0.9, 0.9]]) == 3
    assert threshold_steps(policy, [[0.1] * 8]) == 1
    assert threshold_steps(policy, [[0.41] * 8]) == 8
    # The other goes on alone, and who is done does not begin again.
    assert threshold_steps(policy, [[0.1] + [0.9] * 7, [0.5, 0.5, 0.5, 0.2] + [0.9] * 4]) == 4
    low = ThresholdPolicy(OFF, threshold=0.05)
    low.let_stop()
    assert threshold_steps(low, [[0.1] * 8]) == 8


def test_what_is_verified_by_hand() -> None:
    """The elimination by hand above, on what the drafter said of each draft."""
    drafted = np.array([[0.9] * 3, [0.2] * 3])
    stop = DraftStop(
        (12.0, 14.0, 16.0, 18.0), np.ones(2, np.float32),
        np.tile(((np.arange(1000) + 0.5) / 1000).astype(np.float32), (2, 1)),
        RowTimes(1.0, 0, 0.0),
    )  # fmt: skip
    assert verified_lengths(stop, drafted) == [3, 0]
    assert verified_lengths(replace(stop, rows=None), drafted) == [3, 3]
    # Rows are free up to the seventh: two go, and no more.
    assert verified_lengths(replace(stop, rows=RowTimes(0.0, 6, 1.0)), drafted) == [3, 1]
    # The drafter of the second is right however unsure it is.
    stop.curves[1] = 1.0
    assert verified_lengths(stop, drafted) == [3, 3]
