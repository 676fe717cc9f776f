"""Layers that keep a state in the place of keys: Qwen3-Next and Qwen3.5 against `transformers`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError, InvalidRequest
from overlap_spec.grammar.spec import Grammar
from overlap_spec.models.shard import Shard
from overlap_spec.models.weights import load_decoder, load_mtp
from overlap_spec.types import Output
from tests.support import checkpoints
from tests.support.drafters import Knows
from tests.support.layouts import LAYOUTS
from tests.support.layouts import write as write_head
from tests.support.models import DELTA, HYBRID, Cache, greedy, of_bytes, reference
from tests.support.mtp import run_module
from tests.support.targets import (
    COMMON,
    SHAPES,
    answer,
    ask,
    generate,
    hold_drafts,
    texts,
)
from tests.support.tiers import few, pairs

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=few(("qwen3-next", "qwen3.5"), "qwen3-next"))
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A model of `transformers` with a vocabulary of bytes, and its folder."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes = {"max_position_embeddings": 4400, "tie_word_embeddings": False}
    return of_bytes(request.param, folder, **sizes), folder


@pytest.mark.parametrize("graphs", few((True, False), True))
def test_chunks_of_any_size(published: tuple[Any, Path], graphs: bool) -> None:
    model, folder = published
    prompts = texts(1, 3, 17, 40, 61, 150)
    want = [greedy(model, prompt, 16) for prompt in prompts]
    for size, shape in ((4, "chain"), (11, "ragged"), (256, "tree")):
        settings = {"chunked_prefill_size": size, "page_size": 4, "graphs": graphs}
        knows = Knows(want + want)
        with Engine(str(folder), **COMMON, **settings, **SHAPES[shape], algorithm=knows) as engine:
            assert ask(engine, prompts) == want, size
            again = [generate(engine, [prompt])[0] for prompt in prompts]
        assert [list(output.token_ids) for output in again] == want, size
        assert all(output.stats.accept_length > 1.5 for output in again)


def test_a_crowded_cache_costs_no_token(published: tuple[Any, Path]) -> None:
    """Requests are put aside, and their states computed again; rows go from one to the next."""
    model, folder = published
    prompts = texts(30, 38, 50, 60)
    want = [greedy(model, prompt, 40) for prompt in prompts]
    room: dict[str, Any] = {"max_total_tokens": 192, "context_length": 128, **SHAPES["tree"]}
    room |= {"max_running_requests": 4}
    with Engine(str(folder), **COMMON, **room, algorithm=Knows(want)) as engine:
        assert ask(engine, prompts, 40) == want
        assert engine.core.scheduler.preemptions > 0
        assert engine.core.scheduler.allocator.in_use == 0


@pytest.mark.ci
@torch.no_grad()
def test_four_thousand_tokens(published: tuple[Any, Path]) -> None:
    model, folder = published
    (prompt,) = texts(200)
    with Engine(str(folder), **COMMON, algorithm="none") as engine:
        (plain,) = ask(engine, [prompt], 4100)
    logits = model(torch.tensor([prompt + plain])).logits[0, len(prompt) - 1 : -1]
    assert plain == logits.argmax(-1).tolist()
    with Engine(str(folder), **COMMON, **SHAPES["tree"], algorithm=Knows([plain])) as engine:
        assert ask(engine, [prompt], 4100) == [plain]
        (again,) = generate(engine, [prompt + plain[:4000]], 20)
    assert list(again.token_ids) == plain[4000:4020]


def test_memory_is_keys_of_some_layers_and_a_state_a_row(published: tuple[Any, Path]) -> None:
    model, folder = published
    with Engine(str(folder), **COMMON, algorithm="none", max_running_requests=5) as engine:
        runner = engine.core.worker.runner
        # One layer of four has keys, of two heads.
        assert runner.pool.page_bytes == 2 * 2 * 16 * 4 * runner.pool.page_size
        state, inputs = 6 * 8 * 12 * 4, 3 * (2 * 2 * 8 + 6 * 12) * 4
        assert runner.states is not None
        # Of rows, of padding, and as many as rows that are kept with pages.
        assert engine.snapshot()["state_bytes"] == runner.states.bytes == 11 * 3 * (state + inputs)
    assert len(model.model.layers) == 4


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any]) -> dict[str, str]:
    """A random Qwen3-Next with a module of its own, and what each drafter drafts with."""
    folder = tmp_path_factory.mktemp("hybrids")
    checkpoints.write_target(folder / "target", **HYBRID)
    write_module(folder / "target")
    write_head(folder / "eagle", LAYOUTS["EAGLE-1/2, fc.bias, pytorch_model.bin"])
    write_head(folder / "parallel", LAYOUTS["P-EAGLE, ptd_token_id"])
    names = ("ngram", "suffix,eagle3", "eagle3", "knows")
    drafts = dict.fromkeys(names, tiny["draft"])
    drafts |= {"draft_model": tiny["model"], "mtp": str(folder / "target")}
    return drafts | {name: str(folder / name) for name in ("eagle", "parallel", "target")}


def write_module(folder: Path) -> dict[str, torch.Tensor]:
    """Put a next-token module into the target's file: its last layer over again, and random parts
    before and behind it, which are returned."""
    file, hidden = folder / "model.safetensors", checkpoints.SHAPE["hidden_size"]
    state, draw = load_file(file), torch.Generator().manual_seed(4)
    last = f"model.layers.{DELTA['num_hidden_layers'] - 1}."
    layer = {name.replace(last, "mtp.layers.0."): x for name, x in state.items() if last in name}
    parts = {
        f"mtp.{name}.weight": 0.3 * torch.randn(hidden, generator=draw)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    parts["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) / hidden**0.5
    save_file({**state, **{name: x.clone() for name, x in layer.items()}, **parts}, file)
    return parts


# Of those that draft on the host one: they know nothing of the target.
DRAFTERS = (
    "knows", "ngram", "suffix,eagle3", "eagle", "eagle3", "parallel", "draft_model", "mtp",
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any], drafted: dict[str, str]) -> list[Output]:
    return answer({**tiny, "model": drafted["target"]})


EVERYDAY = ("knows", "ragged", "once-sync")


@pytest.mark.parametrize(
    ("name", "shape", "overlap"),
    few(pairs(DRAFTERS, SHAPES, ("none", "once-sync"), given=[EVERYDAY]), EVERYDAY),
)
def test_drafts_change_nothing(
    name: str,
    shape: str,
    overlap: str,
    tiny: dict[str, Any],
    drafted: dict[str, str],
    plain: list[Output],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {**tiny, "model": drafted["target"], "draft": drafted[name], "overlap": overlap}
    algorithm = Knows([its.token_ids for its in plain]) if name == "knows" else name
    outputs = hold_drafts({**settings, "algorithm": algorithm}, shape, plain, monkeypatch)
    if name == "knows":
        assert all(output.stats.accepted_drafts > 5 for output in outputs)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("qwen3.5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3.5-moe", "Qwen3_5MoeForConditionalGeneration"),
    ],
)
@torch.no_grad()
def test_the_text_model_beside_a_vision_tower(case: str, name: str, tmp_path: Path) -> None:
    """As published: the text model's settings and names inside those of the whole; of a mixture
    all experts of a layer as one tensor."""
    model = reference(case, tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    ropes = {**hf["rope_parameters"], "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    text = {key: hf[key] for key in hf if key not in ("architectures", "tie_word_embeddings")}
    whole = {
        "architectures": [name],
        "text_config": {**text, "rope_parameters": ropes},
        "tie_word_embeddings": hf["tie_word_embeddings"],
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    state = {"model.visual.patch_embed.proj.weight": torch.ones(2)}
    state["mtp.fc.weight"] = torch.ones(2)
    for own, tensor in model.state_dict().items():
        if own != "lm_head.weight" or not hf["tie_word_embeddings"]:
            inside = f"model.language_model.{own.removeprefix('model.')}"
            state[inside if own.startswith("model.") else own] = tensor.clone()
    assert any("experts.gate_up_proj" in own for own in state) == ("moe" in case)
    save_file(state, tmp_path / "model.safetensors")
    decoder = load_decoder(tmp_path, torch.float32, CPU, 64)
    tokens = torch.randint(0, 130, (30,), generator=torch.Generator().manual_seed(5))
    want = model(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(Cache(decoder, 64).run(tokens, 0), want, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_the_next_token_module_is_the_last_layer_between_its_parts(drafted: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(drafted["target"])
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model, stored = whole.model, load_file(folder / "model.safetensors")

    def normed(name: str, x: torch.Tensor) -> torch.Tensor:
        norm = type(model.norm)(x.shape[-1])
        norm.weight.copy_(stored[f"mtp.{name}.weight"])
        out: torch.Tensor = norm(x)
        return out

    tokens = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(2))
    features, positions = model(tokens[None]).last_hidden_state[0, :-1], torch.arange(1, 20)
    embeds = model.embed_tokens(tokens[1:])
    parts = [normed("pre_fc_norm_embedding", embeds), normed("pre_fc_norm_hidden", features)]
    x = torch.nn.functional.linear(torch.cat(parts, -1), stored["mtp.fc.weight"])[None]
    mask = torch.full((19, 19), -torch.inf).triu(1)[None, None]
    turns = model.rotary_emb(x, positions[None])
    want = normed("norm", model.layers[-1](x, position_embeddings=turns, attention_mask=mask)[0])
    module = load_mtp(folder, load_decoder(folder, torch.float32, CPU), torch.float32)
    torch.testing.assert_close(run_module(module, embeds, features, positions), want)


def test_states_are_not_cut_nor_trained_on_nor_drafted_with(
    tiny: dict[str, Any], drafted: dict[str, str]
) -> None:
    from overlap_spec.training.generate import greedy as generated

    decoder = load_decoder(Path(drafted["target"]), torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2: .* \(linear_num_value_heads\)"):
        replace(decoder.config, shard=Shard(0, 2)).check_shard()
    with pytest.raises(ConfigError, match=r"training reads no target with .* states"):
        generated(decoder, [[1, 2, 3]], [], 2)
    settings = {**tiny, **COMMON, "draft": drafted["target"], "algorithm": "draft_model"}
    with pytest.raises(ConfigError, match="draft: Qwen3NextForCausalLM has layers that keep"):
        Engine(**settings)
    settings = {**tiny, **COMMON, "model": drafted["target"], "algorithm": "none"}
    with Engine(**settings) as engine:
        weighed = replace(Grammar.choice(["alpha", "beta"]), probabilities=True)
        with pytest.raises(InvalidRequest, match="whole texts cannot be weighed with this model"):
            engine.generate("abc", weighed)


@torch.no_grad()
def test_decays_stay_in_float32(tmp_path: Path) -> None:
    reference("qwen3-next", tmp_path)
    decoder = load_decoder(tmp_path, torch.bfloat16, CPU)
    layer = decoder.layers[0].self_attn
    assert layer.A_log.dtype is layer.dt_bias.dtype is torch.float32
    assert layer.conv1d.dtype is layer.norm.dtype is torch.bfloat16
    # Of a norm in float32 by weights less 1, whatever the others are.
    assert decoder.layers[0].input_layernorm.weight.dtype is torch.float32
