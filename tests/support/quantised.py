"""Quantised checkpoints in their published names and shapes, and the weights that they stand for.

Each layout draws whole numbers, zeros and scales, writes them as the layout's own tools do, bit by
bit, and says in one line of plain torch what weight they stand for.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.checkpoints import write_tokenizer

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
    "compressed-tensors w4a16, act order": (packed(4, "group", 32, symmetric=True,
        actorder="group"), w4a16(4, False, act_order=True)),
    "compressed-tensors w8a16, channel": (packed(8, "channel", None, symmetric=True),
        w4a16(8, False, group_size=10**6)),
    "compressed-tensors FP8, channel": (compressed("float-quantized", num_bits=8, type="float",
        strategy="channel"), fp8_channel),
    "compressed-tensors FP8, one scale": (compressed("float-quantized", num_bits=8, type="float",
        strategy="tensor"), fp8_tensor),
    "compressed-tensors int8, channel": (compressed("int-quantized", num_bits=8, type="int",
        strategy="channel"), int8_channel),
}  # fmt: skip


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
