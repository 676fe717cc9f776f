"""Forced tokens in drafts: text stays plain decoding's, and drafts get longer."""

from typing import Any

import numpy as np
import pytest
import torch

from overlap_spec.drafters.base import HostDraft
from overlap_spec.drafters.grafts import forced_first, graft
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.tiers import Tier
from overlap_spec.types import Output
from tests.support.grafts import PERSON, PROMPTS, SAMPLING, SHAPES, answer, key, lengths, roots_of
from tests.support.tiers import few


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any]) -> list[Output]:
    with Engine(**tiny, algorithm="none", overlap="none", context_length=256) as engine:
        return answer(engine)


@pytest.mark.parametrize("shape", few(SHAPES, "tree"))
@pytest.mark.parametrize("algorithm", few(("eagle3", "ngram", "grammar"), "eagle3"))
def test_grafts_shorten_the_way_to_the_same_text(
    tiny: dict[str, Any], plain: list[Output], algorithm: str, shape: str
) -> None:
    """The random head of this target guesses nothing: what is accepted is what was forced."""
    settings = {**tiny, "algorithm": algorithm, **SHAPES[shape]}
    found = {}
    for overlap in ("none", "double-sync", "once-sync"):
        with Engine(**settings, overlap=overlap, context_length=256) as engine:
            outputs = answer(engine)
            assert key(outputs) == key(plain)
            assert engine.snapshot()["drafter"]["faults"] == 0
            found[overlap] = lengths(outputs)
            if overlap == "once-sync":
                engine.core.grammar.pool.forced = None
                without = answer(engine)
                assert key(without) == key(plain)
    assert found["none"] == found["double-sync"] == found["once-sync"]
    for on, off in zip(outputs, without, strict=True):
        assert off.stats.grafted_tokens == 0
        assert on.stats.accepted_grafts == on.stats.grafted_tokens > 20
        assert on.stats.verifies < off.stats.verifies
        assert on.stats.accept_histogram[-1] > 0


def test_a_key_that_comes_again_is_cut_as_before() -> None:
    """The embedded model cuts keys that it has not seen into tokens of its own."""
    item = {
        "type": "object",
        "properties": {"identification": {"type": "boolean"}},
        "required": ["identification"],
        "additionalProperties": False,
    }
    rows = Grammar.json_schema({"type": "array", "items": item, "minItems": 5, "maxItems": 5})
    with Engine(adaptive="static", grammar_isolated=False) as engine:
        on, again = (engine.generate(PROMPTS[0], rows, SAMPLING) for _ in range(2))
        engine.core.grammar.pool.forced = None
        off = engine.generate(PROMPTS[0], rows, SAMPLING)
    assert on.token_ids == again.token_ids == off.token_ids
    assert on.stats.accept_length > 1.3 * off.stats.accept_length
    # Nothing of one request is known in another.
    assert lengths([on]) == lengths([again])


def test_a_matcher_that_fails_at_it_ends_its_own_request(
    tiny: dict[str, Any], plain: list[Output]
) -> None:
    with Engine(**tiny, context_length=256) as engine:
        handles = [engine.submit(p, PERSON, SAMPLING) for p in PROMPTS]
        matcher = engine.core.grammar.matchers[handles[1].request.id]

        def fail(path: object = ()) -> bytes:
            raise RuntimeError(f"no bytes behind {path}")

        matcher.forced_bytes = fail
        while engine.step():
            pass
        outputs = [handle.output for handle in handles]
    assert outputs[1] is not None
    assert "no bytes behind" in str(outputs[1].error)
    assert key([outputs[0], outputs[2]]) == key([plain[0], plain[2]])


def test_candidates_get_the_forced_token_first_and_stay_distinct() -> None:
    roots = roots_of([[7], [2], [1], [3], []])
    tokens = torch.tensor([[1, 2, 3]] * 5)
    scores = torch.tensor([[-0.1, -1.0, -2.0]] * 5)
    scores, tokens = forced_first(roots, scores, tokens, 0)
    assert tokens.tolist() == [[7, 1, 2], [2, 1, 3], [1, 2, 3], [3, 1, 2], [1, 2, 3]]
    want = [[0, -0.1, -1], [0, -0.1, -2], [0, -1, -2], [0, -0.1, -1], [-0.1, -1, -2]]
    assert torch.allclose(scores, torch.tensor(want))
    again, same = forced_first(roots, scores, tokens, 1)
    assert torch.equal(again, scores)
    assert torch.equal(same, tokens)


@pytest.mark.parametrize(
    ("top_k", "tokens", "parents", "want"),
    [
        # Nothing drafted; what agrees goes on behind the run; what does not is a sibling.
        (3, [], [], [(7, 0), (8, 1)]),
        (3, [7, 8, 9], [0, 1, 2], [(7, 0), (8, 1), (9, 2)]),
        (3, [5, 6], [0, 1], [(7, 0), (8, 1), (5, 0), (6, 3)]),
        (3, [7, 5, 8, 6], [0, 1, 1, 3], [(7, 0), (8, 1), (5, 1), (6, 2)]),
        # A chain has no siblings.
        (1, [7, 8, 9], [0, 1, 2], [(7, 0), (8, 1), (9, 2)]),
        (1, [7, 5, 9], [0, 1, 2], [(7, 0), (8, 1)]),
        # Room for four.
        (3, [1, 2, 3, 4], [0, 0, 0, 0], [(7, 0), (8, 1), (1, 0), (2, 0)]),
    ],
)
def test_a_host_draft_takes_the_run_in(
    top_k: int, tokens: list[int], parents: list[int], want: list[tuple[int, int]]
) -> None:
    scores = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    draft = HostDraft(np.array(tokens, np.int64), np.array(parents, np.int64), scores)
    got = graft(draft, [7, 8], Tier(4, top_k, 5))
    assert got.parents is not None
    assert list(zip(got.tokens.tolist(), got.parents.tolist(), strict=True)) == want
    assert got.scores[:2].tolist() == [0, 0]
    for score, parent in zip(got.scores.tolist(), got.parents.tolist(), strict=True):
        assert score <= (got.scores[parent - 1] if parent else 0)
    assert graft(draft, [], Tier(4, top_k, 5)) is draft


def test_origins_of_longer_tokens_tell_grafts() -> None:
    """A token that could have been a shorter one was not forced, only its bytes were."""
    with Engine(adaptive="static", grammar_isolated=False) as engine:
        again = engine.generate(PROMPTS[2], PERSON, SAMPLING)
        pieces = list(engine.stream(PROMPTS[2], PERSON, {**SAMPLING, "origins": True}))
    origins = [origin for piece in pieces for origin in piece.origins]
    assert 0 < origins.count("grafted") <= again.stats.accepted_grafts
