"""How the embedded model is made: templates, cases, tokenizer, and small trainings that resume."""

from dataclasses import replace
from functools import partial
from itertools import cycle
from random import Random

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from examples.embedded_model.__main__ import main
from examples.embedded_model.data import (
    ASSISTANT,
    BOS,
    END,
    USER,
    DocumentMaker,
    held_out_cases,
    prompt_text,
    tools_text,
)
from examples.embedded_model.draft_model import (
    RECIPE,
    DraftModelTrainer,
    cut_out,
    draft_model_config,
)
from examples.embedded_model.fillers import Fillers, word_lists
from examples.embedded_model.stream import BatchStream, WorkerStream
from examples.embedded_model.target import (
    TargetRecipe,
    TargetTrainer,
    deepened,
    embedded_config,
    export_target,
    new_target,
)
from examples.embedded_model.templates import library
from examples.embedded_model.tokenizer import corpus, save_tokenizer, train_tokenizer
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.vocabulary import map_vocabulary
from overlap_spec.models.weights import load_decoder, load_eagle3
from overlap_spec.training.attention import CausalRows
from overlap_spec.training.batches import Batch
from overlap_spec.training.budget import Budget
from overlap_spec.training.export import export_head
from overlap_spec.training.head import HeadRecipe, new_head
from overlap_spec.training.trainer import initialise
from tests.support.models import TRAINED

KINDS = ("seen", "unseen", "seen_tools", "unseen_tools")
GSM8K = [("How many are 2 and 3?", "2+3=<<2+3=5>>5.\n#### 5"), ("What is 4 less 1?", "#### 3")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus(0, 300, GSM8K), 512)


@pytest.fixture(scope="module")
def tiny_config():
    return replace(embedded_config(512), **TRAINED)


def test_fillers_are_split_and_seeded():
    for kind, (known, held_out) in word_lists().items():
        assert known, kind
        assert not set(known) & set(held_out)
    city = {Fillers(Random(i), held_out=True).word("city") for i in range(50)}
    assert city <= set(word_lists()["city"][1])
    draws = [[Fillers(Random(7)).draw(kind) for kind in ("person", "date", "items")] for _ in "ab"]
    assert draws[0] == draws[1]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_fit_their_schemas_and_come_from_the_seed(kind):
    cases = held_out_cases(5, 80, kind)
    assert cases == held_out_cases(5, 80, kind)
    assert cases != held_out_cases(6, 80, kind)
    lib = library()
    known = {t.id for t in (lib.held_out() if kind.startswith("un") else lib.training())}
    for case in cases:
        jsonschema.Draft202012Validator.check_schema(case.schema)
        jsonschema.validate(case.answer, case.schema)
        assert list(case.schema["properties"]) == list(case.answer) == case.schema["required"]
        assert case.template_id in known
        assert bool(case.tools) == kind.endswith("tools")


def test_documents_are_seeded_and_of_every_kind():
    made = [[DocumentMaker(Random(3), GSM8K).make(False) for _ in range(1)] for _ in "ab"]
    assert made[0] == made[1]
    maker = DocumentMaker(Random(3), GSM8K)
    for kind in {**maker.MAIN, **maker.WARM_UP}:
        document = getattr(maker, kind)()
        assert document[0][0].startswith(BOS)
        assert any(weight == 1.0 for _, weight in document)


def test_tokenizer_round_trips_and_keeps_digits_and_names_apart(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path, 512)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = 'Zoë paid 1234 €: {"name":"José","kinds":["a","b"]}\n日本 naïve'
    encoding = loaded.encode(text)
    assert encoding.ids == tokenizer.encode(text).ids
    assert encoding.tokens[0] == BOS
    assert loaded.decode(encoding.ids) == text
    assert {"1", "2", "3", "4"} <= set(encoding.tokens)
    pair = [loaded.encode(t, add_special_tokens=False).ids for t in ("Paris", 'x "Paris" Paris')]
    assert pair[1][-len(pair[0]) :] == pair[0]


def test_chat_template_writes_what_training_reads(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path, 512)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path)
    case = held_out_cases(1, 1, "seen_tools")[0]
    turn = [{"role": "user", "content": case.prompt}]
    text = fast.apply_chat_template(
        turn, tools=list(case.tools), tokenize=False, add_generation_prompt=True
    )
    assert text == prompt_text(case)
    assert tools_text(case) in text
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    turn += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "{}"},
    ]
    text = fast.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text.startswith(f"{BOS}{USER}")
    assert f'{ASSISTANT}{{"name":"f","arguments":{{"a":1}}}}{END}' in text
    assert text.endswith(f"<|tool|>{{}}{END}{ASSISTANT}")


def stream(tokenizer: Tokenizer) -> BatchStream:
    return BatchStream(tokenizer, GSM8K, 4, tokens_per_batch=512, max_length=224, chunk=32)


@pytest.mark.ci
def test_processes_write_the_batches_of_their_seeds(tokenizer):
    make = partial(BatchStream, tokenizer, GSM8K, tokens_per_batch=512, max_length=224)
    made = []
    for _ in range(2):
        some = WorkerStream(make, 4, 2)
        made.append([some.next() for _ in range(6)])
        some.close()
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.weights, other.weights)
        assert one.length == other.length == int((one.tokens != 6).sum())
    first, second = made[0][::2], made[0][1::2]
    seed = Random("4 1 0").getrandbits(62)
    alone = make(seed=seed)
    for batch in second:
        assert torch.equal(alone.next().tokens, batch.tokens)
    assert not torch.equal(first[0].tokens, second[0].tokens)
    later = WorkerStream(make, 4, 2)
    later.restore(some.state())
    assert not torch.equal(later.next().tokens, made[0][0].tokens)
    assert later.taken == 7
    later.close()


class Given:
    """Documents that are given batches, over and over."""

    def __init__(self, *batches: Batch) -> None:
        self.left = cycle(batches)

    def next(self, warm_up: bool = False) -> Batch:  # noqa: ARG002
        return next(self.left)

    def state(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None:
        pass


def test_an_exported_target_loads_strictly(tokenizer, tiny_config, tmp_path):
    target = new_target(tiny_config, 1)
    export_target(target, tokenizer, tmp_path)
    model = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    wanted = target.layers[2].self_attn.qkv_proj.weight.bfloat16().float()
    assert torch.equal(model.layers[2].self_attn.qkv_proj.weight, wanted)


def test_a_step_of_small_batches_has_the_gradient_of_one_large(tiny_config):
    rows = [(torch.randint(7, 512, (4, 64)), torch.rand(4, 64).round()) for _ in range(2)]
    halves = [Batch(tokens, weights, 256) for tokens, weights in rows]
    whole = Batch(*(torch.cat([row[i] for row in rows]) for i in (0, 1)), 512)
    recipe = TargetRecipe(compile=False, scored_share=1.0, tokens_per_step=512)
    trainers = [
        TargetTrainer(new_target(tiny_config, 1), Given(*batches), recipe, Budget(steps=5))
        for batches in (halves, [whole])
    ]
    small, large = (trainer.backward().item() for trainer in trainers)
    assert small == pytest.approx(large, rel=2e-2)
    assert [trainer.budget.tokens_done for trainer in trainers] == [512, 512]
    for one, other in zip(*(t.model.parameters() for t in trainers), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=3e-3)


def test_training_goes_on_from_given_weights(tokenizer, tiny_config, tmp_path):
    first = new_target(tiny_config, 3)
    export_target(first, tokenizer, tmp_path / "old" / "target")
    words = f"--init {tmp_path}/old --out {tmp_path}/new --work {tmp_path}/work --only target"
    main([*words.split(), "--tokens-target", "0.004", "--no-compile"])
    cpu = torch.device("cpu")
    old, new = (
        load_decoder(tmp_path / name / "target", torch.float32, cpu) for name in ("old", "new")
    )
    assert new.config == old.config
    change = (new.embed_tokens.weight - old.embed_tokens.weight).abs().max()
    assert 0 < change < 0.1
    texts = [(tmp_path / name / "target" / "tokenizer.json").read_text() for name in ("old", "new")]
    assert texts[0] == texts[1]
    saved = torch.load(tmp_path / "work" / "target.pt", weights_only=False)
    assert saved["tokens"] >= 4000


@pytest.mark.ci
def test_a_deeper_model_begins_as_the_same_function(tokenizer, tiny_config):
    first = new_target(tiny_config, 3)
    deeper = deepened(first, tiny_config.num_layers + 1)
    tokens, positions = torch.randint(7, 500, (12,)), torch.arange(12)
    logits = [
        model.logits(model(tokens, positions, CausalRows(1, 12))[0]) for model in (first, deeper)
    ]
    assert torch.equal(*logits)
    with pytest.raises(ValueError, match="can grow to"):
        deepened(first, tiny_config.num_layers - 1)
    # The new layer learns: its projections leave zero with the first step.
    added = [layer for layer in deeper.layers if not layer.mlp.down_proj.weight.any()]
    assert len(added) == 1
    recipe = TargetRecipe(compile=False, warm_up_share=0.0)
    trainer = TargetTrainer(deeper, stream(tokenizer), recipe, Budget(steps=2))
    trainer.run()
    assert all(layer.mlp.down_proj.weight.any() for layer in trainer.model.layers)


@pytest.mark.ci
def test_a_head_goes_on_from_the_one_of_init(tokenizer, tiny_config, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    target = new_target(tiny_config, 3)
    for folder in (old, new):
        export_target(target, tokenizer, folder / "target")
    given = new_head(target, HeadRecipe(seed=9))
    export_head(given, old / "eagle3")
    words = f"--only head --init {old} --out {new} --work {tmp_path}/work --no-compile"
    main([*words.split(), "--tokens-head", "0.002"])
    made, other = load_eagle3(new / "eagle3", target, torch.float32), new_head(target, HeadRecipe())
    off = [made.fc.weight - head.fc.weight for head in (given, other)]
    assert 0 < off[0].norm() < 0.5 * off[1].norm()
    # The answers that the target gave, which half of the rows were.
    rows = torch.load(tmp_path / "work" / "own_outputs.pt")
    assert len(rows) == 512 + 160
    assert {0.1, 1.0} == set(rows[0][1])


def test_a_draft_model_learns_its_targets_probabilities(tiny_config):
    target, draft = Decoder(tiny_config), Decoder(draft_model_config(tiny_config))
    for seed, model in enumerate((target, draft)):
        initialise(model, seed)
        with torch.no_grad():
            model.embed_tokens.weight *= 20
    tokens, weights = torch.randint(7, 512, (2, 12)), torch.ones(2, 12)
    recipe = replace(RECIPE, compile=False, scored_share=1.0, tokens_per_step=24)
    documents = Given(Batch(tokens, weights))
    trainer = DraftModelTrainer(target, draft, documents, recipe, Budget(steps=10))
    with torch.no_grad():
        positions = torch.arange(12).repeat(2)
        hidden, _ = draft(tokens.flatten(), positions, CausalRows(2, 12))
        drafted = draft.logits(hidden).log_softmax(-1).view(2, 12, -1)[:, :-1]
        known, _ = target(tokens.flatten(), positions, CausalRows(2, 12))
        wanted = target.logits(known).softmax(-1).view(2, 12, -1)[:, :-1]
        soft = -(wanted * drafted).sum(-1).mean()
        hard = -drafted.gather(2, tokens[:, 1:, None]).mean()
        assert abs(hard - soft) > 0.1
    assert trainer.backward().item() == pytest.approx(soft.item(), rel=5e-3)
    assert all(weight.grad is None for weight in target.parameters())


def test_a_draft_model_begins_as_the_best_part_of_its_target(tiny_config):
    target = Decoder(replace(tiny_config, intermediate_size=128))
    initialise(target, 1)
    # Each row says one token again and again, which large embeddings alone predict.
    tokens = torch.arange(20, 36).repeat_interleave(12).view(16, 12)
    batch = Batch(tokens, torch.ones(16, 12))
    with torch.no_grad():
        target.embed_tokens.weight *= 50
        # Layer 2 destroys what passes through it; in layer 1 the first 32 channels do nothing.
        target.layers[2].mlp.down_proj.weight *= 50
        target.layers[1].mlp.down_proj.weight[:, :32] = 0
    draft = cut_out(target, batch)
    assert draft.config == draft_model_config(target.config)
    own = [layer.self_attn.qkv_proj.weight for layer in draft.layers]
    for one, layer in zip(own, (0, 1, 3), strict=True):
        assert torch.equal(one, target.layers[layer].self_attn.qkv_proj.weight)
    gate_up, down = (getattr(draft.layers[1].mlp, n).weight for n in ("gate_up_proj", "down_proj"))
    used = target.layers[1].mlp
    assert torch.equal(down, used.down_proj.weight[:, 32:])
    assert torch.equal(gate_up[:96], used.gate_up_proj.weight[32:128])
    assert torch.equal(gate_up[96:], used.gate_up_proj.weight[160:])
    assert torch.equal(draft.embed_tokens.weight, target.embed_tokens.weight)


@pytest.mark.ci
def test_a_draft_model_is_made_anew_for_a_target_that_is_there(tokenizer, tiny_config, tmp_path):
    target = new_target(tiny_config, 3)
    export_target(target, tokenizer, tmp_path / "target")
    words = f"--only draft-model --out {tmp_path} --work {tmp_path}/work --no-compile"
    main([*words.split(), "--tokens-draft-model", "0.01"])
    sizes = (tiny_config.vocab_size,) * 2
    assert map_vocabulary(tmp_path / "draft_model", tmp_path / "target", *sizes).drafted is None
    made = load_decoder(tmp_path / "draft_model", torch.float32, torch.device("cpu"))
    assert made.config.vocab_size == tiny_config.vocab_size
    saved = torch.load(tmp_path / "work" / "draft_model.pt", weights_only=False)
    assert saved["tokens"] >= 10000
    first = made.embed_tokens.weight.clone()
    main([*words.split(), "--tokens-draft-model", "0.02", "--resume"])
    made = load_decoder(tmp_path / "draft_model", torch.float32, torch.device("cpu"))
    assert 0 < (made.embed_tokens.weight - first).abs().max() < 0.5
