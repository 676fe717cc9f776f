"""Whole choices weighed in one pass: as scoring each text by itself, and chosen by that."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from overlap_spec.config import EMBEDDED
from overlap_spec.engine import Engine
from overlap_spec.errors import GrammarError, InvalidRequest
from overlap_spec.grammar.drafting.token_trie import make_tries
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import ChoiceProbability, Output
from overlap_spec.worker.extras import choices
from tests.support.tiers import few

TEXTS = ["car", "carpet", "cat", "c", "dog", "über", "no, thanks", "nothing at all"]
PROMPTS = ["What has four wheels?", "abc"]
GREEDY = {"max_tokens": 24, "temperature": 0}
PERSON = Grammar.json_schema({"type": "object", "properties": {"name": {"enum": ["Ada", "Bo"]}}})
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"algorithm": "none"},
    "chain": {"algorithm": "eagle3", "num_steps": 3},
    "tree": {"algorithm": "eagle3", "num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 12},
    "ngram": {"algorithm": "ngram", "num_steps": 4},
}


@pytest.fixture(scope="module")
def still(tiny: dict[str, Any]) -> dict[str, Any]:
    """No deadline: a busy machine must not fail a test."""
    return {**tiny, "mask_deadline_ms": None, "tries": True}


def scored(model: Any, ids: list[int], tokens: list[int], stops: list[int]) -> float:
    """The log-probability of a text and of the output's end, by a pass of its own."""
    with torch.no_grad():
        found = model(torch.tensor([ids + tokens])).logits[0].double().log_softmax(-1)
    along = [found[len(ids) - 1 + at, token].item() for at, token in enumerate(tokens)]
    return math.fsum(along) + found[-1, stops].logsumexp(0).item()


def check(engine: Engine, model: Any, prompt: str, output: Output) -> None:
    assert [choice.text for choice in output.choices] == TEXTS
    tokenizer = engine.tokenizer
    ids, stops = tokenizer.chat([{"role": "user", "content": prompt}]), sorted(tokenizer.eos_ids)
    wanted = [scored(model, ids, tokenizer.encode(text), stops) for text in TEXTS]
    total = np.logaddexp.reduce(wanted)
    for choice, want in zip(output.choices, wanted, strict=True):
        assert abs(choice.logprob - want) < 1e-4
        assert abs(choice.probability - math.exp(want - total)) < 1e-4


def best(output: Output) -> str:
    return max(output.choices, key=lambda choice: choice.probability).text


@pytest.mark.parametrize("overlap", few(("none", "double-sync", "once-sync"), "once-sync"))
@pytest.mark.parametrize("drafter", few(DRAFTERS, "tree"))
def test_in_a_mixed_batch_as_by_itself(
    still: dict[str, Any], reference: Any, drafter: str, overlap: str
) -> None:
    asked = Grammar.choice(TEXTS, probabilities=True)
    chosen = Grammar.choice(TEXTS, probabilities=True, faithful=True)
    grammars = [asked, None, chosen, PERSON, Grammar.choice(TEXTS)]
    settings = {**still, **DRAFTERS[drafter], "overlap": overlap}
    with Engine(**settings, context_length=256) as engine:
        for prompt in PROMPTS:
            alone = [engine.generate(prompt, grammar, GREEDY) for grammar in grammars]
            outputs = engine.generate([prompt] * len(grammars), grammars, GREEDY)
            assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
            assert [bool(o.choices) for o in outputs] == [True, False, True, False, False]
            for output in (outputs[0], outputs[2], alone[0], alone[2]):
                check(engine, reference, prompt, output)
            # To be told of it changes nothing.
            assert outputs[0].token_ids == outputs[4].token_ids
            assert outputs[2].text == best(outputs[2])
            assert (outputs[2].finish_reason, outputs[2].stats.verifies) == ("stop", 0)
        assert engine.snapshot()["pages_in_use"] == 0
        assert engine.snapshot()["drafter"]["faults"] == 0


def test_texts_of_several_tokens_equal_transformers() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "target", dtype=torch.float32)
    with Engine(adaptive="static", grammar_isolated=False, dtype="float32") as engine:
        tokens = [engine.tokenizer.encode(text) for text in TEXTS]
        assert len({len(some) for some in tokens}) > 2
        grammar = Grammar.choice(TEXTS, probabilities=True)
        for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, grammar, GREEDY), strict=True):
            check(engine, model, prompt, output)


def passes(engine: Engine) -> int:
    """Those that the last request is to have."""
    (waiting,) = engine.core.scheduler.waiting.line()
    passes: int = waiting.extras["choices"].passes
    return passes


def test_several_passes_weigh_as_one_does(
    still: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar.choice(TEXTS, probabilities=True, faithful=True)
    found: list[tuple[ChoiceProbability, ...]] = []
    for nodes in (256, 14):
        monkeypatch.setattr(choices, "PASS_NODES", nodes)
        with Engine(**still, context_length=256) as engine:
            handle = engine.submit(PROMPTS[0], grammar, GREEDY)
            assert passes(engine) == (1 if nodes == 256 else 4)
            while handle.output is None:
                engine.step()
            found.append(handle.output.choices)
    for one, other in zip(*found, strict=True):
        assert one.text == other.text
        assert abs(one.logprob - other.logprob) < 1e-4


def test_others_get_tokens_while_many_texts_are_weighed(
    still: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "PASS_NODES", 14)
    texts = [f"{first}{second}" for first in "abcdefgh" for second in "ijklmnop"]
    grammar = Grammar.choice(texts, probabilities=True, faithful=True)
    settings = {**still, "context_length": 256, "chunked_prefill_size": 16}
    with Engine(**settings) as engine:
        waits = engine.submit(PROMPTS[0], grammar, GREEDY)
        tries = passes(engine)
        engine.release([waits])
        assert tries > 4
        alone = [engine.generate(PROMPTS[0], grammar, {"seed": seed}) for seed in range(3)]
        endless = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
        other = engine.submit("abc", None, endless)
        while not other.deltas:
            engine.step()
        asked = [engine.submit(PROMPTS[0], grammar, {"seed": seed}) for seed in range(3)]
        steps = 0
        while asked[0].output is None:
            other.deltas.clear()
            engine.step()
            steps += bool(other.deltas)
        assert steps >= tries
        # The others share what was found, and draw by themselves.
        for _ in range(tries - 1):
            engine.step()
        outputs = [handle.output for handle in asked]
        assert [one and one.token_ids for one in outputs] == [one.token_ids for one in alone]
        assert [one and one.choices for one in outputs] == [one.choices for one in alone]
        engine.release([other, *asked])
        assert engine.snapshot()["pages_in_use"] == 0


def test_who_leaves_while_its_texts_are_weighed_leaves_them_to_the_next(
    still: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "PASS_NODES", 14)
    grammar = Grammar.choice([f"{a}{b}" for a in "abcdef" for b in "ghijkl"], probabilities=True)
    with Engine(**still, context_length=256) as engine:
        want = engine.generate(PROMPTS[0], grammar, GREEDY)
        first, second = (engine.submit(PROMPTS[0], grammar, GREEDY) for _ in range(2))
        for _ in range(3):
            engine.step()
        engine.release([first])
        while second.output is None:
            engine.step()
        assert (second.output.token_ids, second.output.choices) == (want.token_ids, want.choices)
        engine.release([second])
        assert engine.snapshot()["pages_in_use"] == 0


def test_every_text_is_in_one_trie() -> None:
    cuts = [[1, 2, 3], [1], [1, 2, 4], [5], [5, 6, 7], [8, 9]]
    for width in (3, 4, 8, 20):
        found = {}
        for trie in make_tries(cuts, width):
            assert len(trie.tokens) <= width
            assert (trie.parents < np.arange(len(trie.tokens))).all()
            for text, end in zip(trie.texts.tolist(), trie.ends.tolist(), strict=True):
                path = trie.path(end)
                assert [int(trie.depths[node]) for node in path] == list(range(1, len(path) + 1))
                found[text] = [int(trie.tokens[node]) for node in path]
        assert found == dict(enumerate(cuts))


@pytest.mark.parametrize(
    ("sampling", "power", "kept"),
    few(
        [({"temperature": 1}, 1.0, 8), ({"temperature": 2.5}, 0.4, 8), ({"top_k": 2}, 1.0, 2)],
        ({"temperature": 2.5}, 0.4, 8),
        ({"top_k": 2}, 1.0, 2),
    ),
)
def test_draws_have_the_distribution_of_whole_texts(
    still: dict[str, Any], reference: Any, sampling: dict[str, Any], power: float, kept: int
) -> None:
    """Against brute force: every text's own score, to the power of 1 / temperature."""
    count = 400
    asked = [{"temperature": 1, "max_tokens": 24, "seed": n, **sampling} for n in range(count)]
    with Engine(**still, max_running_requests=32, context_length=128) as engine:
        ids = engine.tokenizer.chat([{"role": "user", "content": PROMPTS[1]}])
        stops, encode = sorted(engine.tokenizer.eos_ids), engine.tokenizer.encode
        # Nearly as probable as each other, or most would never be drawn.
        texts = ["ab", "a", "b", "ba", "c", "bb", "aa", "cc"]
        scores = np.array([scored(reference, ids, encode(text), stops) for text in texts]) * power
        grammar = Grammar.choice(texts, faithful=True)
        outputs = engine.generate([ids] * count, grammar, asked)
        again = engine.generate(ids, grammar, asked[17])
    assert again.token_ids == outputs[17].token_ids
    assert not outputs[0].choices
    assert {output.error for output in outputs} == {None}
    drawn = Counter(output.text for output in outputs)
    weights = np.exp(scores - scores.max())
    weights[np.argsort(-weights)[kept:]] = 0.0
    expected = count * weights / weights.sum()
    observed = np.array([drawn[text] for text in texts], float)
    assert not observed[expected == 0].any()
    # What is too rare for the test is one class.
    rare = expected < 5
    pairs = [np.append(x[~rare], x[rare].sum()) for x in (observed, expected)]
    some = pairs[1] > 0
    assert some.sum() > 1
    assert stats.chisquare(pairs[0][some], pairs[1][some]).pvalue > 1e-4


def test_with_a_cache_that_holds_few_requests(still: dict[str, Any]) -> None:
    grammar = Grammar.choice(TEXTS, probabilities=True)
    prompts = [f"{n} {PROMPTS[0]}" for n in range(9)]
    with Engine(**still, context_length=256) as engine:
        want = engine.generate(prompts, grammar, GREEDY)
    small = {"max_total_tokens": 256, "page_size": 8, "chunked_prefill_size": 16}
    with Engine(**still, context_length=256, **small) as engine:
        got = engine.generate(prompts, grammar, GREEDY)
        assert engine.snapshot()["pages_in_use"] == 0
    for one, other in zip(want, got, strict=True):
        assert one.token_ids == other.token_ids
        gaps = [a.logprob - b.logprob for a, b in zip(one.choices, other.choices, strict=True)]
        assert max(map(abs, gaps)) < 1e-4


def test_what_cuts_a_faithful_choice(still: dict[str, Any]) -> None:
    grammar = Grammar.choice(["carpet", "carpet seller"], faithful=True)
    with Engine(**still, context_length=256) as engine:
        cut = engine.generate("abc", grammar, {"max_tokens": 3, "temperature": 0})
        stopped = engine.generate("abc", grammar, {**GREEDY, "stop": "pe"})
        told = engine.generate("abc", grammar, {**GREEDY, "origins": True})
        pieces = list(engine.stream("abc", grammar, {**GREEDY, "origins": True}))
    assert (cut.text, cut.finish_reason) == ("car", "length")
    assert (stopped.text, stopped.stop_match) == ("car", "pe")
    assert "".join(piece.text for piece in pieces) == told.text
    origins = [origin for piece in pieces for origin in piece.origins]
    assert origins == ["grafted"] * (len(told.token_ids) - 1) + ["bonus"]


def test_what_cannot_be_weighed_is_refused(still: dict[str, Any]) -> None:
    for name in ("probabilities", "faithful"):
        grammar = Grammar.choice(["a", "b"], **{name: True})
        with pytest.raises(GrammarError, match=f"{name} needs a choice that is the whole output"):
            grammar.after_thinking()
        with pytest.raises(GrammarError, match=f"{name} is for a choice"):
            Grammar("regex", "a", **{name: True})
        with pytest.raises(GrammarError, match=f"{name} must be true or false"):
            Grammar.choice(["a"], **{name: 1})
    faithful = Grammar.choice(["a", "b"], faithful=True)
    with Engine(**still, context_length=64) as engine:
        for name, value in {
            "logprobs": 2,
            "logit_bias": {5: 1.0},
            "min_tokens": 2,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
        }.items():
            with pytest.raises(InvalidRequest, match=f"{name} is for tokens") as caught:
                engine.generate("abc", faithful, {name: value})
            assert caught.value.param == name
        long = Grammar.choice(["x" * 60, "y"], probabilities=True)
        with pytest.raises(GrammarError, match="takes 60 tokens, and at most"):
            engine.generate("abc", long, GREEDY)
        many = Grammar.choice([f"{n:05}-abcdefgh" for n in range(500)], probabilities=True)
        with pytest.raises(GrammarError, match="tokens to weigh, and at most 4096"):
            engine.generate("abc", many, GREEDY)
        assert engine.generate("abc", faithful, GREEDY).text in "ab"
