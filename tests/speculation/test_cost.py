"""The cost model: its formula by hand, its fit, and what it learns from whole steps."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overlap_spec.engine.start_up import fit_times, startup_fit, startup_points, tier_points
from overlap_spec.speculation.cost import (
    ASSUMED,
    ASSUMED_SPREAD,
    STARTUP_SPREAD,
    CostModel,
    DraftTime,
    TierTime,
    VerifyTime,
    fit,
    load_profile,
    nonnegative,
    profile_path,
    save_profile,
    shape_of,
)
from overlap_spec.speculation.online_cost import OnlineCost
from overlap_spec.tiers import Budget, Tier
from overlap_spec.worker.pass_times import PassTimes, Point
from tests.support.simulated import MACHINES

MODEL = CostModel(
    verify=10.0, verify_node=0.5, verify_context=0.01,
    draft=2.0, draft_branch=0.1, draft_context=0.001,
    knee_nodes=8, knee_node=1.0, grammar_node=0.25, prefill=3.0, prefill_token=0.2,
    host=0.5, host_tree=0.1,
)  # fmt: skip
OFF, CHAIN, TREE = Budget(Tier(0, 1, 1)), Budget(Tier(3, 1, 4)), Budget(Tier(3, 4, 16))


def test_step_time_by_hand() -> None:
    """Two trees of 16 nodes after 100 tokens each, one with a grammar, beside a chunk of 10."""
    shape = shape_of(TREE, 2, 200, constrained=1, chunk_tokens=10)
    assert (shape.nodes, shape.grammar_nodes) == (32, 16)
    verify = 10 + 0.5 * 32 + 1.0 * (32 - 8) + 0.01 * 200
    draft = 3 * (2.0 + 0.1 * 2 * 4 + 0.001 * 200)
    beside = 0.25 * 16 + 3 + 0.2 * 10 + 0.5 + 0.1 * 2
    assert MODEL.step_ms(shape) == pytest.approx(verify + draft + beside)
    assert MODEL.step_ms(shape_of(OFF, 1, 0)) == pytest.approx(11.1)
    ragged = Budget(TREE.tier, 5, (16, 16))
    assert shape_of(ragged, 2, 0).nodes == 5


def test_nonnegative_least_squares() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative(rows, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])
    # The best line falls: with slopes >= 0 that is the mean.
    assert nonnegative(rows, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0], abs=1e-9)
    # A column of zeros stays out.
    assert nonnegative(np.array([[2.0, 0.0]]), np.array([4.0])) == pytest.approx([2.0, 0.0])


def test_fit_finds_the_lines_and_the_knee() -> None:
    verifies = [
        VerifyTime(n, c, MODEL.verify_ms(n, c)) for n in (1, 2, 4, 8, 16, 32) for c in (0, 500)
    ]
    drafts = [
        DraftTime(b, c, s, k, MODEL.draft_ms(b, s, k, c))
        for b in (1, 4) for s in (1, 3) for k in (1, 4) for c in (0, 500)
    ]  # fmt: skip
    found = fit(verifies, drafts, "here")
    assert (found.knee_nodes, found.source, found.most_nodes) == (8, "here", 32)
    for name in ("verify", "verify_node", "knee_node", "verify_context", "draft"):
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=1e-6)
    assert found.worst_error == pytest.approx(0, abs=1e-9)


def test_fit_of_a_single_pass() -> None:
    """What it cannot tell is as assumed, in its unit."""
    found = fit([VerifyTime(4, 0, 8.0)], [], "x")
    assert found.verify_ms(4, 0) == pytest.approx(8.0)
    unit = 8.0 / ASSUMED.verify_ms(4, 0)
    assert found.verify_node == pytest.approx(unit * ASSUMED.verify_node)
    assert found.verify_context == pytest.approx(unit * ASSUMED.verify_context)
    assert found.draft == pytest.approx(unit * ASSUMED.draft)
    assert found.grammar_node == pytest.approx(unit * ASSUMED.grammar_node)


# Online


def feed(cost: OnlineCost, budget: Budget, step_ms: float, steps: int = 30) -> None:
    for _ in range(steps):
        cost.observe(shape_of(budget, 1, 100), budget, step_ms)


def ratio(cost: OnlineCost, budget: Budget, other: Budget) -> float:
    shapes = [shape_of(b, 1, 100) for b in (budget, other)]
    return cost.step_ms(shapes[0], budget) / cost.step_ms(shapes[1], other)


def test_a_busier_machine_changes_no_tier_over_another() -> None:
    cost = OnlineCost(MODEL, 0.1)
    before = ratio(cost, CHAIN, OFF)
    feed(cost, CHAIN, 3 * MODEL.step_ms(shape_of(CHAIN, 1, 100)), 200)
    assert cost.step_ms(shape_of(OFF, 1, 100), OFF) == pytest.approx(
        3 * MODEL.step_ms(shape_of(OFF, 1, 100)), rel=0.15
    )
    assert ratio(cost, CHAIN, OFF) == pytest.approx(before, rel=0.1)


def test_what_a_step_takes_beside_its_passes_is_learnt() -> None:
    """Passes alone were measured. Twice as deep drafts take no twice as long where planning and
    results take half of a step."""
    passes = fit(
        [VerifyTime(1, 0, 0.5), VerifyTime(6, 0, 1.0), VerifyTime(24, 0, 2.8)],
        [DraftTime(1, 0, 5, 1, 0.5), DraftTime(4, 0, 5, 1, 0.8)],
        "measured",
    )
    cost = OnlineCost(passes, 0.1)
    some, deep = Budget(Tier(1, 1, 2)), Budget(Tier(5, 1, 6))

    def true_ms(budget: Budget) -> float:
        return passes.step_ms(shape_of(budget, 8, 800)) + 1.5

    for _ in range(40):
        for _ in range(5):
            cost.observe(shape_of(some, 8, 800), some, true_ms(some))
        cost.observe(shape_of(OFF, 1, 100), OFF, true_ms(OFF))
    foretold = cost.step_ms(shape_of(deep, 8, 800), deep)
    assert foretold == pytest.approx(true_ms(deep), rel=0.15)


def test_what_was_measured_of_a_tier_is_where_it_starts() -> None:
    """Between the depths that were measured, at the nearest batch, of the same width alone."""
    over = ((0, 1, 1, 1.0), (3, 1, 1, 1.2), (3, 1, 8, 1.5))
    cost = OnlineCost(replace(MODEL, tiers=tuple(TierTime(*each) for each in over)), 0.1)
    for budget, batch, wanted in ((CHAIN, 1, 1.2), (OFF, 1, 1.0), (CHAIN, 4, 1.5), (TREE, 1, 1.0)):
        shape = shape_of(budget, batch, 100)
        assert cost.step_ms(shape, budget) == pytest.approx(wanted * MODEL.step_ms(shape), rel=1e-3)
    two = Budget(Tier(2, 1, 3))
    shape = shape_of(two, 1, 100)
    assert 1.1 < cost.step_ms(shape, two) / MODEL.step_ms(shape) < 1.2


def test_a_fit_keeps_what_its_lines_do_not_tell() -> None:
    points = [Point(tier, batch) for tier in (OFF.tier, CHAIN.tier, TREE.tier) for batch in (1, 4)]
    times = [
        PassTimes(p, 2.0 * p.tier.steps, (10.0 + p.batch * p.tier.nodes) * (1 + p.tier.steps % 2))
        for p in points
    ]
    model = fit_times(times, "test")
    for point, draft_ms, verify_ms in times:
        tier, batch = point.tier, point.batch
        over = next(t.over for t in model.tiers if t[:3] == (tier.steps, tier.top_k, batch))
        told = model.verify_ms(batch * tier.nodes, 0) + model.draft_ms(
            batch, tier.steps, tier.top_k, 0
        )
        assert over * told == pytest.approx(draft_ms + verify_ms)
    assert CostModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    with pytest.raises(ValueError, match="tier's time"):
        CostModel.from_dict(model.to_dict() | {"tiers": [[3, 1, 1, 0.0]]})


def test_a_switch_tells_what_a_tier_costs() -> None:
    """Chains take 1.15 times what the fit says of them, the rest what it says."""
    cost = OnlineCost(MODEL, 0.1)
    for _ in range(4):
        feed(cost, OFF, MODEL.step_ms(shape_of(OFF, 1, 100)))
        feed(cost, CHAIN, 1.15 * MODEL.step_ms(shape_of(CHAIN, 1, 100)))
    wanted = 1.15 * MODEL.step_ms(shape_of(CHAIN, 1, 100)) / MODEL.step_ms(shape_of(OFF, 1, 100))
    assert ratio(cost, CHAIN, OFF) == pytest.approx(wanted, rel=0.06)


def test_a_ratio_that_nothing_explains_is_the_load() -> None:
    """Five times as slow, right at a switch: what chains cost over nothing hardly moves."""
    cost = OnlineCost(MODEL, 0.1)
    feed(cost, OFF, MODEL.step_ms(shape_of(OFF, 1, 100)))
    before = ratio(cost, CHAIN, OFF)
    feed(cost, CHAIN, 5 * MODEL.step_ms(shape_of(CHAIN, 1, 100)))
    assert ratio(cost, CHAIN, OFF) == pytest.approx(before, rel=0.1)


def test_short_answers_tell_what_a_step_costs() -> None:
    """Of four steps at most alike in a row, of a batch that shrinks as its requests end."""
    machine, cost = MACHINES["cpu"], OnlineCost(MACHINES["cpu"], 0.1)
    slow = 1.3
    for _ in range(8):
        for batch in (8, 8, 8, 8, 7, 5, 2, 1):
            shape = shape_of(CHAIN, batch, 100 * batch)
            cost.observe(shape, CHAIN, slow * machine.step_ms(shape))
    for batch in (8, 6, 2):
        shape = shape_of(CHAIN, batch, 100 * batch)
        assert cost.step_ms(shape, CHAIN) == pytest.approx(slow * machine.step_ms(shape), rel=0.05)


def test_nothing_known_is_learnt() -> None:
    """From coefficients in no unit to a machine's, out of three tiers at two batches."""
    machine, rng = MACHINES["cpu"], random.Random(2)
    cost = OnlineCost(CostModel(0.9, 0.02, 2e-5, 0.08, 0.005, 2e-6), 0.7)
    for _ in range(10):
        for budget in (OFF, CHAIN, TREE):
            for batch in (1, 8):
                shape = shape_of(budget, batch, 100 * batch)
                for _ in range(9):
                    step_ms = machine.step_ms(shape) * rng.lognormvariate(0, 0.05)
                    cost.observe(shape, budget, step_ms)
    for budget in (OFF, CHAIN, TREE):
        for batch in (1, 8):
            shape = shape_of(budget, batch, 100 * batch)
            assert cost.step_ms(shape, budget) == pytest.approx(machine.step_ms(shape), rel=0.06)


def test_the_error_of_a_comparison_shrinks_as_it_is_seen() -> None:
    cost = OnlineCost(MODEL, 0.3)
    chain, off = (shape_of(b, 1, 100) for b in (CHAIN, OFF))
    over = np.array([1.0, -1.0])

    def compare() -> tuple[float, float]:
        log_ms, spread = cost.compare([(chain, CHAIN), (off, OFF)])
        return over @ log_ms, over @ spread @ over

    before = compare()[1]
    for _ in range(3):
        feed(cost, OFF, MODEL.step_ms(off))
        feed(cost, CHAIN, MODEL.step_ms(chain))
    gain, after = compare()
    assert after < before / 4
    assert gain == pytest.approx(np.log(MODEL.step_ms(chain) / MODEL.step_ms(off)), abs=0.03)


# Profiles


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_profile_is_found_again_by_its_key_alone(cache: Path) -> None:
    key = {"model": {"hidden_size": 8}, "threads": 2}
    assert load_profile(key) is None
    path = save_profile(key, MODEL)
    assert path.is_relative_to(cache)
    assert load_profile(key) == MODEL
    assert load_profile(key | {"threads": 1}) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"cost": {"verify": 1}}', '{"cost": {"nodes": 2}}'])
@pytest.mark.usefixtures("cache")
def test_a_broken_profile_is_passed_over(caplog: pytest.LogCaptureFixture, text: str) -> None:
    path = profile_path({})
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert load_profile({}) is None
    assert "run overlap-spec profile again" in caplog.text


def test_what_is_measured_of_recorded_tiers() -> None:
    """The extremes of all tiers and the largest batch first; nothing twice."""
    off, launch, long, narrow, wide = (
        Tier(0, 1, 1), Tier(5, 1, 6), Tier(7, 1, 8), Tier(3, 4, 16), Tier(5, 4, 16)
    )  # fmt: skip
    points = tier_points((off, launch, long, narrow, wide), launch, 4)
    extremes = launch, wide, long, off
    wanted = [*(Point(tier, 1) for tier in extremes), Point(launch, 4), Point(narrow, 1)]
    assert points == wanted + [Point(tier, 4) for tier in (wide, long, off)]
    alone = tier_points((launch,), launch, 1)
    assert alone == [Point(launch, 1)]


def test_too_few_points_at_start_tell_the_unit_alone() -> None:
    point = PassTimes(Point(Tier(0, 1, 1), 1), 0.0, 46.0)
    model, spread = startup_fit([point])
    assert spread == ASSUMED_SPREAD
    assert model.verify_ms(1, 0) == pytest.approx(46.0)
    assert model.draft / model.verify == pytest.approx(ASSUMED.draft / ASSUMED.verify)
    # Two sizes tell what a row costs, however vaguely.
    chain = PassTimes(
        Point(CHAIN.tier, 1), MODEL.draft_ms(1, 3, 1, 0), MODEL.verify_ms(CHAIN.tier.nodes, 0)
    )
    model, spread = startup_fit([PassTimes(point.point, 0.0, MODEL.verify_ms(1, 0)), chain])
    assert spread == ASSUMED_SPREAD
    assert model.verify_node == pytest.approx(MODEL.verify_node)
    times = [
        PassTimes(
            Point(tier, batch), MODEL.draft_ms(batch, tier.steps, tier.top_k, 0),
            MODEL.verify_ms(batch * tier.nodes, 0),
        )
        for tier in (OFF.tier, CHAIN.tier, TREE.tier) for batch in (1, 2, 4)
    ]  # fmt: skip
    model, spread = startup_fit(times)
    assert spread == STARTUP_SPREAD
    assert model.draft == pytest.approx(MODEL.draft, rel=0.01)


def test_what_a_start_measures_tells_a_pass_over_few_rows() -> None:
    """Reading the weights bounds it: what larger passes take, drawn through, would say a fourth."""
    machine = CostModel(43.0, 1.0, 0.0, 1.4, 0.1, 0.0, knee_nodes=4, knee_node=8.0)
    off, chain = Tier(0, 1, 1), Tier(5, 1, 6)
    times = [
        PassTimes(
            point,
            machine.draft_ms(point.batch, point.tier.steps, 1, 0),
            machine.verify_ms(point.batch * point.tier.nodes, 0),
        )
        for point in startup_points(chain, (off, chain), 4)
    ]
    model, _ = startup_fit(times)
    for rows in (1, 2, 3, 4, 6, 8, 24):
        assert model.verify_ms(rows, 0) == pytest.approx(machine.verify_ms(rows, 0), rel=0.25), rows
