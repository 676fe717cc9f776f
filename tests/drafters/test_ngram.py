"""The n-gram drafter: against a plain search of the text, its options, its bounds, and no leaks."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.ngram import NgramDrafter, draft_of
from overlap_spec.drafters.text_pool import END, TOKENS_A_STEP
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.steps import History
from overlap_spec.tiers import Tier
from tests.support.counted import lines_run

CHAIN = Tier(5, 1, 6)
TREE = Tier(4, 3, 10)
VOCABULARY = 1000
REQUESTS = count(1000)


def drafter(**settings: Any) -> NgramDrafter:
    return NgramDrafter(EngineConfig(**settings), VOCABULARY)


def history(tokens: Iterable[int], request: int = 0) -> History:
    return History(request, list(tokens), [])


def chain(of: NgramDrafter, tokens: Iterable[int], tier: Tier = CHAIN) -> list[int]:
    """The draft of a request that was not there before."""
    (draft,) = of.propose([history(tokens, next(REQUESTS))], tier)
    return draft.tokens.tolist()


def searched(text: list[int], size: int, steps: int, oldest: bool) -> list[int]:
    """What a chain must be: a search of the text from end to end."""
    for length in range(min(size, len(text) - 1), 0, -1):
        starts = [s for s in range(len(text) - length) if text[s:][:length] == text[-length:]]
        if starts:
            at = (starts[0] if oldest else starts[-1]) + length
            period = len(text) - at
            return [text[at + i % period] for i in range(steps)]
    return []


@pytest.mark.parametrize("keep_all", [True, False])
@pytest.mark.parametrize("oldest", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_chain_is_what_a_plain_search_finds(size: int, oldest: bool, keep_all: bool) -> None:
    rng = random.Random(size)
    for _ in range(40):
        of = drafter(ngram_max_matching_size=size, ngram_use_oldest=oldest, ngram_keep_all=keep_all)
        letters, prompt, output = rng.randint(1, 6), [], []
        known = History(7, prompt, output)
        prompt += [rng.randrange(letters) for _ in range(rng.randint(1, 30))]
        for _ in range(20):
            output += [rng.randrange(letters) for _ in range(rng.randint(1, 4))]
            (draft,) = of.propose([known], CHAIN)
            # One continuation is kept: the first one, which is the longest.
            want = searched([*prompt, *output], size, CHAIN.steps, oldest or not keep_all)
            assert draft.tokens.tolist() == want
            assert (draft.parents == np.arange(len(want))).all()
            assert (np.diff(draft.scores, prepend=0.0) < 0).all()


def test_prompt_and_output_are_both_searched() -> None:
    of = drafter()
    (draft,) = of.propose([History(0, [1, 2, 3, 4, 5, 6, 9], [8, 1, 2, 3])], CHAIN)
    assert draft.tokens.tolist() == [4, 5, 6, 9, 8]
    (draft,) = of.propose([History(0, [1, 2, 3, 4, 5, 6, 9], [8, 1, 2, 3, 7, 8, 1])], CHAIN)
    assert draft.tokens.tolist() == [2, 3, 7, 8, 1]


def test_options_say_which_continuation() -> None:
    text = [1, 2, 10, 11, 1, 2, 20, 21, 1, 2, 30, 31, 1, 2]
    assert chain(drafter(), text)[:2] == [30, 31]
    assert chain(drafter(ngram_use_oldest=True), text)[:2] == [10, 11]
    assert chain(drafter(ngram_keep_all=False), text)[:2] == [10, 11]
    assert chain(drafter(ngram_max_matching_size=1), [5, 1, 2, 6, 9, 2, 7, 5, 1, 2])[0] == 7
    assert chain(drafter(), [5, 1, 2, 6, 9, 2, 7, 5, 1, 2])[0] == 6
    assert chain(drafter(), [1, 2, 3, 4]) == []


def test_a_tree_where_several_continuations_match() -> None:
    text = [1, 2, 10, 11, 1, 2, 20, 21, 1, 2, 10, 12, 1, 2]
    (draft,) = drafter().propose([history(text)], TREE)
    paths: list[list[int]] = [[]]
    assert draft.parents is not None
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        assert parent < len(paths)
        paths.append([*paths[parent], token])
    assert len(paths) == TREE.nodes
    assert len({tuple(path) for path in paths}) == len(paths)
    # Two of three went on with 10, and each of these in its own way.
    first = [path[0] for path in paths if len(path) == 1]
    assert first == [10, 20]
    assert [10, 11] in paths
    assert [10, 12] in paths
    assert max(len(path) for path in paths) <= TREE.steps
    # A match of 2 tokens counts 2: 4 and 2 of 7.
    scores = dict(zip(map(tuple, paths[1:]), draft.scores.tolist(), strict=True))
    assert scores[(10,)] == pytest.approx(np.log(4 / 7))
    assert scores[(20,)] == pytest.approx(np.log(2 / 7))
    assert scores[(10, 11)] == pytest.approx(np.log(4 / 7 * 2 / 5))


def test_random_trees_obey_the_contract() -> None:
    rng = random.Random(3)
    of = drafter()
    for request in range(200):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 60))]
        tier = Tier(rng.randint(1, 6), rng.randint(2, 4), rng.randint(2, 20))
        (draft,) = of.propose([history(tokens, request)], tier)
        assert draft.parents is not None
        depths, children = [0], {}
        for node, (token, parent, score) in enumerate(
            zip(draft.tokens, draft.parents, draft.scores, strict=True), 1
        ):
            assert parent < node < tier.nodes
            depths.append(depths[parent] + 1)
            siblings = children.setdefault(parent, {})
            assert token not in siblings
            assert all(score <= other for other in siblings.values())
            assert parent == 0 or score <= draft.scores[parent - 1]
            siblings[token] = score
            assert len(siblings) <= tier.top_k
        assert max(depths) <= tier.steps


def test_no_match_drafts_nothing() -> None:
    assert len(draft_of([], TREE).tokens) == 0


def test_one_request_never_sees_anothers_text() -> None:
    of = drafter()
    secret = [50, 51, 52, 53, 54, 55]
    of.propose([history(secret, 1)], CHAIN)
    (draft,) = of.propose([history([50, 51], 2)], CHAIN)
    assert len(draft.tokens) == 0
    of.forget(history(secret, 1))
    (draft,) = of.propose([history([50, 51], 3)], CHAIN)
    assert len(draft.tokens) == 0
    assert list(of.pools) == [2, 3]


def test_a_public_pool_has_what_ended_and_nothing_else() -> None:
    of = drafter(ngram_public_pool=True)
    text = [50, 51, 52, 53, 54, 55]
    of.propose([history(text, 1)], CHAIN)
    (draft,) = of.propose([history([50, 51], 2)], CHAIN)
    assert len(draft.tokens) == 0, "request 1 still runs"
    of.forget(history(text, 1))
    of.forget(history([60, 61], 4))
    (draft,) = of.propose([history([9, 50, 51], 3)], CHAIN)
    # Up to its end, and not into the next text.
    assert draft.tokens.tolist() == [52, 53, 54, 55]
    assert chain(of, [55]) == []
    # The request's own text comes first where both match as long an n-gram.
    assert chain(of, [50, 51, 77, 50, 51])[:1] == [77]


def test_the_longest_of_the_public_continuations_is_kept() -> None:
    of = drafter(ngram_public_pool=True, ngram_keep_all=False)
    of.forget(history([1, 2, 3]))
    of.forget(history([1, 2, 4, 5, 6]))
    of.forget(history([1, 2, 7, 8]))
    assert chain(of, [1, 2]) == [4, 5, 6]


@pytest.mark.parametrize("keep_all", [True, False])
@pytest.mark.parametrize("oldest", [True, False])
def test_pools_stay_below_their_bytes(oldest: bool, keep_all: bool) -> None:
    """Python's own count of what was allocated, for text without a repetition."""
    rng, most = np.random.default_rng(0), 2 * 2**20
    tracemalloc.start()
    try:
        of = drafter(
            ngram_pool_bytes=most,
            ngram_public_pool=True,
            ngram_use_oldest=oldest,
            ngram_keep_all=keep_all,
            max_running_requests=2,
        )
        for request in range(4):
            known = History(request, rng.integers(0, VOCABULARY, 4000).tolist(), [])
            for _ in range(3):
                before = tracemalloc.get_traced_memory()[0]
                of.propose([known], CHAIN)
                tracemalloc.reset_peak()
                assert tracemalloc.get_traced_memory()[0] - before < most
            of.forget(known)
        assert len(of.pools) == 0
        assert of.public is not None
        assert of.public.bytes < most / 2
        known = History(9, rng.integers(0, VOCABULARY, 4000).tolist(), [])
        while 9 not in of.pools or of.pools[9].added < 4000:
            of.propose([known], CHAIN)
        pool = of.pools[9]
        assert pool.bytes < most / 4
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < most + 200_000  # the last prompt, and the test's own
    # The newest text is there.
    assert pool.added == 4000


def test_requests_that_wait_do_not_add_up() -> None:
    of = drafter(max_running_requests=2)
    for request in range(10):
        of.propose([history([1, 2, 1], request)], CHAIN)
    assert list(of.pools) == [8, 9]
    # One that comes back is entered again.
    assert chain(of, [1, 2, 1])[:2] == [2, 1]


def test_a_step_costs_what_is_new() -> None:
    """Lines that are run after 100 and after 5,000 tokens."""
    rng = random.Random(1)
    costs = []
    for length in (100, 5_000):
        of = drafter()
        output: list[int] = []
        known = History(0, [rng.randrange(VOCABULARY) for _ in range(length)], output)
        while not of.pools or of.pools[0].added < length:
            of.propose([known], TREE)
        lines = []
        for _ in range(20):
            output += [rng.randrange(VOCABULARY) for _ in range(4)]
            lines.append(lines_run(partial(of.propose, [known], TREE)))
        costs.append(sorted(lines)[10])
    assert costs[1] < 4 * costs[0]


def test_a_long_prompt_is_entered_piece_by_piece() -> None:
    of = drafter()
    text = [*range(100, 900)] * 8
    known = history(text)
    of.propose([known], CHAIN)
    assert of.pools[0].added == TOKENS_A_STEP
    (draft,) = of.propose([known], CHAIN)
    assert of.pools[0].added == len(text)
    assert draft.tokens.tolist() == [100, 101, 102, 103, 104]


def test_text_ends_are_no_tokens() -> None:
    of = drafter(ngram_public_pool=True)
    for request in range(50):
        of.forget(history([request % 7, 3], request))
    for token in range(7):
        for tier in (CHAIN, TREE):
            assert END not in chain(of, [9, token], tier)


@pytest.mark.parametrize("overlap", ["none", "once-sync"])
@pytest.mark.parametrize("public", [False, True])
def test_in_an_engine(tiny: dict[str, Any], overlap: str, public: bool) -> None:
    """Text that a grammar repeats is drafted, no text changes, and no pool is left."""
    prompts = ["abcabcabcabc", "xyz xyz xyz", "0123456789"]
    grammars = [Grammar.regex("(abcdefghij){9}"), None, Grammar.regex("[a-d]{60}")]
    asked = {"max_tokens": 90, "temperature": 0}
    with Engine(**tiny, algorithm="none", overlap="none") as engine:
        want = engine.generate(prompts, grammars, asked)
    settings = {"adaptive": "static", "overlap": overlap, "ngram_public_pool": public}
    with Engine(**tiny, algorithm="ngram", **settings) as engine:
        got = engine.generate(prompts, grammars, asked)
        again = engine.generate(prompts, grammars, asked)
        of = engine.core.worker.runner.drafter
        assert isinstance(of, NgramDrafter)
        assert not of.pools
        assert engine.snapshot()["drafter"]["faults"] == 0
        assert any(span.name == "propose" for span in engine.timeline.spans())
    for outputs in (got, again):
        assert [o.token_ids for o in outputs] == [o.token_ids for o in want]
    first, second = ([o.stats.verifies for o in outputs] for outputs in (got, again))
    assert first[0] <= 10 + 80 / 6 + 1, "drafts of 5 from the second round on"
    if public:
        assert sum(second) < 0.7 * sum(first), "the same text a second time"
    else:
        assert second == first


def test_a_request_that_is_aborted_leaves_nothing(tiny: dict[str, Any]) -> None:
    with Engine(**tiny, algorithm="ngram", adaptive="static") as engine:
        handle = engine.submit("abcabcabc", None, {"max_tokens": 400, "ignore_eos": True})
        for _ in range(6):
            engine.step()
        of = engine.core.worker.runner.drafter
        assert isinstance(of, NgramDrafter)
        assert of.pools
        engine.abort(handle)
        while engine.step():
            pass
        assert not of.pools
