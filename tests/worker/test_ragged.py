"""Ragged verify: of a batch's drafted nodes only the best are verified, and no text changes."""

from typing import Any

import pytest

from overlap_spec.engine import Engine
from overlap_spec.steps import StepResult
from overlap_spec.types import Output
from overlap_spec.worker.graphs import padded_size
from tests.support import chaos
from tests.support.policies import share_nodes
from tests.support.ragged import BATCH, SAMPLING, answer
from tests.support.ragged import results as results
from tests.support.tiers import few

TREE = {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 16}


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any]) -> list[Output]:
    with Engine(**tiny, algorithm="none", overlap="none", context_length=256) as engine:
        return answer(engine, SAMPLING * 4)


@pytest.mark.parametrize("graphs", few((True, False), True))
@pytest.mark.parametrize("share", few((0.0, 0.1, 0.3, 0.6, 1.0), 0.3))
def test_fewer_nodes_change_no_text(
    tiny: dict[str, Any],
    plain: list[Output],
    results: list[StepResult],
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    graphs: bool,
) -> None:
    """T from a node a request to all that were drafted, of 16 requests with 16 nodes each."""
    with Engine(**tiny, **TREE, context_length=256, graphs=graphs) as engine:
        share_nodes(
            monkeypatch, engine, lambda batch, tier: batch + round(share * batch * (tier.nodes - 1))
        )
        outputs = answer(engine, SAMPLING * 4)
        assert engine.core.scheduler.allocator.in_use == 0
    for mine, its in zip(outputs, plain, strict=True):
        assert mine.token_ids == its.token_ids
        assert mine.finish_reason == its.finish_reason
        for a, b in zip(mine.logprobs, its.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    for result in results:
        budget, trees = result.plan.budget, len(result.plan.decode_rows)
        if trees:
            assert budget.nodes is not None
            padding = (padded_size(trees) if graphs else trees) - trees
            # What is asked for, rounded up to a size that is recorded.
            assert budget.nodes <= result.verified_rows <= padded_size(budget.nodes + padding)
            drafted = sum(row.drafted for row in result.rows[:trees])
            assert drafted + trees <= result.verified_rows
    if share == 0.0:
        assert all(output.stats.drafted_tokens == 0 for output in outputs)
    if share == 1.0:
        assert any(output.stats.accepted_drafts for output in outputs)


def test_the_best_nodes_of_the_batch_are_verified(
    tiny: dict[str, Any], results: list[StepResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests share what is verified: not every one gets as much."""
    with Engine(**tiny, **TREE, context_length=256) as engine:
        share_nodes(monkeypatch, engine, lambda batch, _: 4 * batch)
        answer(engine, SAMPLING * 4)
    shares = {row.drafted for result in results for row in result.rows if row.drafted}
    assert len(shares) > 3
    for result in results:
        for row in result.rows:
            assert len(row.confidences) in (row.accepted, row.accepted + 1)
            assert all(0 < confidence <= 1.0001 for confidence in row.confidences)


@pytest.mark.clock
@pytest.mark.parametrize("overlap", few(("none", "once-sync"), "once-sync"))
def test_a_request_without_speculation_costs_one_node(
    tiny: dict[str, Any], plain: list[Output], results: list[StepResult], overlap: str
) -> None:
    sampling = [{**s, "speculate": n % 3 == 0} for n, s in enumerate(SAMPLING * 4)]
    # All prompts in one step, so that all requests decode together once.
    own = {**TREE, "context_length": 256, "chunked_prefill_size": 512}
    with Engine(**tiny, **own, overlap=overlap) as engine:
        outputs = answer(engine, sampling)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    for output, asked in zip(outputs, sampling, strict=True):
        assert bool(output.stats.drafted_tokens) == asked["speculate"]
    full = [r for r in results if len(r.plan.decode_rows) == BATCH]
    assert full
    wanted = 6 * TREE["num_draft_tokens"] + 10
    assert all(wanted <= r.verified_rows <= padded_size(wanted) for r in full)


@pytest.mark.ci
@pytest.mark.parametrize("room", chaos.ROOM)
def test_chaos_with_ragged_verifies(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """Random batches of random requests, each with another number of nodes a step."""
    first, settings = chaos.settings_of("tree", room)
    oracle = chaos.build(tiny, overlap="none", algorithm="none")
    chaos.start(monkeypatch, first + 500)
    with oracle, chaos.build(tiny, **settings) as engine:
        calls = iter(range(10**9))
        share_nodes(
            monkeypatch,
            engine,
            lambda batch, tier: batch + next(calls) * 7 % (batch * (tier.nodes - 1) + 1),
        )
        chaos.outputs_equal(oracle, engine, first + 500, 8)
