"""Attention over latents in the engine: DeepSeek's layouts against `transformers`, and drafts."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.models.shard import Shard
from overlap_spec.models.weights import export_state, load_decoder, load_mtp
from overlap_spec.types import Output
from tests.support import checkpoints, dflash
from tests.support.layouts import LAYOUTS
from tests.support.layouts import write as write_head
from tests.support.models import LATENT, V3, greedy, of_bytes, reference
from tests.support.mtp import run_module
from tests.support.quantised import FP8
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


@pytest.fixture(scope="module", params=few(("deepseek-v2", "deepseek-v3"), "deepseek-v3"))
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A model of `transformers` with a vocabulary of bytes, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    return of_bytes(request.param, folder, max_position_embeddings=4200), folder


def test_chunks_of_any_size_and_reused_pages(published: tuple[Any, Path]) -> None:
    model, folder = published
    prompts = texts(3, 17, 40, 61)
    want = [greedy(model, prompt, 16) for prompt in prompts]
    tree = {"algorithm": "draft_model", "draft": str(folder), "num_steps": 3, "eagle_topk": 2}
    for size, prefix_cache in ((4, True), (11, False), (64, True)):
        settings = {"chunked_prefill_size": size, "prefix_cache": prefix_cache, "page_size": 4}
        with Engine(str(folder), **COMMON, **settings, **tree) as engine:
            assert ask(engine, prompts) == want, size
            again = [generate(engine, [prompt])[0] for prompt in prompts]
            assert [list(output.token_ids) for output in again] == want, size
            assert any(output.stats.cached_tokens for output in again) == prefix_cache


def test_a_crowded_cache_costs_no_token(published: tuple[Any, Path]) -> None:
    """Requests are put aside, and computed again from what was kept of them."""
    model, folder = published
    prompts = texts(30, 34, 38, 42)
    want = [greedy(model, prompt, 40) for prompt in prompts]
    room = {"max_total_tokens": 192, "context_length": 128, "algorithm": "ngram"}
    with Engine(str(folder), **COMMON, **room) as engine:
        assert ask(engine, prompts, 40) == want
        assert engine.core.scheduler.preemptions > 0
        assert engine.core.scheduler.allocator.in_use == 0


@pytest.mark.ci
@torch.no_grad()
def test_four_thousand_tokens(published: tuple[Any, Path]) -> None:
    model, folder = published
    (prompt,) = texts(4000)
    with Engine(str(folder), **COMMON, algorithm="ngram") as engine:
        (got,) = ask(engine, [prompt], 40)
    logits = model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
    assert got == logits.argmax(-1).tolist()


def test_a_tokens_memory_is_a_latent_and_a_rotated_key(published: tuple[Any, Path]) -> None:
    _, folder = published
    with Engine(str(folder), **COMMON, algorithm="none") as engine:
        pool = engine.core.worker.runner.pool
        assert pool.page_bytes == 3 * (24 + 8) * 4 * pool.page_size
        assert pool.k.shape[3:] == (1, 8)
        assert pool.v.shape[3:] == (1, 24)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any]) -> dict[str, str]:
    """A random V3 with a module of its own, and what each drafter drafts with."""
    folder = tmp_path_factory.mktemp("latents")
    checkpoints.write_target(folder / "target", **V3)
    write_module(folder / "target")
    write_head(folder / "eagle", LAYOUTS["EAGLE-1/2, fc.bias, pytorch_model.bin"])
    write_head(folder / "parallel", LAYOUTS["P-EAGLE, ptd_token_id"])
    dflash.write(folder / "dflash", dflash.LAYOUTS["z-lab"])
    names = ("ngram", "suffix,eagle3", "eagle3")
    drafts = dict.fromkeys(names, tiny["draft"])
    drafts |= {"draft_model": str(folder / "target"), "mtp": str(folder / "target")}
    drafts |= {name: str(folder / name) for name in ("eagle", "parallel", "dflash", "target")}
    return drafts


def module_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of V3's next-token module in its file, without its prefix."""
    hidden, inner, heads = checkpoints.SHAPE["hidden_size"], LATENT["moe_intermediate_size"], 4
    rank, rope, straight = (LATENT[f"{n}"] for n in ("kv_lora_rank", *DIMS[:2]))
    value, queries = LATENT["v_head_dim"], V3["q_lora_rank"]
    found: dict[str, tuple[int, ...]] = {
        "self_attn.q_a_proj": (queries, hidden),
        "self_attn.q_b_proj": (heads * (straight + rope), queries),
        "self_attn.kv_a_proj_with_mqa": (rank + rope, hidden),
        "self_attn.kv_b_proj": (heads * (straight + value), rank),
        "self_attn.o_proj": (hidden, heads * value),
        "mlp.gate": (LATENT["n_routed_experts"], hidden),
        "eh_proj": (hidden, 2 * hidden),
    }
    experts = [f"experts.{e}" for e in range(LATENT["n_routed_experts"])]
    for expert in (*experts, "shared_experts"):
        found |= {f"mlp.{expert}.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        found[f"mlp.{expert}.down_proj"] = (hidden, inner)
    norms = "enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"
    found |= dict.fromkeys(norms, (hidden,))
    found |= {"self_attn.q_a_layernorm": (queries,), "self_attn.kv_a_layernorm": (rank,)}
    named = {f"{name}.weight": shape for name, shape in found.items()}
    return {**named, "mlp.gate.e_score_correction_bias": (LATENT["n_routed_experts"],)}


DIMS = "qk_rope_head_dim", "qk_nope_head_dim"


def write_module(folder: Path) -> dict[str, torch.Tensor]:
    """Put a random module behind the target's last layer; its tensors, not prefixed."""
    draw, module = torch.Generator().manual_seed(4), {}
    for name, shape in module_shapes().items():
        values = torch.randn(shape, generator=draw)
        weight = 1.5 * values / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.3 * values
        module[name] = 0.1 * values if name.endswith("bias") else weight
    file, behind = folder / "model.safetensors", checkpoints.SHAPE["num_hidden_layers"]
    save_file(load_file(file) | {f"model.layers.{behind}.{n}": x for n, x in module.items()}, file)
    return module


# Of those that draft on the host one: they know nothing of the target.
DRAFTERS = (
    "ngram", "suffix,eagle3", "eagle", "eagle3", "parallel", "dflash", "draft_model", "mtp",
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any], drafted: dict[str, str]) -> list[Output]:
    return answer({**tiny, "model": drafted["target"]})


EVERYDAY = ("eagle3", "ragged", "once-sync")


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
    settings = {**tiny, "model": drafted["target"], "draft": drafted[name], "algorithm": name}
    outputs = hold_drafts({**settings, "overlap": overlap}, shape, plain, monkeypatch)
    if name == "draft_model":
        assert sum(output.stats.accepted_drafts for output in outputs) > 0


@torch.no_grad()
def test_the_next_token_module_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    checkpoints.write_target(tmp_path, **V3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    weights = write_module(tmp_path)
    theirs = MtpModel(model, 1).eval()
    layer, experts = theirs.layers[0], LATENT["n_routed_experts"]
    state = {}
    for name, tensor in weights.items():
        if name.startswith("mlp.experts."):
            continue
        own = name.replace("shared_head.norm", "post_norm")
        inside = own.startswith(("self_attn", "mlp", "input_", "post_attention"))
        state[f"mtp_block.{own}" if inside else own] = tensor
    each = [f"mlp.experts.{e}." for e in range(experts)]
    up = [torch.cat([weights[f"{e}{n}_proj.weight"] for n in ("gate", "up")]) for e in each]
    down = [weights[f"{e}down_proj.weight"] for e in each]
    state["mtp_block.mlp.experts.gate_up_proj"] = torch.stack(up)
    state["mtp_block.mlp.experts.down_proj"] = torch.stack(down)
    layer.load_state_dict(state)
    tokens = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(2))
    features = model.model(tokens[None]).last_hidden_state
    positions = torch.arange(1, 20)
    later = model.model.embed_tokens(tokens[None, 1:])
    mask = torch.full((19, 19), -torch.inf).triu(1)[None, None]
    turns = model.model.rotary_emb(later, positions[None])
    want = layer(later, features[:, :-1], turns, mask, positions[None], None)[0]

    target = load_decoder(tmp_path, torch.float32, CPU)
    module = load_mtp(tmp_path, target, torch.float32)
    torch.testing.assert_close(run_module(module, later[0], features[0, :-1], positions), want)


def test_a_file_in_blocks_of_fp8_is_read_exactly(tmp_path: Path) -> None:
    reference("deepseek-v3", tmp_path)
    plain, stored = load_file(tmp_path / "model.safetensors"), {}
    for name, weight in plain.items():
        if re.search(r"\.layers\..*proj(_with_mqa)?\.weight$", name) is None:
            stored[name] = weight
            continue
        codes, (rows, width) = weight.to(torch.float8_e4m3fn), weight.shape
        scale = torch.rand(-(-rows // 16), -(-width // 16)) + 0.5
        stored |= {name: codes, f"{name}_scale_inv": scale}
        every = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :width]
        plain[name] = codes.float() * every
    assert "model.layers.1.self_attn.kv_b_proj.weight_scale_inv" in stored
    save_file(stored, tmp_path / "model.safetensors")
    quantised = {**FP8, "weight_block_size": [16, 16]}
    checkpoints.rewrite(tmp_path / "config.json", quantization_config=quantised)
    got = export_state(load_decoder(tmp_path, torch.float32, CPU))
    assert got.keys() == plain.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in plain.items())


def test_latents_are_not_cut_nor_trained_on(tmp_path: Path) -> None:
    from overlap_spec.training.generate import greedy as generated

    reference("deepseek-v3", tmp_path)
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2: .* \(kv_lora_rank\) cannot"):
        replace(decoder.config, shard=Shard(0, 2)).check_shard()
    with pytest.raises(ConfigError, match=r"training reads no target with .* latents"):
        generated(decoder, [[1, 2, 3]], [], 2)


@torch.no_grad()
def test_the_router_stays_in_float32(tmp_path: Path) -> None:
    """In bfloat16 the experts are those that the published model chooses."""
    model = reference("deepseek-v3", tmp_path)
    decoder = load_decoder(tmp_path, torch.bfloat16, CPU)
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    own, theirs = decoder.layers[1].mlp, model.model.layers[1].mlp.gate
    _, shares, chosen = theirs(x[None])
    ids, mine = own.route(x)
    assert torch.equal(ids.sort(-1)[0], chosen.sort(-1)[0])
    torch.testing.assert_close(mine.sort(-1)[0], shares.sort(-1)[0].bfloat16())
    assert own.gate.weight.dtype is own.e_score_correction_bias.dtype is torch.float32
