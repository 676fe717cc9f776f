"""Drafts that are stopped within a step: no text changes, and no more is verified than drafted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch

from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.engine import Engine
from overlap_spec.speculation.adaspec import predicted_steps
from overlap_spec.speculation.policy import LengthPolicy, StepOutcome, StepView
from overlap_spec.steps import StepResult
from overlap_spec.tiers import Budget, DraftStop, RowTimes, Tier
from overlap_spec.types import Output
from overlap_spec.worker.draft_stop import stops
from overlap_spec.worker.graphs import padded_size
from overlap_spec.worker.warm_up import prepare_next
from tests.support import chaos, ragged
from tests.support.policies import share_nodes
from tests.support.ragged import SAMPLING
from tests.support.ragged import results as results
from tests.support.tiers import few

CHAIN: dict[str, Any] = {"num_steps": 6, "context_length": 256}


def ends_at(steps: int, trees: int, longest: int) -> DraftStop:
    """Drafts are sure to be accepted, and cost nothing up to a length."""
    costs = tuple(1.0 if n <= steps else 1e9 for n in range(longest + 1))
    return DraftStop(costs, np.ones(trees, np.float32), np.ones((trees, 10), np.float32))


def stop_at(
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    lengths: Iterator[int],
    rows: RowTimes | None = None,
    curve: Sequence[float] = (1.0,) * 10,
) -> None:
    """Stop the drafts of every step at the next of ``lengths``; ``rows`` and ``curve`` are the
    stop's."""
    policy: LengthPolicy = engine.core.budgets.policy
    chosen = policy.choose

    def choose(view: StepView) -> Budget:
        budget = chosen(view)
        if not view.batch or not budget.tier.steps:
            return budget
        steps = budget.tier.steps
        stop = ends_at(next(lengths), view.batch, steps)
        stop.curves[:] = curve
        return replace(budget, stop=replace(stop, rows=rows))

    monkeypatch.setattr(policy, "choose", choose)


def answer(engine: Engine) -> list[Output]:
    return ragged.answer(engine, SAMPLING * 4)


# When drafts are stopped: 10 ms, and 2 for each length.

IDENTITY = [(n + 0.5) / 10 for n in range(10)]
COSTS = [10.0 + 2 * steps for steps in range(8)]


def asked(
    confidences: list[list[float]],
    expected: list[float],
    costs: list[float] = COSTS,
    curve: list[float] = IDENTITY,
) -> bool:
    """What is answered of these drafts, row by row, and a row of padding behind them."""
    rows = [*confidences, [0.99] * len(confidences[0])]
    scores = torch.tensor(rows).log()
    curves = torch.tensor([curve] * len(expected))
    return stops(scores, torch.tensor(expected), curves, costs)


def test_stop_by_hand() -> None:
    """1.9/12 = .158, expected 2.35/14 = .168; but with .2 2.08/14 = .149, expected 2.17/16."""
    assert not asked([[0.9]], [0.5])
    assert asked([[0.9, 0.2]], [0.5])
    # (2 + .9 + .1)/12 = .25, expected (3 + .45 + .05)/14 = .25 and no more, with .51 a little.
    assert asked([[0.9], [0.1]], [0.5, 0.5])
    assert not asked([[0.9], [0.1]], [0.51, 0.5])
    # The drafter is never so sure as it says: 1.45/12 = .121, expected 1.67/14 = .120.
    assert asked([[0.9]], [0.5], curve=[c / 2 for c in IDENTITY])


def test_stop_at_lengths_that_may_end_a_draft() -> None:
    """Where the time of a length is 0 it is not asked, and what it brings counts for the next."""
    gaps = [10.0, 12.0, 0.0, 16.0]
    # 1.8/12 = .15, expected (1.8 + .64 + .51)/16 = .18.
    assert not asked([[0.8]], [0.8], gaps)
    # 1.5/12 = .125, expected (1.5 + .2 + .08)/16 = .111.
    assert asked([[0.5]], [0.4], gaps)
    # Nothing is longer; a target is broken; a chain that cannot go on.
    assert asked([[1.0] * 3], [1.0], gaps)
    assert asked([[0.99]], [0.99], [10.0, 12.0, float("inf")])
    assert asked([[0.9, 0.0]], [0.9])


def test_drafts_as_sure_as_expected_end_where_predicted() -> None:
    for confidence in (0.3, 0.5, 0.7, 0.8, 0.9, 0.94):
        for slope in (0.2, 0.5, 1.0, 2.0):
            costs = [10.0 + slope * steps for steps in range(8)]
            predicted = predicted_steps([confidence] * 2, dict(enumerate(costs)), None)
            drafted = 1
            while not asked([[confidence] * drafted] * 2, [confidence] * 2, costs):
                drafted += 1
            assert drafted == max(1, predicted)


# Steps that are stopped


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any]) -> list[Output]:
    with Engine(**tiny, algorithm="none", overlap="none", context_length=256) as engine:
        return answer(engine)


@pytest.mark.parametrize(
    ("graphs", "overlap"), few([(True, "once-sync"), (False, "none")], (True, "once-sync"))
)
def test_stopped_drafts_change_no_text(
    tiny: dict[str, Any],
    plain: list[Output],
    results: list[StepResult],
    monkeypatch: pytest.MonkeyPatch,
    graphs: bool,
    overlap: str,
) -> None:
    """16 requests, greedy and sampled, with and without grammars, each step another length."""
    with Engine(**tiny, **CHAIN, graphs=graphs, overlap=overlap) as engine:
        assert engine.core.worker.traits.stops_drafts
        stop_at(monkeypatch, engine, cycle([1, 4, 2, 6, 3, 5]))
        outputs = answer(engine)
        assert engine.core.scheduler.allocator.in_use == 0
    for mine, its in zip(outputs, plain, strict=True):
        assert mine.token_ids == its.token_ids
        assert mine.finish_reason == its.finish_reason
        for a, b in zip(mine.logprobs, its.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    lengths = set()
    for result in results:
        trees, tier = len(result.plan.decode_rows), result.plan.tier
        if trees:
            rows = padded_size(trees) if graphs else trees
            assert result.verified_rows == rows * tier.nodes
            assert all(row.drafted < tier.nodes for row in result.rows)
            lengths.add(tier.steps)
    assert lengths == {1, 2, 3, 4, 5, 6}
    assert any(output.stats.accepted_drafts for output in outputs)


@pytest.mark.ci
def test_steps_draft_what_a_whole_draft_does(
    tiny: dict[str, Any], results: list[StepResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, confidences and all: only the recordings differ."""
    prompts = ["some prompt", "another one", "abcabcabc"]
    cut = {"max_tokens": 24, "complete": False}
    sampling = [cut, {"temperature": 0.8, "seed": 3, **cut}] * 2
    grammars = [None, chaos.GRAMMARS[1], chaos.GRAMMARS[2]]
    seen = []
    for stopped in (False, True):
        results.clear()
        with Engine(**tiny, **CHAIN, overlap="none") as engine:
            if stopped:
                stop_at(monkeypatch, engine, cycle([6]))
            engine.generate(prompts, grammars, sampling[:3])
        seen.append([row for result in results for row in result.rows])
    whole, steps = seen
    for mine, its in zip(steps, whole, strict=True):
        assert (mine.tokens, mine.drafted) == (its.tokens, its.drafted)
        assert mine.confidences == pytest.approx(its.confidences, abs=1e-5)
    assert any(row.accepted for row in whole)


def test_a_stopped_step_is_told_as_the_shorter_one(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[StepOutcome] = []
    with Engine(**tiny, **CHAIN) as engine:
        stop_at(monkeypatch, engine, cycle([2]))
        monkeypatch.setattr(engine.core.budgets.policy, "observe", told.append)
        engine.generate(["a prompt"], None, {"max_tokens": 12})
    verifies = [outcome for outcome in told if outcome.requests]
    assert len(verifies) > 1
    assert {outcome.budget for outcome in verifies} == {Budget(Tier(2, 1, 3))}
    assert {request.drafted for outcome in verifies for request in outcome.requests} == {2}


@pytest.mark.ci
def test_chaos_with_stopped_drafts(tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Random batches of random requests that preempt each other, every step another length."""
    first, settings = chaos.settings_of("chain", "crowded")
    oracle = chaos.build(tiny, overlap="none", algorithm="none")
    chaos.start(monkeypatch, first + 900)
    with oracle, chaos.build(tiny, **settings) as engine:
        stop_at(monkeypatch, engine, cycle([3, 1, 2, 1, 3]))
        chaos.outputs_equal(oracle, engine, first + 900, 5)


def test_shared_nodes_of_stopped_drafts(
    tiny: dict[str, Any], plain: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best nodes of the batch among what was drafted; fewer than were planned, where the
    drafts were stopped."""
    with Engine(**tiny, **CHAIN) as engine:
        share_nodes(monkeypatch, engine, lambda batch, _: 3 * batch)
        stop_at(monkeypatch, engine, cycle([1, 4, 6]))
        outputs = answer(engine)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_a_stop_leaves_out_what_is_worth_least(
    tiny: dict[str, Any],
    plain: list[Output],
    results: list[StepResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Algorithm 2 on what was drafted: no text changes, fewer rows are verified than drafted, and
    the policy is told how many."""
    told: list[StepOutcome] = []
    with Engine(**tiny, **CHAIN) as engine:
        stop_at(monkeypatch, engine, cycle([4, 6]), RowTimes(5e-3, 0, 0.0), [0.5] * 10)
        observe = engine.core.budgets.policy.observe
        monkeypatch.setattr(
            engine.core.budgets.policy, "observe", lambda o: (told.append(o), observe(o))
        )
        outputs = answer(engine)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    shared = [o for o in told if o.budget.nodes is not None]
    assert shared
    for outcome in shared:
        budget, trees = outcome.budget, outcome.view.batch
        assert trees <= (budget.nodes or 0) < trees * budget.tier.nodes
    packed = [r for r in results if r.plan.budget.nodes is not None]
    assert any(r.verified_rows < len(r.rows) * r.plan.tier.nodes for r in packed)


def test_a_drafter_that_raises_between_steps_costs_its_drafts(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no next draft")

    monkeypatch.setattr(TreeDrafter, "next_link", fails)
    with Engine(**tiny, **CHAIN) as engine:
        stop_at(monkeypatch, engine, cycle([4]))
        out = engine.generate(["a prompt"], None, {"max_tokens": 12})[0]
        assert engine.core.worker.guard.faults
    assert len(out.token_ids) == 12


def test_steps_are_recorded_ahead_of_the_first_request(tiny: dict[str, Any]) -> None:
    """With chains, whose drafts are those steps."""
    with Engine(**{**tiny, "adaptive": "adaspec"}, context_length=128) as engine:
        worker = engine.core.worker
        worker.do(prepare_next, [Tier(1, 1, 2)])
        worker.do(prepare_next, [Tier(1, 1, 2)])
        worker.rest()
        before = worker.recordings.count
        for kind in product((False, True), repeat=2):
            worker.recordings.chain(*kind)
        assert worker.recordings.count == before
