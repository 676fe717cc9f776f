"""Training of heads that draft in one pass: masks as at inference, anchors, and what is learnt."""

import pytest
import torch

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.parallel_eagle import ParallelHead, load_parallel
from overlap_spec.training.acceptance import acceptance, head_guesses
from overlap_spec.training.attention import CausalRows
from overlap_spec.training.batches import RowStream
from overlap_spec.training.budget import Budget
from overlap_spec.training.export import export_head
from overlap_spec.training.head import HeadRecipe, new_head
from overlap_spec.training.parallel import ParallelPass, ParallelTrainer, new_parallel
from overlap_spec.training.trainer import initialise
from tests.support.models import TRAINED

MASK = 2
CONFIG = ModelConfig("LlamaForCausalLM", vocab_size=256, tie_embeddings=True, **TRAINED)


def recipe(**others: float) -> HeadRecipe:
    return HeadRecipe(compile=False, steps=4, **others)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target() -> Decoder:
    """A random one that is sure of what it says."""
    model = Decoder(CONFIG)
    initialise(model, 1)
    model.norm.weight.data.mul_(40)
    return model.eval().requires_grad_(False)


@pytest.fixture
def head(target: Decoder) -> ParallelHead:
    """With random weights in its later layer too."""
    made = new_parallel(target, recipe(), MASK)
    initialise(made, 5)
    return made


@torch.no_grad()
def test_masks_learn_what_they_see_at_inference(target: Decoder, head: ParallelHead) -> None:
    """There all masks behind a root are one causal pass behind its text."""
    tokens = torch.randint(7, 256, (2, 12), generator=torch.Generator().manual_seed(3))
    draft = ParallelPass(head, target, 2, 12, recipe())
    features, _ = draft.observe(tokens)
    chain = [out.view(2, 11, -1) for out in draft.chain(tokens, features)]
    assert len(chain) == 4
    for row in range(2):
        for root in (1, 4, 11):
            known = torch.cat([tokens[row, 1 : root + 1], torch.full((3,), MASK)])
            before = torch.cat([features[row, :root], head.mask_hidden.expand(3, -1)])
            width = root + 3
            found = head(
                target.embed_tokens(known),
                head.fuse(before),
                torch.arange(1, width + 1),
                CausalRows(1, width),
            )
            for depth, each in enumerate(chain):
                assert torch.allclose(each[row, root - 1], found[root - 1 + depth], atol=1e-5)


@torch.no_grad()
def test_anchors_are_nested_and_drawn_by_weight(target: Decoder, head: ParallelHead) -> None:
    tokens = torch.randint(7, 256, (3, 24), generator=torch.Generator().manual_seed(4))
    weights = torch.ones(3, 24)
    # Of the last row's tokens only those from 13 on count.
    weights[2, :13] = 0
    draft = ParallelPass(head, target, 3, 24, recipe(scored_share=0.4, kept_share=0.5))
    features, _ = draft.observe(tokens)
    every = draft.chain(tokens, features)
    draws = [list(draft.drafts(tokens, features, weights, number)) for number in (0, 0, 1)]
    counts = [len(slots) for _, slots in draws[0]]
    assert counts == [28, 27, 15, 6]
    for one, other in zip(draws[0], draws[1], strict=True):
        assert torch.equal(one[1], other[1])
    assert not torch.equal(draws[0][1][1].sort().values, draws[2][1][1].sort().values)
    for drawn in draws:
        for depth, (hidden, slots) in enumerate(drawn):
            assert torch.allclose(hidden, every[depth][slots], atol=1e-5)
            if depth > 1:
                assert set(slots.tolist()) < set(drawn[depth - 1][1].tolist())
        # A slot's first mask predicts the token two places behind it.
        assert all(slot % 23 + 3 >= 13 for slot in drawn[1][1].tolist() if slot >= 46)


@pytest.mark.ci
def test_it_learns_all_depths_and_drafts_the_same_when_loaded(target: Decoder, tmp_path) -> None:
    """Rows that repeat: after its training most chains of four are what the target says."""
    rows = [([7, 8, 9, 10, 11] * 8, [1.0] * 40)] * 8
    stream = RowStream(rows, 4, 160, pad=0)
    head = new_parallel(target, recipe(), MASK, new_head(target, recipe()))
    losses: list[float] = []
    trainer = ParallelTrainer(target, head, stream, recipe(), Budget(steps=120))
    trained = trainer.run(report=lambda _share, _step, loss: losses.append(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(trained.mask_hidden, new_parallel(target, recipe(), MASK).mask_hidden)
    export_head(trained, tmp_path)
    loaded = load_parallel(tmp_path, target, torch.float32)
    assert loaded.config.mask_token == MASK
    tokens = torch.tensor([7, 8, 9, 10, 11] * 8)
    mine, its = (head_guesses(target, each, 4)(tokens) for each in (trained, loaded))
    assert (mine == its).float().mean() > 0.95
    with torch.no_grad():
        hidden, _ = target(tokens, torch.arange(40), CausalRows(1, 40))
        said = target.logits(hidden).argmax(-1)
    for depth in range(4):
        # Of root p at depth d: what the target says behind p + d.
        right = mine[depth, 1 : 40 - depth] == said[1 + depth :]
        assert right.float().mean() > 0.8, depth
    assert (
        1.0
        <= acceptance(
            [([7, 8, 9], said[3:9].tolist())], head_guesses(target, loaded, 4), "cpu"
        ).length
        <= 5.0
    )
