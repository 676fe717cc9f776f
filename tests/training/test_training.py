"""Training of draft heads: budget, optimizer, the chain of drafts, and what it learns."""

from dataclasses import replace
from random import Random

import pytest
import torch

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.weights import load_eagle, load_eagle3
from overlap_spec.training.acceptance import acceptance, head_guesses
from overlap_spec.training.attention import CausalRows, FirstRows
from overlap_spec.training.batches import Batch, RowStream
from overlap_spec.training.budget import Budget
from overlap_spec.training.export import export_head
from overlap_spec.training.generate import answers, greedy
from overlap_spec.training.head import (
    DraftPass,
    HeadRecipe,
    HeadTrainer,
    new_eagle,
    new_head,
    spread_layers,
)
from overlap_spec.training.optim import orthogonalise, schedule
from overlap_spec.training.trainer import initialise
from tests.support.models import TRAINED


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", vocab_size=512, tie_embeddings=True, **TRAINED)


def chain(steps: int) -> HeadRecipe:
    return HeadRecipe(compile=False, steps=steps)


def make_head(config: ModelConfig, steps: int) -> HeadTrainer:
    target, draw = Decoder(config), Random(4)
    initialise(target, 1)
    sizes = [draw.randint(20, 200) for _ in range(24)]
    rows = [([draw.randint(7, 511) for _ in range(size)], [1.0] * size) for size in sizes]
    stream = RowStream(rows, 4, 512, pad=0)
    head = new_head(target, chain(3))
    return HeadTrainer(target, head, stream, chain(3), Budget(steps=steps))


def test_budget_counts_steps_tokens_or_minutes():
    assert Budget(steps=4, done=2).progress() == 0.5
    assert Budget(tokens=8, tokens_done=2).progress() == 0.25
    assert Budget(minutes=1, used=30).progress() == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="in one of them"):
        Budget()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_orthogonalise_brings_singular_values_near_one(dtype):
    for shape in ((8, 20), (20, 8)):
        matrices = torch.randn(3, *shape)
        together = orthogonalise(matrices, dtype).float()
        values = torch.linalg.svdvals(together)
        assert values.min() > 0.5
        assert values.max() < 1.5
        for matrix, other in zip(matrices, together, strict=True):
            assert torch.allclose(orthogonalise(matrix, dtype).float(), other, atol=0.05)


def test_schedule_rises_stays_and_falls():
    assert schedule(0.0, 0) < schedule(0.1, 100) == 1.0
    assert schedule(0.99, 1000) == pytest.approx(0.02, abs=0.01)
    factors = [schedule(share, 100, decay_from=0.8) for share in (0.5, 0.79, 0.9, 1.0)]
    assert factors == pytest.approx([1, 1, 0.5, 0.02])


def test_training_resumes_to_the_same_state(config, tmp_path):
    straight = make_head(config, 3)
    losses: list[float] = []
    straight.run(report=lambda _share, _step, loss: losses.append(loss))
    assert len(losses) == 3
    assert losses[0] != losses[-1]
    broken = make_head(config, 3)
    broken.step()
    torch.save(broken.state(), tmp_path / "state.pt")
    resumed = make_head(config, 3)
    resumed.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed.run(tmp_path / "end.pt")
    assert (tmp_path / "end.pt").exists()
    for name, value in straight.averaged().state_dict().items():
        assert torch.equal(value, resumed.averaged().state_dict()[name]), name


def test_an_exported_head_loads_strictly(config, tmp_path):
    trainer = make_head(config, 1)
    export_head(trainer.model, tmp_path)
    head = load_eagle3(tmp_path, trainer.target, torch.float32)
    assert head.config.feature_layers == (1, 2, 3)
    runs = [([2, 3, 4, 5], [6, 7, 8, 9, 10, 1])]
    guesses = head_guesses(trainer.target, head, 3)
    assert 1.0 <= acceptance(runs, guesses, "cpu").length <= 4.0


def test_a_trained_eagle_head_drafts_what_its_training_saw(config, tmp_path):
    """Its state is the target's normed output, or its own: exported and loaded it is the same."""
    target = Decoder(config)
    initialise(target, 1)
    head = new_eagle(target, chain(3))
    rows = [([7, 8, 9, 10] * 12, [1.0] * 48)] * 8
    budget = Budget(steps=60)
    stream = RowStream(rows, 4, 192, pad=0)
    losses: list[float] = []
    trainer = HeadTrainer(target, head, stream, chain(3), budget)
    trainer.run(report=lambda _share, _step, loss: losses.append(loss))
    # What the random target says is learnt, and its embedding and head are no part of it.
    assert losses[-1] < losses[0]
    assert {name.split(".")[0] for name, _ in head.named_parameters()} == {"fc", "layers"}
    export_head(head, tmp_path)
    loaded = load_eagle(tmp_path, target, torch.float32)
    tokens = torch.randint(7, 512, (20,))
    mine, its = (head_guesses(target, each, 3)(tokens) for each in (head, loaded))
    assert (mine == its).float().mean() > 0.9


def test_draft_chain_reads_nothing_after_its_own_token(config):
    trainer = make_head(config, 1)
    draft = DraftPass(trainer.model, trainer.target, 1, 12, chain(3))
    tokens = torch.randint(7, 512, (1, 12))
    slot = 6
    with torch.no_grad():
        steps = draft.chain(tokens, draft.observe(tokens)[0])
        for j, step in enumerate(steps):
            other = tokens.clone()
            other[0, slot + j + 1 :] = 9
            changed = draft.chain(other, draft.observe(other)[0])[j]
            assert torch.allclose(step[slot - 1], changed[slot - 1], atol=1e-5)
            other = tokens.clone()
            other[0, slot + j] = 8
            changed = draft.chain(other, draft.observe(other)[0])[j]
            assert not torch.allclose(step[slot - 1], changed[slot - 1], atol=1e-5)


def test_draft_chain_equals_one_row_at_a_time(config):
    trainer = make_head(config, 1)
    head, target = trainer.model, trainer.target
    draft = DraftPass(head, target, 1, 12, chain(4))
    tokens = torch.randint(7, 512, (1, 12))
    slot = 5
    with torch.no_grad():
        features = draft.observe(tokens)[0]
        chained = draft.chain(tokens, features)
        # The same by hand: keys and values of slots 1 … r, then one draft after the other.
        rows = torch.arange(1, slot + 1)
        attend = FirstRows(1, slot)
        fused = head.fuse(features[0, :slot])
        out = head(target.embed_tokens(tokens[0, 1 : slot + 1]), fused, rows, attend)[-1:]
        ((keys, values),) = attend.kept
        for step in range(4):
            assert torch.allclose(out[0], chained[step][slot - 1], atol=1e-5), step

            def one_more(_layer, heads):
                q, k, v = heads.rotated()
                nonlocal keys, values
                keys = torch.cat([keys, k.transpose(0, 1)[None]], 2)
                values = torch.cat([values, v.transpose(0, 1)[None]], 2)
                wide = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (keys, values)]
                query = q.transpose(0, 1)[None]
                return torch.nn.functional.scaled_dot_product_attention(query, *wide).flatten()[
                    None
                ]

            position = torch.tensor([slot + step + 1])
            embeds = target.embed_tokens(tokens[0, position])
            out = head(embeds, out, position, one_more)


def test_a_head_learns_what_the_target_says_at_the_next_tokens(config):
    trainer = make_head(config, 1)
    tokens, weights = torch.randint(7, 512, (2, 12)), torch.ones(2, 12)
    weights[:, :5] = 0
    trainer.recipe = replace(trainer.recipe, scored_share=1.0)
    draft = DraftPass(trainer.model, trainer.target, 2, 12, chain(3))
    with torch.no_grad():
        loss = trainer.loss(Batch(tokens, weights))
        features, logits = draft.observe(tokens)
        total = 0.0
        for step, hidden in enumerate(draft.chain(tokens, features)):
            drafted = trainer.model.logits(hidden).log_softmax(-1).view(2, 11, -1)
            each = []
            for row in range(2):
                # Slot c reads token c + 1 and predicts token c + step + 2.
                for slot in range(11):
                    predicted = slot + step + 2
                    if predicted < 12 and weights[row, predicted]:
                        wanted = logits[row, predicted - 1].softmax(-1)
                        each.append(-(wanted * drafted[row, slot]).sum())
            total += 0.8**step * float(torch.stack(each).mean())
        assert loss.item() == pytest.approx(total, rel=2e-2)
        fewer = make_head(config, 1)
        fewer.recipe = replace(fewer.recipe, scored_share=0.6)
        assert fewer.loss(Batch(tokens, weights)).item() == pytest.approx(loss.item(), rel=1e-3)


def test_feature_layers_are_distinct_inner_ones():
    assert spread_layers(32) == (2, 16, 29)
    assert spread_layers(5) == (1, 3, 4)
    with pytest.raises(ValueError, match="distinct"):
        spread_layers(3)


def test_a_head_may_draft_fewer_tokens(config):
    target = Decoder(config)
    head = new_head(target, HeadRecipe(draft_vocab=(0, 5, 9)))
    assert (torch.arange(3) + head.d2t).tolist() == [0, 5, 9]
    assert head.t2d.nonzero().flatten().tolist() == [0, 5, 9]


def test_greedy_with_a_cache_equals_full_passes(config):
    torch.manual_seed(0)
    model = Decoder(config).eval()
    prompts = [[7, 9, 8, 30], [11], [40, 41, 42, 43, 44, 45]]
    for prompt, output in zip(prompts, greedy(model, prompts, [1], 5), strict=True):
        run = list(prompt)
        for token in output:
            size = len(run)
            with torch.no_grad():
                hidden, _ = model(torch.tensor(run), torch.arange(size), CausalRows(1, size))
                assert int(model.logits(hidden)[-1].argmax()) == token
            run.append(token)


def test_answers_to_many_prompts_are_those_to_each(config):
    torch.manual_seed(0)
    model = Decoder(config).eval()
    prompts = [[7 + n] * (1 + n % 5) for n in range(20)]
    found = dict(pair for some in answers(model, prompts, [], 6, 8) for pair in some)
    assert sorted(found) == list(range(20))
    for number, prompt in enumerate(prompts):
        # Room is what is left to the longest prompt of those that ran together.
        (alone,) = greedy(model, [prompt], [], 6)
        assert found[number] == alone[: len(found[number])]
        assert 3 <= len(found[number]) <= 6
