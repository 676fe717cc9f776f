"""Drafts looked up in text, by n-grams and by suffixes: against plain searches, and no leaks."""

import random
import tracemalloc
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.ngram import NgramDrafter
from overlap_spec.drafters.suffix import SuffixDrafter, SuffixIndex
from overlap_spec.drafters.text_pool import END, TOKENS_A_STEP
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.steps import History
from overlap_spec.tiers import Tier
from tests.support.counted import lines_run
from tests.support.tiers import few

CHAIN = Tier(5, 1, 6)
TREE = Tier(4, 3, 10)
VOCABULARY = 1000
REQUESTS = count(1000)
Lookup = NgramDrafter | SuffixDrafter
BOTH = pytest.mark.parametrize("kind", [NgramDrafter, SuffixDrafter])


def made(kind: type[Lookup], **settings: Any) -> Lookup:
    return kind(EngineConfig.build(**settings), VOCABULARY)


drafter = partial(made, NgramDrafter)
suffixes = partial(made, SuffixDrafter)


def history(tokens: Iterable[int], request: int = 0) -> History:
    return History(request, list(tokens), [])


def chain(of: Lookup, tokens: Iterable[int], tier: Tier = CHAIN) -> list[int]:
    """The draft of a request that was not there before."""
    (draft,) = of.propose([history(tokens, next(REQUESTS))], tier)
    return draft.tokens.tolist()


# N-grams


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


def test_the_longest_of_the_public_continuations_is_kept() -> None:
    of = drafter(ngram_public_pool=True, ngram_keep_all=False)
    of.forget(history([1, 2, 3]))
    of.forget(history([1, 2, 4, 5, 6]))
    of.forget(history([1, 2, 7, 8]))
    assert chain(of, [1, 2]) == [4, 5, 6]


# Suffixes


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


def test_a_longer_suffix_tells_what_a_shorter_one_cannot() -> None:
    """Nine tokens alike; `ngram` would look at the last four, which went on otherwise since."""
    same = list(range(100, 109))
    text = [*same, 1, 2, 3, 4, 5, 50, *same[-4:], 9, 51, *same[-4:], 9, 52, *same]
    assert chain(suffixes(), text)[:3] == [1, 2, 3]


def test_repetition_goes_on_past_the_texts_end() -> None:
    assert chain(suffixes(), [9, 1, 2, 1, 2]) == [1, 2, 1, 2]
    # Most is to be expected after two: after one a draft is at most two deep.
    assert chain(suffixes(), [5, 7, 7, 7, 7]) == [7, 7, 7, 7]
    assert chain(suffixes(), [1, 2, 3, 4]) == []
    assert chain(suffixes(), []) == []


# Of both


@BOTH
def test_random_trees_obey_the_contract(kind: type[Lookup]) -> None:
    rng = random.Random(3)
    of = made(kind, ngram_public_pool=True)
    for request in range(200):
        known = history([rng.randrange(4) for _ in range(rng.randint(1, 60))], request)
        tier = Tier(rng.randint(1, 6), rng.randint(1, 4), rng.randint(2, 20))
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


@BOTH
def test_what_follows_most_often_is_drafted_first(kind: type[Lookup]) -> None:
    text = [1, 2, 10, 11, 1, 2, 20, 21, 1, 2, 10, 12, 1, 2]
    (draft,) = made(kind).propose([history(text)], TREE)
    assert draft.parents is not None
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths.append([*paths[parent], token])
    assert [path[0] for path in paths if len(path) == 1] == [10, 20]
    scores = dict(zip(map(tuple, paths[1:]), draft.scores.tolist(), strict=True))
    # Twice 10 and once 20. A match of 2 tokens counts 2, and one is for what was never seen; of
    # suffixes the end of the text is a place too.
    shares = (4 / 7, 2 / 7, 4 / 7 * 2 / 5) if kind is NgramDrafter else (2 / 4, 1 / 4, 1 / 4)
    for path, share in zip(((10,), (20,), (10, 11)), shares, strict=True):
        assert scores[path] == pytest.approx(np.log(share))


@BOTH
def test_one_request_never_sees_anothers_text_unless_asked(kind: type[Lookup]) -> None:
    secret = [50, 51, 52, 53, 54, 55]
    for public in (False, True):
        of = made(kind, ngram_public_pool=public)
        of.propose([history(secret, 1)], CHAIN)
        assert chain(of, [9, 50, 51]) == [], "request 1 still runs"
        of.forget(history(secret, 1))
        of.forget(history([60, 61], 2))
        # Up to its end, and not into the next text.
        assert chain(of, [9, 50, 51]) == ([52, 53, 54, 55] if public else [])
        assert chain(of, [55]) == []
        assert 1 not in of.pools
    if kind is NgramDrafter:
        # The request's own text comes first where both match as long an n-gram.
        assert chain(of, [50, 51, 77, 50, 51])[:1] == [77]


@BOTH
@pytest.mark.parametrize("letters", few([900, 30], 900))
@pytest.mark.parametrize(("oldest", "keep_all"), few([(False, True), (True, False)], (True, False)))
def test_pools_stay_below_their_bytes(
    kind: type[Lookup], letters: int, oldest: bool, keep_all: bool
) -> None:
    """Python's own count of what was allocated."""
    rng, most = np.random.default_rng(0), 2 * 2**20
    options = {"ngram_use_oldest": oldest, "ngram_keep_all": keep_all, "ngram_public_pool": True}
    tracemalloc.start()
    try:
        of = made(kind, ngram_pool_bytes=most, max_running_requests=2, **options)
        for request in range(4):
            known = history(rng.integers(0, letters, 4000).tolist(), request)
            for _ in range(3):
                of.propose([known], CHAIN)
            of.forget(known)
        assert not of.pools
        assert of.public is not None
        assert of.public.bytes < most / 2
        known = history(rng.integers(0, letters, 4000).tolist(), 9)
        while 9 not in of.pools or of.pools[9].added < 4000:
            of.propose([known], CHAIN)
        assert of.pools[9].bytes < most / 4
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < most + 300_000  # the last prompt, and the test's own


@BOTH
def test_requests_that_wait_do_not_add_up(kind: type[Lookup]) -> None:
    of = made(kind, max_running_requests=2)
    for request in range(10):
        of.propose([history([1, 2, 1], request)], CHAIN)
    assert list(of.pools) == [8, 9]
    # One that comes back is entered again.
    assert chain(of, [1, 2, 1])[:2] == [2, 1]


@pytest.mark.parametrize(
    ("kind", "letters", "factor"),
    [(NgramDrafter, 900, 4), (SuffixDrafter, 900, 3), (SuffixDrafter, 1, 3000)],
)
def test_a_step_costs_what_is_new(kind: type[Lookup], letters: int, factor: int) -> None:
    """Lines that are run after 300 and after 3,000 tokens; where one token is repeated there are
    more of them."""
    rng = random.Random(1)
    costs = []
    for length in (300, 3_000):
        of = made(kind)
        output: list[int] = []
        known = History(0, [rng.randrange(letters) for _ in range(length)], output)
        while not of.pools or of.pools[0].added < length:
            of.propose([known], TREE)
        lines = []
        for _ in range(20):
            output += [rng.randrange(letters) for _ in range(4)]
            lines.append(lines_run(partial(of.propose, [known], TREE)))
        costs.append(sorted(lines)[10])
    assert costs[1] < min(factor * costs[0], 80_000)


@BOTH
def test_a_long_prompt_is_entered_piece_by_piece(kind: type[Lookup]) -> None:
    of, text = made(kind), [*range(100, 900)] * 8
    of.propose([history(text)], CHAIN)
    assert of.pools[0].added == TOKENS_A_STEP
    (draft,) = of.propose([history(text)], CHAIN)
    assert of.pools[0].added == len(text)
    assert draft.tokens.tolist() == [100, 101, 102, 103, 104]


@pytest.mark.parametrize(
    ("name", "public"),
    few(
        [(n, p) for n in ("ngram", "suffix") for p in (False, True)],
        ("ngram", False),
        ("suffix", True),
    ),
)
def test_in_an_engine(tiny: dict[str, Any], name: str, public: bool) -> None:
    """Text that a grammar repeats is drafted, and no pool is left, also of who is aborted."""
    prompts = ["abcabcabcabc", "xyz xyz xyz", "0123456789"]
    grammars = [Grammar.regex("(abcdefghij){9}"), None, Grammar.regex("[a-d]{60}")]
    asked = {"max_tokens": 90, "temperature": 0}
    settings = {"algorithm": name, "ngram_public_pool": public}
    with Engine(**tiny, **settings) as engine:
        first, again = (engine.generate(prompts, grammars, asked) for _ in range(2))
        of = engine.core.worker.runner.drafter
        assert not of.pools
        assert any(span.name == "propose" for span in engine.timeline.spans())
        handle = engine.submit("abcabcabc", None, {"max_tokens": 400, "ignore_eos": True})
        for _ in range(6):
            engine.step()
        assert of.pools
        engine.abort(handle)
        while engine.step():
            pass
        assert not of.pools
        assert engine.snapshot()["drafter"]["faults"] == 0
    assert [o.token_ids for o in first] == [o.token_ids for o in again]
    verifies, later = ([o.stats.verifies for o in outputs] for outputs in (first, again))
    assert verifies[0] <= 10 + 80 / 6 + 3, "drafts of 5 from the second round on"
    if public:
        assert sum(later) < 0.7 * sum(verifies), "the same text a second time"
    else:
        assert later == verifies
