"""The training room: templates, generated cases, tokenizer, and small trainings that resume."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from overlap_spec.models.decoder import Decoder
from overlap_spec.models.vocabulary import map_vocabulary
from overlap_spec.models.weights import load_decoder, load_eagle3
from overlap_spec.training import embedded
from overlap_spec.training.acceptance import acceptance, head_guesses
from overlap_spec.training.attention import CausalRows, FirstRows
from overlap_spec.training.batches import Batch, BatchStream
from overlap_spec.training.budget import Budget
from overlap_spec.training.cases import Case, compact
from overlap_spec.training.data import (
    ASSISTANT,
    BOS,
    END,
    USER,
    DocumentMaker,
    held_out_cases,
    tools_text,
)
from overlap_spec.training.draft_model import (
    DraftModelRecipe,
    DraftModelTrainer,
    cut_out,
    draft_model_config,
)
from overlap_spec.training.evaluate import prompt_text, score_forced
from overlap_spec.training.export import export_head, export_target
from overlap_spec.training.fillers import Fillers, word_lists
from overlap_spec.training.generate import greedy
from overlap_spec.training.head import DraftPass, HeadRecipe, HeadTrainer, new_head, spread_layers
from overlap_spec.training.optim import orthogonalise, schedule
from overlap_spec.training.target import (
    TargetRecipe,
    TargetTrainer,
    deepened,
    embedded_config,
    initialise,
    scored,
)
from overlap_spec.training.templates import DOMAINS, library, parse_template
from overlap_spec.training.tokenizer import corpus, save_tokenizer, special_id, train_tokenizer

KINDS = ("seen", "unseen", "seen_tools", "unseen_tools")
GSM8K = [("How many are 2 and 3?", "2+3=<<2+3=5>>5.\n#### 5"), ("What is 4 less 1?", "#### 3")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus(0, 300, GSM8K), 512)


@pytest.fixture(scope="module")
def tiny_config():
    return replace(
        embedded_config(512),
        hidden_size=32,
        intermediate_size=48,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position=512,
    )


def test_held_out_templates_share_no_four_words_with_training_ones():
    lib = library()
    trained = set().union(*(template.grams() for template in lib.training()))
    held_out = list(lib.held_out())
    assert len([t for t in held_out if not t.id.startswith("frame")]) >= 20
    for template in held_out:
        assert not template.grams() & trained, template.id


def test_every_domain_has_forty_phrasings_and_a_few_types():
    lib = library()
    assert tuple(domain.name for domain in lib.domains) == DOMAINS
    for domain in lib.domains:
        assert len(domain.whole) + len(domain.facts) + len(domain.held_out) >= 40, domain.name
        assert len({field.kind.split(":")[0] for field in domain.fields.values()}) >= 5


def test_a_template_splits_into_text_and_slots():
    template = parse_template("x:1", "{name} {paid|has paid|owes} for {name}'s trip to Rome")
    assert template.slots == ("name", "paid")
    assert ("has", "paid", "for", "trip") not in template.grams()
    assert ("owes", "for", "s", "trip") in template.grams()


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


def test_an_unknown_kind_of_cases_is_an_error():
    with pytest.raises(ValueError, match="unseen_tools"):
        held_out_cases(1, 1, "all")  # type: ignore[arg-type]


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


def test_budget_counts_steps_tokens_or_minutes():
    assert Budget(steps=4, done=2).progress() == 0.5
    assert Budget(tokens=8, tokens_done=2).progress() == 0.25
    assert Budget(minutes=1, used=30).progress() == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="in one of them"):
        Budget()


def test_orthogonalise_brings_singular_values_near_one():
    for shape in ((8, 20), (20, 8)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_schedule_rises_stays_and_falls():
    assert schedule(0.0, 0) < schedule(0.1, 100) == 1.0
    assert schedule(0.99, 1000) == pytest.approx(0.02, abs=0.01)


def make_target(tokenizer, config, steps) -> TargetTrainer:
    stream = BatchStream(tokenizer, GSM8K, 4, tokens_per_batch=512, max_length=224, chunk=32)
    return TargetTrainer(config, stream, TargetRecipe(compile=False), Budget(steps=steps))


def make_head(tokenizer, config, steps) -> HeadTrainer:
    target = Decoder(config)
    initialise(target, 1)
    stream = BatchStream(tokenizer, GSM8K, 4, tokens_per_batch=512, max_length=224, chunk=32)
    return HeadTrainer(target, stream, HeadRecipe(compile=False, steps=3), Budget(steps=steps))


@pytest.mark.parametrize("make", [make_target, make_head])
def test_training_resumes_to_the_same_state(make, tokenizer, tiny_config, tmp_path):
    straight = make(tokenizer, tiny_config, 3)
    losses: list[float] = []
    straight.run(report=lambda _share, _step, loss: losses.append(loss))
    assert len(losses) == 3
    assert losses[0] != losses[-1]
    broken = make(tokenizer, tiny_config, 3)
    broken.step()
    torch.save(broken.state(), tmp_path / "state.pt")
    resumed = make(tokenizer, tiny_config, 3)
    resumed.restore(torch.load(tmp_path / "state.pt", weights_only=False))
    resumed.run(tmp_path / "end.pt")
    assert (tmp_path / "end.pt").exists()
    for name, value in straight.average.values.items():
        assert torch.equal(value, resumed.average.values[name]), name


def test_draft_chain_reads_nothing_after_its_own_token(tokenizer, tiny_config):
    trainer = make_head(tokenizer, tiny_config, 1)
    draft = DraftPass(trainer.head, trainer.target, 1, 12, 3)
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


def test_draft_chain_equals_one_row_at_a_time(tokenizer, tiny_config):
    trainer = make_head(tokenizer, tiny_config, 1)
    head, target = trainer.head, trainer.target
    draft = DraftPass(head, target, 1, 12, 4)
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
        keys, values = attend.kept
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


def test_a_head_learns_what_the_target_says_at_the_next_tokens(tokenizer, tiny_config):
    trainer = make_head(tokenizer, tiny_config, 1)
    tokens, weights = torch.randint(7, 512, (2, 12)), torch.ones(2, 12)
    weights[:, :5] = 0
    trainer.recipe = replace(trainer.recipe, scored_share=1.0)
    draft = DraftPass(trainer.head, trainer.target, 2, 12, 3)
    with torch.no_grad():
        loss = trainer.loss(Batch(tokens, weights))
        features, logits = draft.observe(tokens)
        total = 0.0
        for step, hidden in enumerate(draft.chain(tokens, features)):
            drafted = trainer.head.logits(hidden).log_softmax(-1).view(2, 11, -1)
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
        trainer.recipe = replace(trainer.recipe, scored_share=0.6)
        assert trainer.loss(Batch(tokens, weights)).item() == pytest.approx(loss.item(), rel=1e-3)


def test_feature_layers_are_distinct_inner_ones():
    assert spread_layers(32) == (2, 16, 29)
    assert spread_layers(5) == (1, 3, 4)
    with pytest.raises(ValueError, match="distinct"):
        spread_layers(3)


def test_a_head_may_draft_fewer_tokens(tiny_config):
    target = Decoder(tiny_config)
    head = new_head(target, HeadRecipe(draft_vocab=(0, 5, 9)))
    assert (torch.arange(3) + head.d2t).tolist() == [0, 5, 9]
    assert head.t2d.nonzero().flatten().tolist() == [0, 5, 9]


def test_greedy_with_a_cache_equals_full_passes(tiny_config):
    torch.manual_seed(0)
    model = Decoder(tiny_config).eval()
    prompts = [[7, 9, 8, 30], [11], [40, 41, 42, 43, 44, 45]]
    for prompt, output in zip(prompts, greedy(model, prompts, [1], 5), strict=True):
        run = list(prompt)
        for token in output:
            size = len(run)
            with torch.no_grad():
                hidden, _ = model(torch.tensor(run), torch.arange(size), CausalRows(1, size))
                assert int(model.logits(hidden)[-1].argmax()) == token
            run.append(token)


def test_exported_checkpoints_load_strictly(tokenizer, tiny_config, tmp_path):
    trainer = make_head(tokenizer, tiny_config, 1)
    export_target(trainer.target, tokenizer, tmp_path)
    export_head(trainer.head, tmp_path / "draft")
    model = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    head = load_eagle3(tmp_path / "draft", model, torch.float32)
    assert head.config.feature_layers == (1, 2, 3)
    wanted = trainer.target.layers[2].self_attn.qkv_proj.weight.bfloat16().float()
    assert torch.equal(model.layers[2].self_attn.qkv_proj.weight, wanted)
    runs = [([2, 3, 4, 5], [6, 7, 8, 9, 10, 1])]
    assert 1.0 <= acceptance(runs, head_guesses(model, head, 3), "cpu").length <= 4.0


def test_scores_count_answers_and_fields(tokenizer):
    case = Case("", {}, {"a": "x", "b": {"c": 2, "d": [1]}}, "t")
    outputs = [
        [*tokenizer.encode(text, add_special_tokens=False).ids, special_id(tokenizer, END)]
        for text in (compact(case.answer), '{"a":"x","b":{"c":3,"d":[1]}}', "no")
    ]
    scores = score_forced(tokenizer, [case] * 3, outputs)
    assert scores == {"exact": 1 / 3, "fields": 5 / 9, "cases": 3}


def test_a_step_of_small_batches_has_the_gradient_of_one_large(tokenizer, tiny_config):
    trainers = [make_target(tokenizer, tiny_config, 5) for _ in range(2)]
    for trainer in trainers:
        trainer.recipe = replace(trainer.recipe, scored_share=1.0, tokens_per_step=900)
    rows = [(torch.randint(7, 512, (4, 64)), torch.rand(4, 64).round()) for _ in range(2)]
    halves = iter([Batch(tokens, weights, 256) for tokens, weights in rows])
    trainers[0].recipe = replace(trainers[0].recipe, tokens_per_step=512)
    trainers[0].next_batch = lambda _progress: next(halves)  # type: ignore[method-assign]
    total = trainers[0].backward(0.0)
    tokens, weights = (torch.cat([row[i] for row in rows]) for i in (0, 1))
    whole = trainers[1].loss(Batch(tokens, weights, 512))
    whole.backward()
    assert total == pytest.approx(whole.item(), rel=2e-2)
    assert trainers[0].budget.tokens_done == 512
    for one, other in zip(*(t.model.parameters() for t in trainers), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=3e-3)


def test_only_the_heaviest_slots_are_scored():
    tokens = torch.arange(7, 19).view(2, 6)
    weights = torch.tensor([[0.1, 0.1, 1, 1, 0, 0], [0.1, 0.1, 0.1, 0.1, 1, 0]])
    slots, targets, heavy = scored(Batch(tokens, weights), 0.25, torch.Generator())
    assert slots.tolist() == [1, 2, 9]
    assert targets.tolist() == [9, 10, 17]
    assert heavy.tolist() == [1, 1, 1]
    draws = [scored(Batch(tokens, weights), 0.5, torch.Generator().manual_seed(i)) for i in (1, 1)]
    assert torch.equal(draws[0][0], draws[1][0])
    assert len(draws[0][0]) == 6


def test_the_rate_falls_over_the_last_tokens_of_a_budget(tokenizer, tiny_config):
    stream = BatchStream(tokenizer, GSM8K, 4, tokens_per_batch=512, max_length=224, chunk=32)
    recipe = TargetRecipe(compile=False, decay_tokens=200)
    trainer = TargetTrainer(tiny_config, stream, recipe, Budget(tokens=1000, done=100))
    factors = [trainer.factor(share) for share in (0.5, 0.79, 0.9, 1.0)]
    assert factors == pytest.approx([1, 1, 0.5, 0.02])


def test_training_goes_on_from_given_weights(tokenizer, tiny_config, tmp_path):
    first = Decoder(tiny_config)
    initialise(first, 3)
    export_target(first, tokenizer, tmp_path / "old" / "target")
    words = f"--init {tmp_path}/old --out {tmp_path}/new --work {tmp_path}/work --only target"
    embedded.main([*words.split(), "--tokens-target", "0.004", "--no-compile"])
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


def test_a_lower_rate_moves_the_weights_less(tokenizer, tiny_config, tmp_path):
    first = Decoder(tiny_config)
    initialise(first, 3)
    export_target(first, tokenizer, tmp_path / "old" / "target")
    moved = []
    for rate in ("0", "0.1", "1"):
        words = f"--init {tmp_path}/old --out {tmp_path}/{rate} --work {tmp_path}/work{rate}"
        words += f" --only target --rate {rate} --tokens-target 0.004 --no-compile"
        embedded.main(words.split())
        old, new = (
            load_decoder(tmp_path / name / "target", torch.float32, torch.device("cpu"))
            for name in ("old", rate)
        )
        moved.append(float((new.embed_tokens.weight - old.embed_tokens.weight).norm()))
    assert 0 == moved[0] < moved[1] < moved[2]


def test_a_deeper_model_begins_as_the_same_function(tokenizer, tiny_config):
    first = Decoder(tiny_config)
    initialise(first, 3)
    deeper = deepened(first, tiny_config.num_layers + 1)
    tokens, positions = torch.randint(7, 500, (12,)), torch.arange(12)
    logits = [
        model.logits(model(tokens, positions, CausalRows(1, 12))[0]) for model in (first, deeper)
    ]
    assert torch.equal(*logits)
    with pytest.raises(ValueError, match="can grow to"):
        deepened(first, tiny_config.num_layers - 1)
    # The new layer learns: its projections leave zero with the first step.
    stream = BatchStream(tokenizer, GSM8K, 4, tokens_per_batch=512, max_length=224, chunk=32)
    recipe = TargetRecipe(compile=False, warm_up_share=0.0)
    trainer = TargetTrainer(deeper.config, stream, recipe, Budget(steps=2), deeper)
    trainer.run()
    added = [layer for layer in deeper.layers if not layer.mlp.down_proj.weight.any()]
    assert len(added) == 1
    assert all(layer.mlp.down_proj.weight.any() for layer in trainer.model.layers)


def test_a_head_goes_on_from_given_weights(tokenizer, tiny_config):
    target = Decoder(tiny_config)
    initialise(target, 1)
    given = new_head(target, HeadRecipe(seed=9))
    stream = BatchStream(tokenizer, GSM8K, 4, tokens_per_batch=512, max_length=224, chunk=32)
    trainer = HeadTrainer(target, stream, HeadRecipe(compile=False), Budget(steps=1), given)
    for name, value in given.named_parameters():
        assert torch.equal(value, trainer.head.get_parameter(name)), name


def test_a_draft_model_learns_its_targets_probabilities(tokenizer, tiny_config):
    target, draft = Decoder(tiny_config), Decoder(draft_model_config(tiny_config))
    for seed, model in enumerate((target, draft)):
        initialise(model, seed)
        with torch.no_grad():
            model.embed_tokens.weight *= 20
    stream = BatchStream(tokenizer, GSM8K, 4, tokens_per_batch=512, max_length=224, chunk=32)
    recipe = DraftModelRecipe(compile=False, scored_share=1.0)
    trainer = DraftModelTrainer(target, draft, stream, recipe, Budget(steps=10))
    tokens, weights = torch.randint(7, 512, (2, 12)), torch.ones(2, 12)
    with torch.no_grad():
        positions = torch.arange(12).repeat(2)
        hidden, _ = draft(tokens.flatten(), positions, CausalRows(2, 12))
        drafted = draft.logits(hidden).log_softmax(-1).view(2, 12, -1)[:, :-1]
        known, _ = target(tokens.flatten(), positions, CausalRows(2, 12))
        wanted = target.logits(known).softmax(-1).view(2, 12, -1)[:, :-1]
        soft = -(wanted * drafted).sum(-1).mean()
        hard = -drafted.gather(2, tokens[:, 1:, None]).mean()
        assert abs(hard - soft) > 0.1
        assert trainer.loss(Batch(tokens, weights)).item() == pytest.approx(soft.item(), rel=5e-3)


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


def test_a_draft_model_is_made_anew_for_a_target_that_is_there(tokenizer, tiny_config, tmp_path):
    target = Decoder(tiny_config)
    initialise(target, 3)
    export_target(target, tokenizer, tmp_path / "target")
    words = f"--only draft-model --out {tmp_path} --work {tmp_path}/work --no-compile"
    embedded.main([*words.split(), "--tokens-draft-model", "0.01"])
    sizes = (tiny_config.vocab_size,) * 2
    assert map_vocabulary(tmp_path / "draft_model", tmp_path / "target", *sizes).drafted is None
    made = load_decoder(tmp_path / "draft_model", torch.float32, torch.device("cpu"))
    assert made.config.vocab_size == tiny_config.vocab_size
    saved = torch.load(tmp_path / "work" / "draft_model.pt", weights_only=False)
    assert saved["tokens"] >= 10000
    first = made.embed_tokens.weight.clone()
    embedded.main([*words.split(), "--tokens-draft-model", "0.02", "--resume"])
    made = load_decoder(tmp_path / "draft_model", torch.float32, torch.device("cpu"))
    assert 0 < (made.embed_tokens.weight - first).abs().max() < 0.5


def test_a_draft_model_goes_on_from_the_one_of_init(tokenizer, tiny_config, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for seed, folder in ((3, old), (4, new)):
        target = Decoder(tiny_config)
        initialise(target, seed)
        export_target(target, tokenizer, folder / "target")
    known = Decoder(draft_model_config(tiny_config))
    initialise(known, 5)
    export_target(known, tokenizer, old / "draft_model")
    words = f"--only draft-model --init {old} --out {new} --work {tmp_path}/work --no-compile"
    embedded.main([*words.split(), "--tokens-draft-model", "0.002"])
    made = load_decoder(new / "draft_model", torch.float32, torch.device("cpu"))
    off = [made.embed_tokens.weight - model.embed_tokens.weight for model in (known, target)]
    assert off[0].norm() < 0.5 * off[1].norm()
