"""Finite languages drafted whole: one verify an answer, and the text of plain decoding."""

import itertools
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.engine import Engine
from overlap_spec.engine.grammar_drafts import WIDE_NODES, WIDE_STEPS, wide_tier, widened
from overlap_spec.grammar.drafting.few_texts import OutputTries, few_texts
from overlap_spec.grammar.drafting.state_table import Standing
from overlap_spec.grammar.drafting.token_trie import TokenTrie, make_tries
from overlap_spec.grammar.spec import Grammar
from overlap_spec.steps import RUN_TOKENS, TOLD, TRIE_NODES
from overlap_spec.tiers import Budget, Tier
from overlap_spec.types import Output
from overlap_spec.worker.grammar_drafts import GrammarDrafts
from tests.support.grafts import key, lengths
from tests.support.tiers import few

TEXTS = ["car", "carpet", "cat", "c", "dog", "über", "no, yes", "nothing"]
SCHEMA = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "boolean"}}})
FINITE = [
    Grammar.choice(TEXTS),
    Grammar.json_schema({"enum": ["north", "norway", 7, None]}),
    Grammar.json_schema({"type": "boolean"}),
    Grammar.regex("(ab|ac)(x|yz)?q{1,2}"),
]
PROMPTS = ["What is it?", "abc"]
DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": {"algorithm": "eagle3", "num_steps": 3},
    "tree": {"algorithm": "eagle3", "num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 12},
    "ngram": {"algorithm": "ngram", "num_steps": 4},
    "grammar": {"algorithm": "grammar", "num_steps": 4},
}
OVERLAPS = ("none", "double-sync", "once-sync")


@pytest.fixture(scope="module")
def still(tiny: dict[str, Any]) -> dict[str, Any]:
    """No deadline: a busy machine must not fail a test."""
    return {**tiny, "mask_deadline_ms": None, "tries": True}


def answers(engine: Engine, sampling: dict[str, Any]) -> list[list[Output]]:
    """Finite and other requests, alone and together."""
    grammars = [*FINITE, SCHEMA, None]
    found = [engine.generate(PROMPTS, grammar, sampling) for grammar in FINITE]
    for prompt in PROMPTS:
        found.append(engine.generate([prompt] * len(grammars), grammars, sampling))
    return found


# Greedy, and sampled.
SAMPLINGS: list[dict[str, Any]] = [
    {"max_tokens": 20, "complete": False, "temperature": 0},
    {"max_tokens": 20, "complete": False, "seed": 3, "temperature": 1, "top_p": 0.95},
]


@pytest.fixture(scope="module")
def plain(still: dict[str, Any]) -> list[list[list[Output]]]:
    with Engine(**still, algorithm="none", overlap="none", context_length=256) as engine:
        return [answers(engine, sampling) for sampling in SAMPLINGS]


@pytest.mark.parametrize("drafter", few(DRAFTERS, "tree"))
def test_one_verify_an_answer_in_all_modes(
    still: dict[str, Any], plain: list[list[list[Output]]], drafter: str
) -> None:
    settings = {**still, **DRAFTERS[drafter], "context_length": 256}
    found = {}
    for overlap in OVERLAPS:
        with Engine(**settings, overlap=overlap) as engine:
            outputs = [answers(engine, sampling) for sampling in SAMPLINGS]
            assert engine.snapshot()["drafter"]["faults"] == 0
            assert engine.snapshot()["pages_in_use"] == 0
        for want, got in zip(plain, outputs, strict=True):
            assert [key(one) for one in got] == [key(one) for one in want]
        found[overlap] = [[lengths(one) for one in some] for some in outputs]
        for some in outputs:
            for output in itertools.chain(*some[: len(FINITE)], *(m[:4] for m in some[4:])):
                # The prefill's token, the drafts, and the stop token.
                assert output.finish_reason == "stop"
                assert output.stats.verifies == 1
                assert output.stats.accepted_drafts == len(output.token_ids) - 2
                assert output.stats.accepted_grafts == output.stats.accepted_drafts
                assert output.stats.illegal_drafts == 0
    assert found["none"] == found["double-sync"] == found["once-sync"]


@pytest.mark.parametrize("adaptive", few(("default", "adaspec", "auto", "off"), "auto"))
def test_under_every_policy(
    still: dict[str, Any], plain: list[list[list[Output]]], adaptive: str
) -> None:
    with Engine(**{**still, "adaptive": adaptive}, context_length=256) as engine:
        for sampling, want in zip(SAMPLINGS, plain, strict=True):
            assert [key(one) for one in answers(engine, sampling)] == [key(one) for one in want]
        assert engine.snapshot()["speculation"].get("error") is None


@pytest.mark.parametrize(
    "kind", few(["Garbage", "Orphans", "Raises", "OnHost"], "Garbage", "Raises")
)
def test_beside_drafters_of_ones_own(
    still: dict[str, Any], plain: list[list[list[Output]]], kind: str
) -> None:
    own = {"algorithm": f"tests.support.drafters:{kind}", "eagle_topk": 2, "num_draft_tokens": 6}
    with Engine(**still, **own, num_steps=3, context_length=256) as engine:
        for sampling, want in zip(SAMPLINGS, plain, strict=True):
            assert [key(one) for one in answers(engine, sampling)] == [key(one) for one in want]
        assert (engine.snapshot()["drafter"]["faults"] > 0) == (kind == "Raises")


def test_where_thresholds_accept(still: dict[str, Any]) -> None:
    settings = {**still, **DRAFTERS["tree"], "threshold_acc": 0.5}
    with Engine(**settings, context_length=256) as engine:
        for output in engine.generate(PROMPTS, FINITE[0], SAMPLINGS[1]):
            assert output.text in TEXTS
            assert output.stats.grafted_tokens > 0


@pytest.mark.ci
def test_a_wrong_trie_costs_acceptance_alone(
    still: dict[str, Any], plain: list[list[list[Output]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts that no grammar allows, and such as begin well."""
    cuts = [[99, 97, 114, 7, 8], [99, 97, 9], [34, 110, 111], [97, 98, 1, 2], [116], [200, 5]]
    (wrong,) = make_tries(cuts, TRIE_NODES)
    monkeypatch.setattr(OutputTries, "of", lambda *_: wrong)
    for overlap in OVERLAPS:
        settings = {**still, **DRAFTERS["tree"], "overlap": overlap}
        with Engine(**settings, context_length=256) as engine:
            for sampling, want in zip(SAMPLINGS, plain, strict=True):
                assert [key(one) for one in answers(engine, sampling)] == [key(x) for x in want]


def test_where_requests_lose_their_pages(still: dict[str, Any]) -> None:
    prompts = [f"{n} {PROMPTS[0]}" for n in range(8)]
    grammars = [Grammar.choice(TEXTS), SCHEMA, None, FINITE[3]] * 2
    with Engine(**still, algorithm="none", overlap="none", context_length=256) as engine:
        want = engine.generate(prompts, grammars, SAMPLINGS[0])
    small = {"max_total_tokens": 288, "page_size": 8, "chunked_prefill_size": 16}
    small["max_running_requests"] = 2
    with Engine(**still, **DRAFTERS["tree"], **small) as engine:
        assert engine.core.budgets.widens
        got = engine.generate(prompts, grammars, SAMPLINGS[0])
        assert engine.snapshot()["pages_in_use"] == 0
    assert key(got) == key(want)
    assert got[0].stats.verifies == 1


def test_a_text_that_is_deeper_than_the_tree_takes_more(still: dict[str, Any]) -> None:
    """A token of the prefill, fifteen drafts and a bonus, then drafts up to ``max_tokens``."""
    texts = Grammar.choice(["nothing at all, to me", "nothing at all, to it"])
    with Engine(**still, **DRAFTERS["grammar"], context_length=256) as engine:
        for output in engine.generate(PROMPTS, texts, SAMPLINGS[0]):
            assert output.stats.verifies == 2
            assert output.stats.accepted_drafts == len(output.token_ids) - 2


@pytest.mark.parametrize("overlap", few(OVERLAPS, "once-sync"))
def test_a_text_is_followed_through_what_the_drafter_drafted(
    still: dict[str, Any], overlap: str
) -> None:
    """The trie is too large until the drafter's own draft, what is forced, has been accepted."""
    texts = Grammar.choice([f"abcd{x}{y}" for x in "efghijkl" for y in "mnopqrst"])
    settings = {**still, **DRAFTERS["grammar"], "overlap": overlap}
    with Engine(**settings, context_length=256) as engine:
        stats = engine.generate("abc", texts, SAMPLINGS[0]).stats
    assert stats.verifies == 2
    # Three that were forced, and one of eight.
    assert (stats.grafted_tokens, stats.accepted_grafts) == (11, 4)


def test_who_takes_no_drafts_gets_none(still: dict[str, Any]) -> None:
    with Engine(**still, **DRAFTERS["chain"], context_length=256) as engine:
        asked = [{**SAMPLINGS[0], "speculate": flag} for flag in (False, True)]
        off, on = engine.generate([PROMPTS[0]] * 2, FINITE[0], asked)
    assert off.token_ids == on.token_ids
    assert (off.stats.drafted_tokens, on.stats.verifies) == (0, 1)
    assert off.stats.verifies == len(off.token_ids) - 1


def test_few_texts() -> None:
    assert few_texts(Grammar.choice(["b", "a", "b"])) == ["b", "a"]
    assert few_texts(Grammar.json_schema({"type": "boolean", "title": "x"})) == ["true", "false"]
    assert few_texts(Grammar.json_schema({"const": {"a": ["ü"]}})) == ['{"a":["ü"]}']
    assert few_texts(Grammar.json_schema({"enum": ["a", 1, 1.5]})) == ['"a"', "1", "1.5"]
    for pattern in ("(ab|a)c?", "[a-c]{0,2}x", "no|yes", "a(b|(c|d){2})"):
        texts = few_texts(Grammar.regex(pattern))
        letters = ["".join(p) for n in range(6) for p in itertools.product("abcdxnoyes", repeat=n)]
        wanted = {text for text in letters if re.fullmatch(pattern, text)}
        assert set(texts) == wanted, pattern
    for grammar in (
        Grammar.regex("a*"),
        Grammar.regex("[a-z]{3}"),
        Grammar.regex("(a?){1000}"),
        Grammar.json_schema({"type": "integer"}),
        Grammar.json_schema({"enum": ["a"], "minLength": 1}),
        Grammar.json_object(),
        Grammar.choice(["a"]).after_thinking(),
    ):
        assert few_texts(grammar) == [], grammar


@pytest.mark.parametrize(
    "pattern", ["a{2147483000}", "(a{60000}){60000}", "(a{40000}b){9}", "[ab]{2147483000}"]
)
def test_long_texts_are_not_unrolled(pattern: str) -> None:
    """Each takes gigabytes if it is."""
    grammar = Grammar.regex(pattern)
    tracemalloc.start()
    assert few_texts(grammar) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22
    assert few_texts(Grammar.regex("(){2147483000}b|(ab){2,3}")) == ["abab", "ababab", "b"]


def test_a_language_that_is_too_large_has_no_trie(still: dict[str, Any]) -> None:
    with Engine(**still, context_length=256) as engine:
        tries = OutputTries(engine.tokenizer.vocabulary, engine.tokenizer.encode)
        small, large = ([f"{n:04}abcd" for n in range(count)] for count in (80, 400))
        trie = tries.of(Grammar.choice(small))
        assert trie is not None
        assert tries.of(Grammar.choice(small)) is trie
        assert tries.of(Grammar.choice(large)) is None
        assert tries.of(SCHEMA) is None
        output = engine.generate(PROMPTS[0], Grammar.choice(large), SAMPLINGS[0])
        assert output.text in large


def test_widened_budgets() -> None:
    chain = Tier(5, 1, 6)
    wide = wide_tier(chain)
    assert (wide.steps, wide.nodes, wide.own) == (WIDE_STEPS, WIDE_NODES, chain)
    assert wide.top_k > 1
    assert wide.window_tokens == WIDE_NODES
    for same in (Budget(Tier(0, 1, 1)), Budget(chain)):
        rooms = [0, 0] if same.tier == chain else [9, 0]
        assert widened(same, rooms) is same
    found = widened(Budget(chain), [9, 0, 3, 99])
    assert found == Budget(wide, 9 + 6 + 6 + 32, (9, 6, 6, 32))
    ragged = Budget(chain, 10, (6, 4))
    assert widened(ragged, [0, 7]) == Budget(wide, 13, (6, 7))


def random_trie(seed: int) -> tuple[list[list[int]], TokenTrie]:
    rng = np.random.default_rng(seed)
    cuts = {tuple(rng.integers(1, 5, rng.integers(1, 7)).tolist()) for _ in range(12)}
    (trie,) = make_tries([list(cut) for cut in cuts], TRIE_NODES)
    return [list(cut) for cut in cuts], trie


def device_trie(trie: TokenTrie, base: int) -> GrammarDrafts:
    drafts = GrammarDrafts(4, 9, 0, torch.device("cpu"))
    # Whatever stood there before.
    drafts.tries.copy_(torch.randint(0, 60, drafts.tries.shape))
    drafts.write(trie.parts(base))
    return drafts


@pytest.mark.parametrize("seed", range(20))
def test_the_rest_of_a_trie_is_the_draft(seed: int) -> None:
    """Every path of the draft is how a text goes on, and all texts that fit are there."""
    cuts, trie = random_trie(seed)
    tier = Tier(3, 2, 12, Tier(2, 1, 3))
    drafts = device_trie(trie, 30)
    # Of rows 0 to 2 the first has no place, the others two random ones.
    rng = np.random.default_rng(seed)
    nodes = [-1, *rng.integers(0, len(trie.tokens) + 1, 2).tolist()]
    rows = torch.arange(3)
    forced = torch.full((3, RUN_TOKENS - 1), -1)
    none = torch.zeros(3, dtype=torch.int64)
    roots = Roots(rows, none[:, None], none, none, forced)
    base = Draft(torch.tensor([[7, 8]] * 3), None, torch.tensor([[-0.5, -1.0]] * 3))
    drafts.place[:3] = torch.tensor([-1 if node < 0 else node + 30 for node in nodes])
    draft = drafts.complete(base, roots, tier)
    assert draft.parents is not None
    for row, place in enumerate(nodes):
        alive = [n for n in range(11) if draft.scores[row, n] > -torch.inf]
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for n in alive:
            above = int(draft.parents[row, n])
            assert above in paths
            paths[n + 1] = (*paths[above], int(draft.tokens[row, n]))
        found = sorted(path for path in paths.values() if path)
        prefix = [int(trie.tokens[n]) for n in trie.path(place - 1)]
        left = len(trie.tokens) if place == 0 else trie.sizes[place - 1]
        if place >= 0 and left <= 11:
            rests = {tuple(cut[len(prefix) :]) for cut in cuts if cut[: len(prefix)] == prefix}
            wanted = {rest[:n] for rest in rests for n in range(1, min(len(rest), 3) + 1)}
            assert found == sorted(wanted)
        else:
            assert found == [(7,), (7, 8)]


@pytest.mark.parametrize("seed", range(10))
def test_places_follow_what_was_accepted(seed: int) -> None:
    """The lane tells of a node what the host follows, and the device goes on by the root."""
    _, trie = random_trie(seed)
    drafts, row = device_trie(trie, 7), torch.tensor([1])
    for node in range(-1, len(trie.tokens)):
        for token in range(-1, 6):
            standing = Standing()
            standing.enter(trie, 7)
            told = torch.full((1, TOLD), -1, dtype=torch.int32)
            told[:, -1] = standing.place(node)
            behind = drafts.enter(row, told, torch.tensor([token]), True)
            want = trie.follow(node, [token])
            assert drafts.place.tolist() == [-1, standing.place(want), -1, -1]
            left = -1 if want is None else trie.sizes[want]
            assert behind.tolist() == [[-1] * (RUN_TOKENS - 1) + [left]]
    # Of a node that stands nowhere.
    told[:, -1] = -1
    drafts.enter(row, told, torch.tensor([int(trie.tokens[0])]), True)
    assert drafts.place.tolist() == [-1] * 4
