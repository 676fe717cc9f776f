"""Drafts that are stopped within a step: no text changes, and no more is verified than drafted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.engine import Engine
from overlap_spec.speculation.policy import LengthPolicy, StepOutcome, StepView
from overlap_spec.types import Budget, DraftStop, Floats, Output, StepResult, Tier
from overlap_spec.worker.graphs import padded_size
from tests.support.policies import share_nodes
from tests.worker import test_overlap, test_ragged

CHAIN: dict[str, Any] = {"num_steps": 6, "adaptive": "static", "context_length": 256}
SAMPLING = test_ragged.SAMPLING


@dataclass(frozen=True)
class StopAt(DraftStop):
    """Ends the drafts at a length, having seen as many log-probabilities as there are drafts."""

    steps: int
    trees: int

    def stops(self, log_probs: Floats) -> bool:
        assert log_probs.shape[0] == self.trees
        assert log_probs.dtype == np.float32
        assert (log_probs <= 1e-5).all()
        return log_probs.shape[1] >= self.steps


def stop_at(monkeypatch: pytest.MonkeyPatch, engine: Engine, lengths: Iterator[int]) -> None:
    """Stop the drafts of every step at the next of ``lengths``."""
    policy: LengthPolicy = engine.core.policy
    chosen = policy.choose

    def choose(view: StepView) -> Budget:
        budget = chosen(view)
        if not view.batch or not budget.tier.steps:
            return budget
        return replace(budget, stop=StopAt(next(lengths), view.batch))

    monkeypatch.setattr(policy, "choose", choose)


def answer(engine: Engine) -> list[Output]:
    return test_ragged.answer(engine, SAMPLING * 4)


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any]) -> list[Output]:
    with Engine(**tiny, algorithm="none", overlap="none", context_length=256) as engine:
        return answer(engine)


results = test_ragged.results


@pytest.mark.parametrize(("graphs", "overlap"), [(True, "once-sync"), (False, "none")])
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
        assert engine.core.worker.stops_drafts
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


def test_steps_draft_what_a_whole_draft_does(
    tiny: dict[str, Any], results: list[StepResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, confidences and all: only the recordings differ."""
    prompts = ["some prompt", "another one", "abcabcabc"]
    sampling = [{"max_tokens": 24}, {"temperature": 0.8, "seed": 3, "max_tokens": 24}] * 2
    grammars = [None, test_overlap.GRAMMARS[1], test_overlap.GRAMMARS[2]]
    seen = []
    for stops in (False, True):
        results.clear()
        with Engine(**tiny, **CHAIN, overlap="none") as engine:
            if stops:
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
        monkeypatch.setattr(engine.core.policy, "observe", told.append)
        engine.generate(["a prompt"], None, {"max_tokens": 12})
    verifies = [outcome for outcome in told if outcome.requests]
    assert len(verifies) > 1
    assert {outcome.budget for outcome in verifies} == {Budget(Tier(2, 1, 3))}
    assert {request.drafted for outcome in verifies for request in outcome.requests} == {2}


@pytest.mark.parametrize("room", test_overlap.ROOM)
def test_chaos_with_stopped_drafts(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """17 random batches of random requests, every step stopped at another length."""
    first, settings = test_overlap.settings_of("chain", room)
    oracle = test_overlap.build(tiny, overlap="none", algorithm="none")
    test_overlap.chaos(monkeypatch, first + 900)
    with oracle, test_overlap.build(tiny, **settings) as engine:
        stop_at(monkeypatch, engine, cycle([3, 1, 2, 1, 3]))
        test_overlap.outputs_equal(oracle, engine, first + 900)


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


def test_a_drafter_that_raises_between_steps_costs_its_drafts(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no next draft")

    monkeypatch.setattr(TreeDrafter, "next_link", fails)
    with Engine(**tiny, **CHAIN) as engine:
        stop_at(monkeypatch, engine, cycle([4]))
        out = engine.generate(["a prompt"], None, {"max_tokens": 12})[0]
        assert engine.core.drafter.faults
    assert len(out.token_ids) == 12
