"""Log-probabilities of prompts: those of transformers, however the prompt is computed."""

from typing import Any

import pytest
import torch

from overlap_spec.engine import Engine
from overlap_spec.errors import InvalidRequest
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import Output, PromptLogprobs
from overlap_spec.worker.extras import prompt_logprobs
from tests.support.tiers import few

# Lengths around the edges of pages (16) and chunks (48).
LENGTHS = (1, 2, 16, 17, 48, 49, 130, 200)
TOPS = (0, None, 3, 1, None, 2, 5, None)
PERSON = Grammar.json_schema({"type": "object", "properties": {"name": {"enum": ["Ada", "Bo"]}}})
GRAMMARS = (None, PERSON, PERSON, None, None, PERSON, None, None)
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"algorithm": "none"},
    "tree": {"algorithm": "eagle3", "num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 12},
    "ngram": {"algorithm": "ngram", "num_steps": 4},
}
CLOSE = 1e-4


@pytest.fixture(scope="module")
def still(tiny: dict[str, Any]) -> dict[str, Any]:
    """No deadline: a busy machine must not fail a test."""
    return {**tiny, "mask_deadline_ms": None, "chunked_prefill_size": 48}


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(32, 120, (length,), generator=generator).tolist()


def check(model: Any, ids: list[int], told: tuple[PromptLogprobs | None, ...], top: int) -> None:
    """One entry a token; value, rank and best tokens as the plain model has them."""
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert len(told) == len(ids)
    assert told[0] is None
    for row, (token, entry) in enumerate(zip(ids[1:], told[1:], strict=True)):
        assert entry is not None
        own = wanted[row, token]
        assert abs(entry.logprob - own) < CLOSE
        # Neighbours that are closer than rounding may change places.
        better = (wanted[row] > own + CLOSE).sum(), (wanted[row] > own - CLOSE).sum()
        assert better[0] + 1 <= entry.rank <= max(better[1], 1)
        best = wanted[row].topk(top).values.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best, abs=CLOSE)
        for place, (each, p) in enumerate(entry.top, 1):
            assert abs(p - wanted[row, each]) < CLOSE
            if each == token:
                assert (p, place) == (entry.logprob, entry.rank)


def check_all(reference: Any, prompts: list[list[int]], outputs: list[Output]) -> None:
    for ids, top, output in zip(prompts, TOPS, outputs, strict=True):
        if top is None:
            assert output.prompt_logprobs == ()
        else:
            check(reference, ids, output.prompt_logprobs, top)


@pytest.mark.parametrize(
    ("drafter", "overlap"),
    few(
        [("none", "once-sync"), ("tree", "none"), ("tree", "once-sync"), ("ngram", "double-sync")],
        ("tree", "once-sync"),
    ),
)
def test_in_a_mixed_batch_of_chunks(
    still: dict[str, Any], reference: Any, drafter: str, overlap: str
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    plain: list[Any] = [{"max_tokens": 12, "temperature": 0}] * len(prompts)
    asked = [{**p, "prompt_logprobs": top} for p, top in zip(plain, TOPS, strict=True)]
    with Engine(**still, **DRAFTERS[drafter], overlap=overlap, context_length=256) as engine:
        wanted = engine.generate(prompts, list(GRAMMARS), plain)
        engine.flush_cache()
        outputs = engine.generate(prompts, list(GRAMMARS), asked)
        check_all(reference, prompts, outputs)
        # To be told of it changes nothing.
        assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
        assert engine.snapshot()["pages_in_use"] == 0
        assert engine.snapshot()["drafter"]["faults"] == 0


@pytest.mark.ci
def test_two_ranks_tell_the_same(still: dict[str, Any], reference: Any) -> None:
    """What a chunk is asked reaches the other rank with the plan."""
    ids = prompt(130, 9)
    with Engine(**still, context_length=256, tensor_parallel_size=2, graphs=False) as engine:
        told = engine.generate(ids, max_tokens=2, prompt_logprobs=3).prompt_logprobs
    check(reference, ids, told, 3)


def test_cached_rows_are_computed_again(still: dict[str, Any], reference: Any) -> None:
    ids = prompt(150, 7)
    with Engine(**still, context_length=256) as engine:
        first = engine.generate(ids, max_tokens=8)
        asked = engine.generate(ids, max_tokens=8, prompt_logprobs=2)
        longer = engine.generate([*ids, *prompt(20, 8)], max_tokens=8, prompt_logprobs=0)
        later = engine.generate(ids, max_tokens=8)
        assert engine.snapshot()["pages_in_use"] == 0
    check(reference, ids, asked.prompt_logprobs, 2)
    check(reference, [*ids, *prompt(20, 8)], longer.prompt_logprobs, 0)
    assert (asked.stats.cached_tokens, longer.stats.cached_tokens) == (0, 0)
    # What was computed for them serves others.
    assert later.stats.cached_tokens == 144
    assert first.token_ids == asked.token_ids == later.token_ids


@pytest.mark.parametrize("prefix_cache", few([True, False], True))
def test_after_preemption(still: dict[str, Any], reference: Any, prefix_cache: bool) -> None:
    prompts = [prompt(90, seed) for seed in range(6)]
    sampling = {"max_tokens": 100, "temperature": 0, "prompt_logprobs": 1, "ignore_eos": True}
    room = {"max_total_tokens": 512, "prefix_cache": prefix_cache}
    with Engine(**still, **room, context_length=256) as engine:
        outputs = engine.generate(prompts, None, sampling)
        assert engine.snapshot()["preemptions"] > 0
        assert engine.snapshot()["pages_in_use"] == 0
    for ids, output in zip(prompts, outputs, strict=True):
        check(reference, ids, output.prompt_logprobs, 1)


def test_in_blocks_of_the_vocabulary(
    still: dict[str, Any], reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven rows' logits at a time."""
    monkeypatch.setattr(prompt_logprobs, "BLOCK_ENTRIES", 7 * 260)
    ids = prompt(100, 3)
    widths, score = [], prompt_logprobs._score

    def noted(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
        widths.append(len(logits))
        return score(logits, tokens, top)

    monkeypatch.setattr(prompt_logprobs, "_score", noted)
    with Engine(**still, context_length=256) as engine:
        output = engine.generate(ids, max_tokens=1, prompt_logprobs=2)
    check(reference, ids, output.prompt_logprobs, 2)
    # Chunks of 48, 48 and 3 rows.
    assert widths == [7, 7, 7, 7, 7, 7, 6] * 2 + [3]


def test_pieces_of_the_prompt_come_first(still: dict[str, Any], reference: Any) -> None:
    ids = prompt(300, 5)
    with Engine(**still) as engine:
        pieces = list(engine.stream(ids, max_tokens=8, prompt_logprobs=40))
    told = [piece for piece in pieces if piece.prompt_logprobs]
    assert len(told) > 1
    assert pieces[: len(told)] == told
    assert not any(piece.text or piece.token_ids for piece in told)
    check(reference, ids, tuple(entry for piece in told for entry in piece.prompt_logprobs), 40)


def test_what_is_refused(still: dict[str, Any]) -> None:
    with Engine(**still) as engine:
        for wrong in (-1, True, 1.0):
            with pytest.raises(InvalidRequest, match="prompt_logprobs must be an integer >= 0"):
                engine.generate("a", prompt_logprobs=wrong)  # type: ignore[arg-type]
        ids = prompt(256, 0)
        with pytest.raises(InvalidRequest, match="262400; 262144 are allowed") as caught:
            engine.generate(ids, max_tokens=1, prompt_logprobs=1024)
        assert caught.value.param == "prompt_logprobs"
        whole = engine.generate(ids, max_tokens=1, prompt_logprobs=1023).prompt_logprobs[1]
        assert whole is not None
        # As many as there are tokens.
        assert len(whole.top) == engine.core.worker.runner.tables.vocab_size
