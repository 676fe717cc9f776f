"""Drafts from suffixes: an automaton held against plain searches, and trees by frequency."""

from __future__ import annotations

import random
import tracemalloc
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.suffix import SuffixDrafter, SuffixIndex
from overlap_spec.drafters.text_pool import END
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.steps import History
from overlap_spec.tiers import Tier
from tests.support.counted import lines_run

CHAIN = Tier(5, 1, 6)
TREE = Tier(4, 3, 10)
REQUESTS = count(1000)


def drafter(**settings: Any) -> SuffixDrafter:
    return SuffixDrafter(EngineConfig.build(algorithm="suffix", **settings), 1000)


def chain(of: SuffixDrafter, tokens: list[int], tier: Tier = CHAIN) -> list[int]:
    """The draft of a request that was not there before."""
    (draft,) = of.propose([History(next(REQUESTS), tokens, [])], tier)
    return draft.tokens.tolist()


def places(text: list[int], part: list[int]) -> list[int]:
    """Where ``part`` ends in ``text``."""
    ends = range(len(part), len(text) + 1)
    return [end for end in ends if text[end - len(part) : end] == part]


def test_counts_are_those_of_a_plain_search() -> None:
    rng = random.Random(1)
    for _ in range(60):
        text = [rng.randrange(rng.randint(1, 4)) for _ in range(rng.randint(1, 40))]
        index = SuffixIndex()
        index.append(text)
        for _ in range(30):
            start = rng.randrange(len(text))
            part = text[start : start + rng.randint(1, 9)]
            state = 0
            for token in part:
                state = index.after[state][token]
            assert index.count[state] == len(places(text, part))
            following = [text[end] for end in places(text, part) if end < len(text)]
            if following:
                found = {token: share for token, _, share in index.next(state)}
                total = len(places(text, part))
                want = {token: following.count(token) / total for token in set(following)}
                assert found == pytest.approx(want)


def test_the_longest_end_that_stands_before_is_found() -> None:
    rng = random.Random(2)
    for _ in range(200):
        letters = rng.randint(1, 5)
        text = [rng.randrange(letters) for _ in range(rng.randint(1, 40))]
        own = rng.random() < 0.5
        tokens = text if own else [rng.randrange(letters) for _ in range(rng.randint(1, 20))]
        index = SuffixIndex()
        index.append(text)
        sizes = [
            size
            for size in range(len(tokens), 0, -1)
            if any(end < len(text) for end in places(text, tokens[-size:]))
        ]
        found = list(index.suffixes(tokens))
        assert [suffix.size for suffix in found][:1] == sizes[:1]
        assert all(suffix.size in sizes for suffix in found)


def test_what_follows_most_often_is_drafted_first() -> None:
    text = [1, 2, 10, 11, 1, 2, 20, 21, 1, 2, 10, 12, 1, 2]
    (draft,) = drafter().propose([History(0, text, [])], TREE)
    assert draft.parents is not None
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths.append([*paths[parent], token])
    assert [path[0] for path in paths if len(path) == 1] == [10, 20]
    scores = dict(zip(map(tuple, paths[1:]), draft.scores.tolist(), strict=True))
    # [1, 2] stands four times, once at the end; after it twice 10, of which one went on with 11.
    assert scores[(10,)] == pytest.approx(np.log(2 / 4))
    assert scores[(20,)] == pytest.approx(np.log(1 / 4))
    assert scores[(10, 11)] == pytest.approx(np.log(1 / 4))


def test_a_longer_suffix_tells_what_a_shorter_one_cannot() -> None:
    """Nine tokens alike; `ngram` would look at the last four, which went on otherwise since."""
    same = list(range(100, 109))
    text = [*same, 1, 2, 3, 4, 5, 50, *same[-4:], 9, 51, *same[-4:], 9, 52, *same]
    assert chain(drafter(), text)[:3] == [1, 2, 3]


def test_repetition_goes_on_past_the_texts_end() -> None:
    assert chain(drafter(), [9, 1, 2, 1, 2]) == [1, 2, 1, 2]
    # Most is to be expected after two: after one a draft is at most two deep.
    assert chain(drafter(), [5, 7, 7, 7, 7]) == [7, 7, 7, 7]
    assert chain(drafter(), [1, 2, 3, 4]) == []
    assert chain(drafter(), []) == []


def test_random_trees_obey_the_contract() -> None:
    rng = random.Random(3)
    of = drafter(ngram_public_pool=True)
    for request in range(200):
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 60))]
        tier = Tier(rng.randint(1, 6), rng.randint(1, 4), rng.randint(2, 20))
        known = History(request, tokens, [])
        (draft,) = of.propose([known], tier)
        of.forget(known)
        if not len(draft.tokens):
            continue
        assert draft.parents is not None
        depths, children = [0], {}
        for node, (token, parent, score) in enumerate(
            zip(draft.tokens, draft.parents, draft.scores, strict=True), 1
        ):
            assert parent < node < tier.nodes
            depths.append(depths[parent] + 1)
            siblings = children.setdefault(parent, {})
            assert token not in siblings
            assert token != END
            assert all(score <= other for other in siblings.values())
            assert parent == 0 or score <= draft.scores[parent - 1] + 1e-6
            siblings[token] = score
            assert len(siblings) <= tier.top_k
        assert max(depths) <= tier.steps


def test_one_request_never_sees_anothers_text_unless_asked() -> None:
    secret = [50, 51, 52, 53, 54, 55]
    for public in (False, True):
        of = drafter(ngram_public_pool=public)
        known = History(1, secret, [])
        of.propose([known], CHAIN)
        assert chain(of, [9, 50, 51]) == []
        of.forget(known)
        of.forget(History(2, [60, 61], []))
        # Up to its end, and not into the next text; two known tokens are worth four.
        assert chain(of, [9, 50, 51]) == ([52, 53, 54, 55] if public else [])
        assert chain(of, [55]) == []


def test_pools_stay_below_their_bytes() -> None:
    """Python's own count of what was allocated."""
    most = 2 * 2**20
    for letters in (900, 30):
        rng = np.random.default_rng(0)
        tracemalloc.start()
        try:
            of = drafter(ngram_pool_bytes=most, ngram_public_pool=True, max_running_requests=2)
            for request in range(4):
                known = History(request, rng.integers(0, letters, 4000).tolist(), [])
                of.propose([known], CHAIN)
                of.forget(known)
            assert not of.pools
            assert of.public is not None
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert of.public.bytes < most / 2
        # What it holds is what it says, and no less than a third of that.
        assert of.public.bytes / 3 < held < of.public.bytes + 300_000


def test_a_step_costs_what_is_new() -> None:
    """Lines that are run after 300 and after 3,000 tokens, and where one token is repeated."""
    rng = random.Random(1)
    costs = []
    for length, letters in ((300, 900), (3_000, 900), (3_000, 1)):
        of = drafter()
        output: list[int] = []
        known = History(0, [rng.randrange(letters) for _ in range(length)], output)
        while not of.pools or of.pools[0].added < length:
            of.propose([known], TREE)
        lines = []
        for _ in range(20):
            output += [rng.randrange(letters) for _ in range(4)]
            lines.append(lines_run(partial(of.propose, [known], TREE)))
        costs.append(sorted(lines)[10])
    assert costs[1] < 3 * costs[0]
    assert costs[2] < 80_000


@pytest.mark.parametrize("overlap", ["none", "once-sync"])
@pytest.mark.parametrize("tree", [{}, {"eagle_topk": 3, "num_draft_tokens": 12}])
def test_in_an_engine(tiny: dict[str, Any], overlap: str, tree: dict[str, Any]) -> None:
    """Text that a grammar repeats is drafted, no text changes, and no pool is left."""
    prompts = ["abcabcabcabc", "xyz xyz xyz", "0123456789"]
    grammars = [Grammar.regex("(abcdefghij){9}"), None, Grammar.regex("[a-d]{60}")]
    asked = {"max_tokens": 90, "temperature": 0}
    with Engine(**tiny, algorithm="none", overlap="none") as engine:
        want = engine.generate(prompts, grammars, asked)
    with Engine(**tiny, algorithm="suffix", adaptive="static", overlap=overlap, **tree) as engine:
        got = engine.generate(prompts, grammars, asked)
        of = engine.core.worker.runner.drafter
        assert isinstance(of, SuffixDrafter)
        assert not of.pools
        assert engine.snapshot()["drafter"]["faults"] == 0
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert got[0].stats.verifies <= 10 + 80 / 6 + 3, "drafts of 5 from the second round on"
