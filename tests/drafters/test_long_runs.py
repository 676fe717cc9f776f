"""Runs that are longer than a draft is deep: one verify, and the text of plain decoding."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from overlap_spec.drafters.base import Draft
from overlap_spec.engine import Engine
from overlap_spec.engine.grammar_drafts import WIDE_NODES, WIDE_STEPS, GrammarDrafts, wide_tier
from overlap_spec.grammar.drafting.forced import ForcedRuns
from overlap_spec.grammar.drafting.guesses import Guesses
from overlap_spec.grammar.matching.pool import MatcherPool
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.steps import RUN_TOKENS, HostTrees
from overlap_spec.tiers import Tier
from overlap_spec.types import Output
from overlap_spec.worker.grammar_drafts import lengthen
from overlap_spec.worker.worker import Worker
from tests.support import chaos
from tests.support.grafts import PERSON, PROMPTS, key, lengths, roots_of
from tests.support.tiers import few

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 3},
    "tree": {"num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 9},
}
SAMPLINGS: list[dict[str, Any]] = [
    {"max_tokens": 96, "temperature": 0},
    {"max_tokens": 96, "temperature": 1, "seed": 5, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def still(tiny: dict[str, Any]) -> dict[str, Any]:
    """No deadline: a busy machine must not fail a test."""
    return {**tiny, "mask_deadline_ms": None, "tries": True, "context_length": 256}


def answers(engine: Engine) -> list[Output]:
    """Together with requests that have nothing forced."""
    grammars = [PERSON, None, PERSON, PERSON]
    return [
        output
        for sampling in SAMPLINGS
        for output in engine.generate([*PROMPTS, "abc"], grammars, sampling)
    ]


@pytest.fixture(scope="module")
def plain(still: dict[str, Any]) -> list[Output]:
    with Engine(**still, algorithm="none", overlap="none") as engine:
        return answers(engine)


@pytest.mark.parametrize("shape", few(SHAPES, "chain"))
@pytest.mark.parametrize("algorithm", few(("eagle3", "ngram", "draft_model", "grammar"), "eagle3"))
def test_a_run_beyond_the_depth_is_one_verify(
    still: dict[str, Any], plain: list[Output], algorithm: str, shape: str
) -> None:
    settings = {**still, "algorithm": algorithm, **SHAPES[shape]}
    if algorithm == "draft_model":
        settings["draft"] = still["model"]
    found = {}
    for overlap in ("none", "once-sync"):
        with Engine(**settings, overlap=overlap) as engine:
            assert engine.core.budgets.widens
            outputs = answers(engine)
            assert key(outputs) == key(plain)
            assert engine.snapshot()["drafter"]["faults"] == 0
            assert engine.snapshot()["pages_in_use"] == 0
            found[overlap] = lengths(outputs)
            if overlap == "once-sync":
                engine.core.budgets.widens = False
                short = answers(engine)
                assert key(short) == key(plain)
    assert found["none"] == found["once-sync"]
    for number, (long, cut) in enumerate(zip(outputs, short, strict=True)):
        if number % 4 != 1:
            assert long.stats.verifies < cut.stats.verifies
            assert len(long.stats.accept_histogram) > RUN_TOKENS - 1
            assert long.stats.accepted_grafts == long.stats.grafted_tokens
            assert len(cut.stats.accept_histogram) <= SHAPES[shape]["num_steps"] + 1


def test_a_key_of_fifteen_tokens_is_one_verify(still: dict[str, Any]) -> None:
    settings = {**still, "algorithm": "grammar", "num_steps": 2}
    with Engine(**settings) as engine:
        cut = {"max_tokens": 17, "temperature": 0, "complete": False}
        (output,) = engine.generate(PROMPTS[:1], PERSON, cut)
    # A token of the prefill, then fifteen forced ones and a bonus.
    assert (output.stats.verifies, output.stats.accepted_grafts) == (1, 15)
    assert output.text == '{"street_address"'


@pytest.mark.ci
@pytest.mark.parametrize("hostile", ["often", "always"])
@pytest.mark.parametrize(("shape", "wide"), [("chain", True), ("tree", True), ("tree", False)])
def test_chaos_with_runs_that_are_wrong(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, shape: str, wide: bool, hostile: str
) -> None:
    """Wrong behind the depth of a draft, or everywhere but in the first token."""
    right = ForcedRuns.tokens

    def corrupt(self: ForcedRuns, text: bytes, guesses: Guesses) -> list[int]:
        run = right(self, text, guesses)
        if hostile == "always":
            return [*run[:1], *[200] * (RUN_TOKENS - 1)] if run else []
        return [200 if at > 3 and (at + len(text)) % 4 == 0 else t for at, t in enumerate(run)]

    first, settings = 7000, {**SHAPES[shape], "mask_deadline_ms": None, "tries": wide}
    # A few hundred tokens of cache, and slots of wide trees: running requests preempt each other.
    small = {"page_size": 4, "max_running_requests": 2, "max_total_tokens": 300}
    oracle = chaos.build(tiny, overlap="none", algorithm="none")
    monkeypatch.setattr(ForcedRuns, "tokens", corrupt)
    chaos.start(monkeypatch, first)
    with oracle, chaos.build(tiny, **settings, **small, adaptive="static") as engine:
        assert engine.core.budgets.widens == wide
        chaos.outputs_equal(oracle, engine, first, 8)
        assert engine.snapshot()["drafter"]["faults"] == 0


def paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The paths of all living nodes, in node order; a parent lives and comes earlier."""
    assert draft.parents is not None
    found: dict[int, tuple[int, ...]] = {0: ()}
    for at, score in enumerate(draft.scores[row].tolist()):
        if score > -np.inf:
            above = int(draft.parents[row, at])
            assert above <= at
            assert score <= (float(draft.scores[row, above - 1]) if above else 0.0)
            found[at + 1] = (*found[above], int(draft.tokens[row, at]))
    assert len(set(found.values())) == len(found)
    return list(found.values())[1:]


def test_the_rest_of_a_run_follows_what_is_drafted_of_it() -> None:
    base = Tier(3, 1, 4)
    tier = Tier(6, 2, 9, base)
    runs = [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 9, 8], [7], [], [1, 2, 3, 4, 5, 6, 7, 8]]
    tokens, scores = torch.tensor([[1, 2, 3]] * 6), torch.tensor([[0.0, 0.0, -0.5]] * 6)
    draft = lengthen(Draft(tokens, None, scores), roots_of(runs), tier)
    assert draft.tokens.shape == draft.scores.shape == (6, 8)
    own = [(1,), (1, 2), (1, 2, 3)]
    assert [paths(draft, row)[:3] for row in range(6)] == [own] * 6
    assert [paths(draft, row)[3:] for row in range(6)] == [
        [(1, 2, 3, 4), (1, 2, 3, 4, 5)],
        [],
        [(1, 2, 9), (1, 2, 9, 8)],
        [(7,)],
        [],
        # No deeper than the tier.
        [(1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6)],
    ]


def test_the_rest_of_a_run_in_a_tree_with_dead_nodes() -> None:
    base = Tier(2, 2, 6)
    tier = Tier(5, 2, 9, base)
    # A dead node is no part of the run, whatever its token.
    tokens, parents = torch.tensor([[1, 4, 2, 3, 2]] * 2), torch.tensor([[0, 0, 1, 1, 2]] * 2)
    scores = torch.tensor([[0.0, -1.0, 0.0, -1.0, -2.0], [0.0, -1.0, -np.inf, -1.0, -2.0]])
    draft = lengthen(Draft(tokens, parents, scores), roots_of([[1, 2, 6, 7]] * 2), tier)
    assert paths(draft, 0)[5:] == [(1, 2, 6), (1, 2, 6, 7)]
    assert paths(draft, 1)[4:] == [(1, 2), (1, 2, 6), (1, 2, 6, 7)]


def test_a_wide_tier_has_room_for_a_whole_run() -> None:
    for base in (Tier(1, 1, 2), Tier(5, 1, 6), Tier(5, 4, 16), Tier(6, 8, 60), Tier(20, 1, 21)):
        wide = wide_tier(base)
        assert wide.own is base
        assert wide.steps == max(WIDE_STEPS, base.steps)
        assert wide.nodes >= max(WIDE_NODES, base.nodes + wide.steps - base.steps)
        assert wide.top_k > 1


def test_sizes_go_by_the_longest_run_of_a_tree() -> None:
    def sequence(number: int, constrained: bool, speculate: bool = True) -> Sequence:
        sampling = SimpleNamespace(speculate=speculate)
        request = SimpleNamespace(id=number, sampling=sampling)
        matcher = object() if constrained else None
        found = SimpleNamespace(request=request, matcher=matcher)
        return cast(Sequence, found)

    traits = SimpleNamespace(reads_states=False)
    worker, pool = SimpleNamespace(rows=4, traits=traits), MatcherPool()
    trees = GrammarDrafts(cast(Worker, worker), pool, Vocabulary((b"",), 1, (0,), frozenset()))
    tier = Tier(2, 1, 3)
    everyone = [sequence(4, True), sequence(5, True), sequence(6, False), sequence(7, True, False)]
    assert trees.sizes(everyone, tier) == [0, 0, 0, 0]
    runs = np.full((7, RUN_TOKENS), -1, np.int32)
    # Behind the nodes of the first tree 4 and 2 tokens, behind the others' 3, 9 and 9.
    for node, count in enumerate((4, 2, 0, 3, 9, 0, 9)):
        runs[node, :count] = 7
    none = np.zeros(7, np.int64)
    told = HostTrees(none, none, none, np.array([0, 2, 4, 5, 7]), runs, none, runs)
    trees.note([4, 8, 6, 7], told)
    assert trees.sizes(everyone, tier) == [4, 0, 0, 0]
    assert trees.sizes(everyone, Tier(3, 1, 4)) == [0, 0, 0, 0]
    assert trees.sizes(everyone, wide_tier(Tier(2, 1, 3))) == [4, 0, 0, 0]
