"""Every architecture: greedy text of random small weights in the engine is `transformers`'s."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.kernels import cpu
from overlap_spec.models.config import ExpertsConfig, architectures, read_config
from overlap_spec.models.dequantize import read_scheme
from overlap_spec.models.experts import Experts
from overlap_spec.models.packing import NativeExperts, pack
from overlap_spec.models.quantization import quantize, round_rows
from overlap_spec.models.rope import channel_order, inverse_frequencies
from overlap_spec.models.weights import export_state, load_decoder
from overlap_spec.training.attention import CausalRows
from overlap_spec.worker.graphs import TracedGraph
from tests.support.checkpoints import rewrite
from tests.support.models import CASES, Cache, greedy, of_bytes, reference
from tests.support.models import architecture as class_name
from tests.support.quantised import compressed
from tests.support.tiers import few

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
# Those with states, which cannot draft for themselves, have `test_hybrids.py`.
OTHERS = ("Llama", "Mistral", "Qwen2", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
NEW = [name for name, (family, _) in CASES.items() if family not in OTHERS]
# Shorter than, as long as and longer than the windows; the last one takes several chunks.
LENGTHS = (1, 5, 6, 7, 40)
TOKENS = 20


@pytest.fixture
def small(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model of `transformers` and its folder, with a tokenizer beside it."""
    # Tied embeddings of a random model repeat a token for ever.
    return of_bytes(request.param, tmp_path, tie_word_embeddings=False), tmp_path


WAYS = [(name, True) for name in NEW] + [("gemma2-caps", False), ("gpt-oss", False)]


@pytest.mark.parametrize(("small", "graphs"), few(WAYS, ("gpt-oss", True)), indirect=["small"])
def test_greedy_text_is_that_of_transformers(small: tuple[Any, Path], graphs: bool) -> None:
    """Prompts of several lengths at once, without drafts, by chains, and by trees."""
    model, folder = small
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (n,), generator=draw).tolist() for n in LENGTHS]
    want = [greedy(model, prompt, TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in want}) == len(want)
    shapes = {
        "plain": {"algorithm": "none"},
        "chain": {"algorithm": "ngram", "num_steps": 3},
        "tree": {
            "algorithm": "draft_model", "draft": str(folder), "num_steps": 3, "eagle_topk": 2,
            "num_draft_tokens": 6,
        },
    }  # fmt: skip
    for name, settings in shapes.items():
        common = {"dtype": "float32", "graphs": graphs, "grammar_isolated": False}
        common |= {"chunked_prefill_size": 16, "adaptive": "static"}
        with Engine(str(folder), **common, **settings) as engine:
            sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
            outputs = engine.generate(prompts, sampling=sampling)
        got = [list(output.token_ids) for output in outputs]
        assert got == want, name
        if name == "tree":
            # The model drafts for itself: its best child of a node is always accepted.
            assert all(o.stats.accept_length >= 2 for o in outputs)


@pytest.mark.parametrize("names", ["published", "newer"])
@torch.no_grad()
def test_the_text_model_beside_a_vision_tower(names: str, tmp_path: Path) -> None:
    """Gemma3ForConditionalGeneration, with the fields that published files leave out."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 64}
    text = {**sizes, "vocab_size": 140, "num_attention_heads": 8, "num_key_value_heads": 4}
    layers = ["sliding_attention", "full_attention"]
    vision = {**sizes, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config={**text, "head_dim": 256, "sliding_window": 6, "layer_types": layers},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=139,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    state = files(tmp_path)
    assert any("vision_tower." in name for name in state)
    assert any(name.startswith("language_model.model.") for name in state)
    if names == "newer":
        inside = "language_model.model."
        moved = {
            f"model.language_model.{n.removeprefix(inside)}" if n.startswith(inside) else n: tensor
            for n, tensor in state.items()
        }
        save_file(moved, tmp_path / "model.safetensors")
    hf = json.loads((tmp_path / "config.json").read_text())
    for field in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        del hf["text_config"][field]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tokens = torch.randint(0, 130, (30,), generator=torch.Generator().manual_seed(5))
    decoder = load_decoder(tmp_path, torch.float32, CPU, 64)
    want = model(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(Cache(decoder, 64).run(tokens, 0), want, atol=2e-4, rtol=1e-4)


def files(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_was_read_is_written_as_it_was(case: str, tmp_path: Path) -> None:
    """Fused, moved and shifted weights find back to their names, rows and numbers."""
    reference(case, tmp_path, shard="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    written, want = export_state(load_decoder(tmp_path, torch.float32, CPU)), files(tmp_path)
    assert written.keys() == want.keys()
    for name, tensor in written.items():
        # A norm's weight has had 1 added, and taken away.
        torch.testing.assert_close(tensor, want[name], rtol=0, atol=2e-7, msg=name)


@torch.no_grad()
def test_longrope_turns_to_its_second_list_with_the_context(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = reference("phi4-partial", tmp_path)
    short = load_decoder(tmp_path, torch.float32, CPU)
    assert short.config.max_position == 64
    assert "context_length of up to 256" in caplog.text
    long = load_decoder(tmp_path, torch.float32, CPU, 256)
    tokens = torch.randint(0, 131, (90,), generator=torch.Generator().manual_seed(5))
    want = model(tokens[None]).logits[0]
    torch.testing.assert_close(Cache(long, 96).run(tokens, 0), want, atol=2e-4, rtol=1e-4)
    got, want = Cache(short, 96).run(tokens[:64], 0), model(tokens[None, :64]).logits[0]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="context_length 257 is over the checkpoint's 256"):
        load_decoder(tmp_path, torch.float32, CPU, 257)


def rewritten(folder: Path, **fields: Any) -> Path:
    rewrite(folder / "config.json", **fields)
    return folder


def test_longrope_needs_one_factor_a_pair_of_channels(tmp_path: Path) -> None:
    reference("phi4-partial", tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    rewritten(tmp_path, rope_parameters={**rope, "short_factor": [1.0]})
    with pytest.raises(CheckpointError, match="short_factor and long_factor must have 3 numbers"):
        load_decoder(tmp_path, torch.float32, CPU)
    rewritten(tmp_path, rope_parameters={**rope, "long_factor": "x"})
    with pytest.raises(CheckpointError, match="long_factor must be lists of numbers: x"):
        load_decoder(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("older", "case"),
    [
        ({"rope_theta": 3e4, "rope_local_base_freq": 50.0, "rope_parameters": None,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "gemma3"),
        ({"rope_theta": 1e4, "rope_parameters": None, "partial_rotary_factor": 0.5,
          "rope_scaling": {"type": "su", "short_factor": [1.0, 1.2, 2.0],
                           "long_factor": [1.5, 3.0, 9.0]}}, "phi4-partial"),
    ],
)  # fmt: skip
def test_the_older_spelling_means_the_same(
    older: dict[str, Any], case: str, tmp_path: Path
) -> None:
    reference(case, tmp_path)
    new = read_config(tmp_path)
    old = read_config(rewritten(tmp_path, **older))
    assert old.local_rope == new.local_rope
    for positions in (64, 65):
        frequencies = [inverse_frequencies(c.rope, c.head_dim, positions) for c in (old, new)]
        assert torch.equal(frequencies[0][0], frequencies[1][0])
        assert frequencies[0][1] == frequencies[1][1]
    order = channel_order(old.rope, old.head_dim)
    if case == "gemma3":
        assert order is None
    else:
        assert order is not None
        assert sorted(order.tolist()) == list(range(old.head_dim))


@torch.no_grad()
def test_norms_of_gemma_are_not_rounded_before_they_are_used(tmp_path: Path) -> None:
    """In bfloat16 `transformers` adds 1 to a norm's weight in float32."""
    model = reference("gemma2", tmp_path).to(torch.bfloat16)
    decoder = load_decoder(tmp_path, torch.bfloat16, CPU)
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    for own, theirs in zip(decoder.layers, model.model.layers, strict=True):
        norm, published = own.post_feedforward_layernorm, theirs.post_feedforward_layernorm
        # Its weight has been rounded by `.to` above; ours comes from the file.
        published.weight.data = norm.weight - 1
        assert torch.equal(norm(x), published(x))
        assert not torch.equal(norm.weight.bfloat16().float(), norm.weight)


def experts(limit: float | None) -> Experts:
    torch.manual_seed(0)
    made = Experts(16, ExpertsConfig(6, 2, 12, (True,), True, limit)).requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_()
    return made


def one_by_one(layer: Experts, x: Tensor) -> Tensor:
    """Each token's experts by their shares, written out."""
    own, limit = layer.experts, layer.config.limit
    out = torch.zeros_like(x)
    for token, chosen, shares in zip(range(len(x)), *layer.route(x), strict=True):
        for e, share in zip(chosen.tolist(), shares, strict=True):
            if limit is None:
                gate, up = (own.gate_up_proj[e] @ x[token]).chunk(2)
                out[token] += share * (own.down_proj[e] @ (F.silu(gate) * up))
            else:
                both = x[token] @ own.gate_up_proj[e] + own.gate_up_proj_bias[e]
                gate, up = both[::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                out[token] += share * (inner @ own.down_proj[e] + own.down_proj_bias[e])
    return out


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("limit", [None, 1.5])
def test_experts_compute_the_tokens_that_chose_them(limit: float | None, packs: bool) -> None:
    layer, x = experts(limit), torch.randn(11, 16)
    wanted = one_by_one(layer, x)
    if packs:
        pack(layer)
        assert isinstance(layer.experts, NativeExperts) == cpu.native()
    torch.testing.assert_close(layer(x), wanted)
    each = torch.cat([layer(x[i : i + 1]) for i in range(11)])
    torch.testing.assert_close(each, wanted)
    # All to one expert, and no token at all.
    same = x[:1].repeat(5, 1)
    torch.testing.assert_close(layer(same), wanted[:1].repeat(5, 1))
    assert layer(x[:0]).shape == (0, 16)


@pytest.mark.skipif(not cpu.native(), reason="no native products on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [None, 1.5])
def test_native_experts_give_a_token_the_same_bits_beside_any(
    limit: float | None, dtype: torch.dtype
) -> None:
    layer, x = experts(limit).to(dtype), torch.randn(40, 16).to(dtype)
    plain = layer(x)
    pack(layer)
    together = layer(x)
    for rows in (1, 3, 17):
        assert torch.equal(layer(x[:rows]), together[:rows])
    off = (together.double() - plain.double()).norm() / plain.double().norm()
    assert off < (1e-6 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("limit", [None, 1.5])
def test_a_recording_of_experts_sends_other_tokens_elsewhere(
    limit: float | None, packs: bool
) -> None:
    layer = experts(limit)
    if packs:
        pack(layer)
    recorded = TracedGraph(layer, lambda x: (layer(x),), (torch.randn(3, 16),))
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(recorded(x)[0], layer(x))
    # All to one expert, and so none to the others.
    x = torch.randn(1, 16).repeat(5, 1)
    torch.testing.assert_close(recorded(x)[0], layer(x))


def test_what_is_not_built_for_them_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not built for models with experts"):
        quantize([torch.nn.Sequential(experts(None))])
    reference("gpt-oss", tmp_path)
    decoder, rows = load_decoder(tmp_path, torch.float32, CPU), CausalRows(1, 3)
    with pytest.raises(ConfigError, match="training reads no target with"):
        decoder(torch.arange(3), torch.arange(3), rows)
    rewritten(tmp_path, hidden_act="relu")
    with pytest.raises(CheckpointError, match="hidden_act must be one of silu"):
        read_config(tmp_path)


REFUSED = [
    ("falcon-7b", {"alibi": True}, "alibi .* is not supported"),
    ("falcon-40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn must be 1 or 2: 3"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is not"),
    ("gpt2", {"n_embd": "x"}, "n_embd must be a whole number"),
    ("starcoder2", {"hidden_act": "silu"}, "hidden_act must be one of gelu, gelu_new"),
    ("cohere", {"logit_scale": -1}, "logit_scale must be a number above 0"),
    ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
    ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func must be 'softmax': 'sigmoid'"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid': 'softmax'"),
    ("deepseek-v3", {"n_group": 3}, "n_group 3 and topk_group 2 do not fit n_routed_experts 8"),
    ("deepseek-v3", {"num_experts_per_tok": 5}, "do not fit .* num_experts_per_tok 5"),
    ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank must be a whole number"),
    ("deepseek-v3", {"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32.* is not known"),
    ("qwen3-next", {"linear_num_value_heads": 5}, "linear_num_value_heads 5 is no multiple of .*2"),
    ("qwen3-next", {"layer_types": ["sliding_attention"] * 4}, "must be 4 times one of linear"),
    ("qwen3-next", {"layer_types": ["linear_attention"] * 4}, "and the latter at least once"),
    ("qwen3-next", {"layer_types": ["full_attention"]}, "must be 4 times one of linear_attention"),
    ("qwen3-next", {"linear_key_head_dim": 0}, "linear_key_head_dim must be a whole number"),
    ("qwen3-next", {"architectures": ["Qwen4ExpForCausalLM"]}, "Qwen4ExpForCausalLM' is not known"),
]


@pytest.mark.parametrize(("case", "fields", "told"), REFUSED)
def test_fields_that_are_not_built_are_refused_by_name(
    case: str, fields: dict[str, Any], told: str, tmp_path: Path
) -> None:
    reference(case, tmp_path)
    with pytest.raises(CheckpointError, match=told):
        read_config(rewritten(tmp_path, **fields))


@torch.no_grad()
def test_the_first_gpt2_files_are_read(tmp_path: Path) -> None:
    """Names without their first part, and masks among the weights."""
    model = reference("gpt2", tmp_path)
    state = {n.removeprefix("transformer."): tensor for n, tensor in files(tmp_path).items()}
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256) for i in range(3)}
    save_file(state, tmp_path / "model.safetensors")
    # Fewer positions than the table has.
    decoder = load_decoder(tmp_path, torch.float32, CPU, 64)
    tokens = torch.arange(30)
    want = model(tokens[None]).logits[0]
    torch.testing.assert_close(Cache(decoder, 64).run(tokens, 0), want, atol=2e-4, rtol=1e-4)


OTHER_NAMES = ["mixtral", "qwen2-moe", "glm4", "falcon-40b", "starcoder2", "deepseek-v2"]


@pytest.mark.parametrize("case", OTHER_NAMES)
def test_other_names_are_read_quantised(case: str, tmp_path: Path) -> None:
    """Rows of int8 with a scale each, as compressed-tensors writes them."""
    reference(case, tmp_path)
    stored, plain = {}, files(tmp_path)
    for name, tensor in plain.items():
        if re.search(r"\.\d+\..*(proj|w[123]|dense.*|query_key_value|c_fc)\.weight$", name):
            codes, scale = round_rows(tensor)
            parts = {"weight": codes, "weight_scale": scale[:, None]}
            stored |= {name.replace("weight", part): own for part, own in parts.items()}
            plain[name] = codes.float() * scale[:, None]
        else:
            stored[name] = tensor
    assert len(stored) > len(plain)
    save_file(stored, tmp_path / "model.safetensors")
    kind = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    got = export_state(
        load_decoder(rewritten(tmp_path, quantization_config=kind), torch.float32, CPU)
    )
    assert all(torch.equal(got[name], tensor) for name, tensor in plain.items())


def test_the_page_lists_what_is_registered_and_how_it_is_tested() -> None:
    """The table's rows are the architectures that have a file, and all cases stand in it."""
    section = PAGE.read_text().split("## Architectures")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    listed = {cells[0].strip().strip("`"): cells[3].strip() for cells in rows}
    assert len(listed) == len(rows)
    assert set(listed) == {module.ARCHITECTURE for module in architectures()}
    tested: list[str] = []
    for architecture, how in listed.items():
        if how.startswith("tests/"):
            assert architecture in (PAGE.parents[1] / how).read_text()
            continue
        for case in how.split(", "):
            assert class_name(CASES[case][0]) == architecture
            tested.append(case)
    assert sorted(tested) == sorted(CASES)


def test_the_page_lists_the_quantisations_that_are_read() -> None:
    with pytest.raises(CheckpointError, match="must be one of ") as caught:
        read_scheme({"quant_method": "other"})
    known = str(caught.value).split("must be one of ")[1].split(":")[0].split(", ")
    section = PAGE.read_text().split("## Quantised weights")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(row.strip().strip("`") for row in rows if "quant_method" not in row) == known


def test_weights_of_torch_save_are_read(tmp_path: Path) -> None:
    """One file and shards, with nothing beside them."""
    reference("qwen3", tmp_path)
    want = files(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(want, tmp_path / "pytorch_model.bin")
    got = export_state(load_decoder(tmp_path, torch.float32, CPU))
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(want)
    shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for shard, own in shards.items():
        torch.save({name: want[name] for name in own}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    got = export_state(load_decoder(tmp_path, torch.float32, CPU))
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    (tmp_path / "pytorch_model-2.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-2\.bin cannot be read"):
        load_decoder(tmp_path, torch.float32, CPU)
