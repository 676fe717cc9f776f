"""Cuts of forced text: which tokens a branch may go on with, and what a drafter makes of them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from overlap_spec.drafters.base import Roots
from overlap_spec.drafters.cuts import Cuts as DeviceCuts
from overlap_spec.drafters.cuts import cuts_after
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.engine import Engine
from overlap_spec.grammar.cuts import CUT_TOKENS, LENGTH_BITS, Cuts
from overlap_spec.grammar.forced import ForcedRuns
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.kernels import Noise, candidates_among, noise_keys, top_candidates
from overlap_spec.kernels.sampling import CHOICE
from overlap_spec.types import CUT_BYTES
from tests.drafters.test_grafts import PERSON, PROMPTS, SAMPLING, SHAPES, key, lengths

TEXTS = [*(bytes([b]) for b in range(256)), b"", b"na", b"name", b'":', b'":"', b"x" * 40, b"na"]
VOCABULARY = Vocabulary(tuple(TEXTS), len(TEXTS), (256,), frozenset())
NA, NAME, COLON = 257, 258, 259


def number(token: int) -> int:
    return token << LENGTH_BITS | len(TEXTS[token])


def test_cuts_are_all_tokens_with_which_the_text_can_go_on() -> None:
    cuts = Cuts(VOCABULARY)
    table = cuts.of(b'name":').reshape(CUT_BYTES, CUT_TOKENS)
    assert cuts.of(b'name":') is cuts.of(b'name":')
    found = [[n for n in row.tolist() if n >= 0] for row in table]
    assert found[:6] == [
        [number(ord("n")), number(NA), number(NAME)],
        [number(ord("a"))],
        [number(ord("m"))],
        [number(ord("e"))],
        # A token that goes on behind the text is none.
        [number(ord('"')), number(COLON)],
        [number(ord(":"))],
    ]
    assert found[6:] == [[]] * (CUT_BYTES - 6)
    # A long text has cuts up to the last byte that is told; too many tokens, the shortest and the
    # longest.
    long = Cuts(Vocabulary(tuple(b"x" * n for n in range(12)), 12, (0,), frozenset()))
    table = long.of(b"x" * 90).reshape(CUT_BYTES, CUT_TOKENS)
    assert (table == table[0]).all()
    assert (table[0] & 31).tolist() == [1, 2, 3, 4, 8, 9, 10, 11]
    assert (table[0] >> LENGTH_BITS == table[0] & 31).all()


def roots_of(texts: list[bytes], starts: list[int]) -> Roots:
    cuts, none = Cuts(VOCABULARY), torch.zeros(len(texts), dtype=torch.int64)
    table = torch.from_numpy(np.stack([cuts.of(text) for text in texts]))
    return Roots(
        none,
        none[:, None],
        none,
        none,
        torch.full((len(texts), 15), -1),
        cuts=table.view(len(texts), CUT_BYTES, CUT_TOKENS),
        cut_at=torch.tensor(starts),
    )


def test_a_branch_goes_on_behind_its_tokens() -> None:
    cuts = DeviceCuts(roots_of([b'name":', b"na", b""], [0, 1, CUT_BYTES]), None)
    known = cuts.at(cuts.start)
    assert [[n for n in row if n >= 0] for row in known.ids.tolist()] == [
        [ord("n"), NA, NAME],
        [ord("a")],
        [],
    ]
    assert torch.equal(known.bias == 0, known.ids >= 0)
    tokens = torch.tensor([[NAME, NA, 7], [ord("a"), NA, 0], [ord("n"), 0, 1]])
    places = cuts.after(known, tokens)
    nowhere = CUT_BYTES
    assert places.tolist() == [[4, 2, nowhere], [2, nowhere, nowhere], [nowhere] * 3]
    # Behind the text nothing is known.
    ids = cuts.at(places).ids.view(3, 3, -1)
    assert (ids[1:] == -1).all()
    assert ids[0, 0, :2].tolist() == [ord('"'), COLON]


def test_a_root_goes_on_behind_its_bonus() -> None:
    cuts = Cuts(VOCABULARY)
    told = torch.from_numpy(np.stack([cuts.of(b'name":')] * 4 + [cuts.of(b"")]))
    table, place = cuts_after(told, torch.tensor([NA, ord("n"), COLON, -1, 0]))
    assert place.tolist() == [2, 1, CUT_BYTES, CUT_BYTES, CUT_BYTES]
    assert table.shape == (5, CUT_BYTES, CUT_TOKENS)


@pytest.mark.parametrize("noisy", [False, True])
def test_candidates_among_few_are_those_of_masked_logits(noisy: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50, generator=generator)
    own = torch.stack([torch.randperm(50, generator=generator)[:5] for _ in range(6)])
    own[2, 1:], own[3, 3] = -1, -1
    noise = None
    if noisy:
        heat = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 1.0])
        noise = Noise(heat, noise_keys(torch.arange(6), torch.arange(6) + 9, CHOICE))
    bias = torch.where(own >= 0, 0.0, -torch.inf)
    given = own.clamp(min=0), own, bias, noise
    scores, tokens = candidates_among(logits, 3, *given)
    masked = torch.full_like(logits, -torch.inf)
    for row, ids in enumerate(own.tolist()):
        for token in (t for t in ids if t >= 0):
            masked[row, token] = logits[row, token]
    want, best = top_candidates(masked, 3, None, noise)
    assert torch.allclose(scores, want, atol=1e-5)
    alive = want > -torch.inf
    assert torch.equal(tokens[alive], best[alive])
    assert alive.sum(1).tolist() == [3, 3, 1, 3, 3, 3]
    # More candidates than tokens.
    assert (candidates_among(logits, 8, *given)[0][:, 5:] == -torch.inf).all()


class Fixed(TreeDrafter):
    """Logits that are given."""

    def __init__(self, logits: Tensor, offsets: Tensor | None) -> None:
        cache: Any = None
        super().__init__(cache, torch.zeros(1, 1), 0, offsets)
        self.given = logits

    @classmethod
    def build(cls, *_: Any) -> Fixed:
        raise NotImplementedError

    def advance(self, tokens: Tensor, before: Any, positions: Tensor, attend: Any) -> Tensor:
        raise NotImplementedError

    def logits(self, states: Tensor) -> Tensor:
        return self.given.expand(len(states), -1)


def test_tokens_that_a_drafter_lacks_are_no_candidates() -> None:
    """Draft ids 0 to 3 are the targets' 5, 2, 9 and 4."""
    drafter = Fixed(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), torch.tensor([5, 1, 7, 1]))
    rows = [[9, 5, 8], [3, 30, -1], [-1, -1, -1], [4, 3, -1]]
    roots, table = roots_of([b""] * 4, [0] * 4), torch.full((4, CUT_BYTES, CUT_TOKENS), -1)
    table[:, 0, :3] = torch.tensor(
        [[t << LENGTH_BITS | 1 if t >= 0 else -1 for t in r] for r in rows]
    )
    cuts = DeviceCuts(roots._replace(cuts=table.int()), drafter.draft_ids)
    scores, tokens = drafter.candidates(torch.zeros(4, 1), 2, None, cuts.at(cuts.start))
    assert tokens[0].tolist() == [9, 5]
    # None of them is known to it, or none is told.
    assert tokens[1].tolist() == tokens[2].tolist() == [2, 4]
    assert tokens[3, 0] == 4
    assert scores[3].tolist() == [0.0, -np.inf]


@pytest.mark.parametrize("algorithm", ["eagle3", "draft_model"])
@pytest.mark.parametrize("shape", SHAPES)
def test_forced_text_is_drafted_whatever_the_bonus_was(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, algorithm: str, shape: str
) -> None:
    """Without any run: the cuts alone make random drafters right."""
    settings = {**tiny, "adaptive": "static", "mask_deadline_ms": None, "context_length": 256}
    monkeypatch.setattr(ForcedRuns, "tokens", lambda *_: [])
    asked = [SAMPLING, {**SAMPLING, "temperature": 1.0, "seed": 4}]
    with Engine(**settings, algorithm="none", overlap="none") as engine:
        plain = [engine.generate(PROMPTS, PERSON, one) for one in asked]
    settings |= {"algorithm": algorithm, **SHAPES[shape]}
    if algorithm == "draft_model":
        settings["draft"] = tiny["model"]
    found = []
    for overlap in ("none", "double-sync", "once-sync"):
        with Engine(**settings, overlap=overlap) as engine:
            outputs = [engine.generate(PROMPTS, PERSON, one) for one in asked]
            assert [key(one) for one in outputs] == [key(one) for one in plain]
            assert engine.snapshot()["drafter"]["faults"] == 0
            found.append([lengths(one) for one in outputs])
            if overlap == "once-sync":
                engine.core.grammar.pool.forced = None
                without = [engine.generate(PROMPTS, PERSON, one) for one in asked]
    assert found[0] == found[1] == found[2]
    for on, off in zip(chain(*outputs), chain(*without), strict=True):
        assert on.stats.grafted_tokens == 0
        assert on.stats.accepted_drafts > 30
        assert on.stats.verifies < off.stats.verifies or algorithm == "draft_model"


def test_wrong_cuts_change_no_text(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = Cuts.of

    def wrong(self: Cuts, text: bytes) -> Any:
        table = right(self, text).copy().reshape(CUT_BYTES, CUT_TOKENS)
        table[::2, 1] = 200 << LENGTH_BITS | 1
        table[1::3, 0] = 90 << LENGTH_BITS | 7
        table[5::7] = -1
        return table.ravel()

    settings = {**tiny, "adaptive": "static", "mask_deadline_ms": None, "context_length": 256}
    with Engine(**settings, algorithm="none", overlap="none") as engine:
        plain = engine.generate(PROMPTS, PERSON, SAMPLING)
    monkeypatch.setattr(Cuts, "of", wrong)
    with Engine(**settings, **SHAPES["tree"]) as engine:
        assert key(engine.generate(PROMPTS, PERSON, SAMPLING)) == key(plain)
