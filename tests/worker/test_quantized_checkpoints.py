"""Quantised checkpoints in their published names and shapes, against weights written out in torch.

Each case draws whole numbers, zeros and scales, writes them as the layout's own tools do, bit by
bit, and says in one line of plain torch what weight they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from overlap_spec.models.tensors import parameter_count, tensor_names
from overlap_spec.models.weights import export_state, load_decoder
from tests.support.checkpoints import write_tokenizer
from tests.support.models import reference

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
}
# Outputs and inputs of a layer's products. FP8's blocks of 128 end in the middle of all of them.
LINEARS = {
    "self_attn.q_proj": (192, 192),
    "self_attn.k_proj": (96, 192),
    "self_attn.v_proj": (96, 192),
    "self_attn.o_proj": (192, 192),
    "mlp.gate_proj": (320, 192),
    "mlp.up_proj": (320, 192),
    "mlp.down_proj": (192, 320),
}
Parts = dict[str, Tensor]
Made = tuple[Parts, Tensor]


def whole(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape)


def scales(*shape: int, of: float, dtype: torch.dtype = torch.float16) -> Tensor:
    return ((torch.rand(shape) + 0.5) * of).to(dtype)


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Rows of numbers in int32 words: ``order[i]`` of a word in its i-th place from below."""
    count = 32 // bits
    order = order or tuple(range(count))
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // count, dtype=torch.int64)
    for word in range(packed.shape[1]):
        for place, index in enumerate(order):
            packed[:, word] += numbers[:, word * count + index].long() << (bits * place)
    # As two's complement has them.
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def fp8_block(n: int, k: int) -> Made:
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    scale = scales(-(-n // 128), -(-k // 128), of=0.1, dtype=torch.float32)
    full = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return {"weight": weight, "weight_scale_inv": scale}, weight.float() * full


def fp8_tensor(n: int, k: int) -> Made:
    weight, scale = torch.randn(n, k).to(torch.float8_e4m3fn), scales(1, of=0.1)[0].float()
    parts = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(0.3)}
    return parts, weight.float() * scale


def fp8_channel(n: int, k: int) -> Made:
    weight, scale = torch.randn(n, k).to(torch.float8_e4m3fn), scales(n, 1, of=0.1)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale.float()


def int8_channel(n: int, k: int) -> Made:
    weight = whole(-128, 128, n, k).to(torch.int8)
    scale = scales(n, 1, of=1e-3, dtype=torch.bfloat16)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale.float()


def gptq(bits: int, version: int, act_order: bool, indexed: bool = True) -> Callable[..., Made]:
    def make(n: int, k: int) -> Made:
        group = torch.arange(k) // 64
        if act_order:
            group = group[torch.randperm(k)]
        number, zero = whole(0, 2**bits, k, n), whole(1, 2**bits, k // 64, n)
        scale = scales(k // 64, n, of=0.2 / 2**bits)
        parts = {
            "qweight": words(number.T, bits).T.contiguous(),
            "qzeros": words(zero - (1 if version == 1 else 0), bits),
            "scales": scale,
        }
        if indexed:
            parts["g_idx"] = group.to(torch.int32)
        return parts, ((number - zero[group]) * scale.float()[group]).T

    return make


def awq(n: int, k: int) -> Made:
    number, zero, scale = whole(0, 16, k, n), whole(0, 16, k // 64, n), scales(k // 64, n, of=0.02)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(number, 4, order), "qzeros": words(zero, 4, order), "scales": scale}
    group = torch.arange(k) // 64
    return parts, ((number - zero[group]) * scale.float()[group]).T


def w4a16(bits: int, zeros: bool, act_order: bool = False, group_size: int = 32) -> Any:
    def make(n: int, k: int) -> Made:
        middle, groups = 2 ** (bits - 1), -(-k // group_size)
        number, scale = whole(-middle, middle, n, k), scales(n, groups, of=0.2 / 2**bits)
        group = torch.arange(k) // group_size
        parts = {
            "weight_packed": words(number + middle, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([n, k]),
        }
        zero = torch.zeros(n, groups)
        if zeros:
            zero = whole(-middle, middle, n, groups)
            parts["weight_zero_point"] = words((zero + middle).T, bits).T.contiguous()
        if act_order:
            group = group[torch.randperm(k)]
            parts["weight_g_idx"] = group.to(torch.int32)
        return parts, (number - zero[:, group]) * scale.float()[:, group]

    return make


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {**group, "weights": weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def packed(bits: int, strategy: str, group_size: int | None, **more: Any) -> dict[str, Any]:
    common = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size}
    return compressed("pack-quantized", **common, **more)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
# Name → quantization_config, and what draws the parts of one product and the weight they are.
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[int, int], Made]]] = {
    "FP8, blocks of 128": ({**FP8, "weight_block_size": [128, 128]}, fp8_block),
    "FP8, one scale a weight": ({**FP8, "activation_scheme": "static"}, fp8_tensor),
    "AWQ": (AWQ, awq),
    "GPTQ int4": (GPTQ, gptq(4, 1, False)),
    "GPTQ int4, act order": ({**GPTQ, "desc_act": True}, gptq(4, 1, True)),
    "GPTQ int8": ({**GPTQ, "bits": 8}, gptq(8, 1, False)),
    "GPTQ, second format": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 2, False)),
    "GPTQ, no g_idx": (GPTQ, gptq(4, 1, False, indexed=False)),
    "compressed-tensors w4a16": (packed(4, "group", 32, symmetric=True), w4a16(4, False)),
    "compressed-tensors w4a16, zeros": (packed(4, "group", 32, symmetric=False), w4a16(4, True)),
    "compressed-tensors w4a16, act order": (
        packed(4, "group", 32, symmetric=True, actorder="group"),
        w4a16(4, False, act_order=True),
    ),
    "compressed-tensors w8a16, channel": (
        packed(8, "channel", None, symmetric=True),
        w4a16(8, False, group_size=10**6),
    ),
    "compressed-tensors FP8, channel": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8_channel,
    ),
    "compressed-tensors FP8, one scale": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        fp8_tensor,
    ),
    "compressed-tensors int8, channel": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        int8_channel,
    ),
}


def write(folder: Path, quantised: dict[str, Any] | None, state: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    more = {} if quantised is None else {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps({**SHAPE, "dtype": "float16", **more}))
    write_tokenizer(folder)
    save_file(state, folder / "model.safetensors")
    return folder


def draw(make: Callable[[int, int], Made]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A quantised model's tensors, and those of the model that it stands for."""
    torch.manual_seed(0)
    rest = {"model.norm.weight": torch.ones(192).half()}
    for name in ("model.embed_tokens", "lm_head"):
        rest[f"{name}.weight"] = torch.randn(260, 192).half()
    stored, plain = {}, {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            rest[f"model.layers.{layer}.{norm}.weight"] = (torch.rand(192) + 0.5).half()
        for linear, (n, k) in LINEARS.items():
            name = f"model.layers.{layer}.{linear}"
            parts, weight = make(n, k)
            stored |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            plain[f"{name}.weight"] = weight.float().contiguous()
    return {**rest, **stored}, {**rest, **plain}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_quantised_checkpoint_is_read_exactly(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, make = LAYOUTS[name]
    stored, plain = draw(make)
    folder = write(tmp_path, quantised, stored)
    got = export_state(load_decoder(folder, torch.float32, CPU))
    assert got.keys() == plain.keys()
    for weight, tensor in plain.items():
        assert torch.equal(got[weight], tensor.float()), weight
    # Counted as what it stands for.
    assert parameter_count(folder) == sum(tensor.numel() for tensor in plain.values())
    assert tensor_names(folder) == set(plain)
    mib = sum(tensor.numel() for tensor in plain.values()) * 4 / 2**20
    disk = (folder / "model.safetensors").stat().st_size / 2**20
    cost = f"weights are computed with in float32: {mib:.1f} MiB in memory, {disk:.1f} MiB on disk"
    assert cost in caplog.text
    assert disk < mib / 2


@pytest.mark.parametrize("name", ["FP8, blocks of 128", "AWQ", "compressed-tensors w4a16"])
def test_its_text_is_that_of_the_model_it_stands_for(name: str, tmp_path: Path) -> None:
    stored, plain = draw(LAYOUTS[name][1])
    folders = {
        "quantised": write(tmp_path / "quantised", LAYOUTS[name][0], stored),
        "plain": write(tmp_path / "plain", None, plain),
    }
    texts = []
    for folder in folders.values():
        settings = {"dtype": "float32", "grammar_isolated": False, "algorithm": "ngram"}
        with Engine(str(folder), **settings) as engine:
            output = engine.generate("hello", sampling={"max_tokens": 16, "temperature": 0.0})
        texts.append(output.token_ids)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 4


def test_parts_may_lie_in_several_shards_and_in_pickled_ones(tmp_path: Path) -> None:
    stored, plain = draw(awq)
    folder = write(tmp_path, AWQ, stored)
    (folder / "model.safetensors").unlink()
    names = sorted(stored, key=lambda name: name.rpartition(".")[2])
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map = {}
    for number, half in enumerate(halves):
        shard = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save({name: stored[name] for name in half}, folder / shard)
        weight_map |= dict.fromkeys(half, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    got = export_state(load_decoder(folder, torch.float32, CPU))
    assert all(torch.equal(got[name], tensor.float()) for name, tensor in plain.items())


def test_the_first_quantisers_file_of_settings_is_read(tmp_path: Path) -> None:
    stored, plain = draw(gptq(4, 1, False))
    folder = write(tmp_path, None, stored)
    settings = {"bits": 4, "group_size": 64, "desc_act": False, "sym": True}
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    got = export_state(load_decoder(folder, torch.float32, CPU))
    assert all(torch.equal(got[name], tensor.float()) for name, tensor in plain.items())


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """GPT-OSS as published: 4-bit floats in blocks of 32, whose scales are powers of 2."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    sizes = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 131}
    model = reference_oss(tmp_path, sizes)
    state, plain = load_file(tmp_path / "model.safetensors"), {}
    torch.manual_seed(0)
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj")) and "experts" in n]:
        count, inputs, outputs = state.pop(name).shape
        codes = whole(0, 16, count, outputs, inputs // 32, 32)
        exponents = whole(118, 126, count, outputs, inputs // 32).to(torch.uint8)
        low, high = codes[..., ::2], codes[..., 1::2]
        state[f"{name}_blocks"] = (low + 16 * high).to(torch.uint8)
        state[f"{name}_scales"] = exponents
        wide = values[codes] * (2.0 ** (exponents.float() - 127))[..., None]
        plain[name] = wide.flatten(2).transpose(1, 2)
    save_file(state, tmp_path / "model.safetensors")
    hf = json.loads((tmp_path / "config.json").read_text())
    hf["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    got = export_state(load_decoder(tmp_path, torch.float32, CPU))
    assert len(plain) == 2 * model.config.num_hidden_layers
    for name, tensor in plain.items():
        assert torch.equal(got[name], tensor), name
    assert parameter_count(tmp_path) == sum(tensor.numel() for tensor in got.values())


def reference_oss(folder: Path, sizes: dict[str, Any]) -> Any:
    from tests.support.models import CASES

    family, extra = CASES["gpt-oss"]
    CASES["gpt-oss in mxfp4"] = family, {**extra, **sizes, "num_attention_heads": 4}
    try:
        return reference("gpt-oss in mxfp4", folder)
    finally:
        del CASES["gpt-oss in mxfp4"]


W4 = packed(4, "group", 32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "quant_method must be one of awq, comp"),
    "no method": ({"bits": 4}, "quant_method must be one of .*None"),
    "awq bits": ({**AWQ, "bits": 8}, "quantization_config: bits must be one of 4: 8"),
    "awq gemv": ({**AWQ, "version": "gemv"}, "version must be one of gemm"),
    "awq zeros": ({**AWQ, "zero_point": False}, "zero_point must be one of True: False"),
    "gptq bits": ({**GPTQ, "bits": 3}, "bits must be one of 2, 4, 8: 3"),
    "gptq form": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be .* marlin"),
    "gptq group": ({**GPTQ, "group_size": 0}, "group_size must be a whole number above 0: 0"),
    "fp8 block": ({**FP8, "weight_block_size": 128}, "weight_block_size must be two whole"),
    "form": ({**W4, "format": "marlin-24"}, "format must be one of .* marlin-24"),
    "no groups": ({**W4, "config_groups": {}}, "config_groups must be an object"),
    "strategy": (packed(4, "token", None), "strategy must be one of .* token"),
    "packed bits": (packed(3, "group", 32), "num_bits must be one of 4, 8: 3"),
    "group": (packed(4, "group", None), "group_size must be a whole number above 0: None"),
    "groups differ": (
        {
            **W4,
            "config_groups": {**W4["config_groups"], "group_1": {"weights": {"num_bits": 8}}},
        },
        "all groups must have the same weights",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_names_its_field(name: str, tmp_path: Path) -> None:
    quantised, words = REFUSED[name]
    folder = write(tmp_path, quantised, {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=words) as caught:
        load_decoder(folder, torch.float32, CPU)
    assert "quantization_config" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("layout", "part", "change", "words"),
    [
        ("AWQ", "scales", lambda x: x[:, :-8], "q_proj.weight: these are no awq weights"),
        ("AWQ", "qzeros", None, "q_proj.weight: these are no awq weights .*'qzeros'"),
        ("GPTQ int4", "g_idx", lambda x: x + 9, "q_proj.weight: these are no gptq weights"),
        (
            "FP8, blocks of 128",
            "weight_scale_inv",
            None,
            "q_proj.weight has type torch.float8",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(
    layout: str, part: str, change: Any, words: str, tmp_path: Path
) -> None:
    quantised, make = LAYOUTS[layout]
    stored, _ = draw(make)
    name = f"model.layers.0.self_attn.q_proj.{part}"
    tensor = stored.pop(name)
    if change is not None:
        stored[name] = change(tensor).contiguous()
    folder = write(tmp_path, quantised, stored)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_decoder(folder, torch.float32, CPU)
    assert len(str(caught.value).splitlines()) == 1
