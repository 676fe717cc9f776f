"""DFlash draft models in their published layouts, with random weights, and their arithmetic.

It is written out in plain torch, from the names in their files.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.checkpoints import SHAPE
from tests.support.plain_layers import Tensors, linear, mlp, rms, rotate

HIDDEN, INNER, VOCABULARY = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
HEADS, KV_HEADS, DIM = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], 16
MASK = 200


@dataclass(frozen=True)
class Layout:
    """A published layout: config, and names of tensors.

    ``shape``: fields beside the target's. ``nested``: as `speculators` has it, with a vocabulary of
    its own. ``features``: layers of the target whose inputs are read. ``windows``, ``causal``: of
    each layer.
    """

    config: dict[str, Any]
    shape: dict[str, Any] = field(default_factory=dict)
    nested: bool = False
    features: tuple[int, ...] = (1, 2)
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    biases: bool = False


SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}
IDS = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
LAYOUTS = {
    "z-lab": Layout({"block_size": 8, "dflash_config": IDS}),
    "z-lab, sliding windows": Layout({"dflash_config": {**IDS, "block_size": 8}}, SLIDING,
        windows=(9, None), causal=(True, False)),
    "z-lab, is_causal": Layout({"dflash_config": IDS, "is_causal": False, "attention_bias": True},
        SLIDING, windows=(9, None), biases=True),
    "speculators": Layout({"architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [0, 1, 2], "block_size": 8, "draft_vocab_size": 96,
        "mask_token_id": MASK, "sample_from_anchor": False}, nested=True, features=(0, 1, 2)),
}  # fmt: skip


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Every tensor of a layout's file."""
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(layout.features) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    if layout.nested:
        found["embed_tokens.weight"] = (VOCABULARY, HIDDEN)
        found["lm_head.weight"] = (layout.config["draft_vocab_size"], HIDDEN)
    for number in range(len(layout.windows)):
        layer = f"layers.{number}"
        products = {
            "self_attn.q_proj": (HEADS * DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        found |= {f"{layer}.{name}.weight": shape for name, shape in products.items()}
        if layout.biases:
            biased = [name for name in products if name.startswith("self_attn")]
            found |= {f"{layer}.{name}.bias": products[name][:1] for name in biased}
        found |= {f"{layer}.self_attn.{n}_norm.weight": (DIM,) for n in "qk"}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = (HIDDEN,)
    return found


def write(folder: Path, layout: Layout) -> Tensors:
    """A random draft model in ``folder``; its tensors."""
    generator = torch.Generator().manual_seed(4)
    weights: Tensors = {}
    for name, shape in shapes(layout).items():
        values = torch.randn(shape, generator=generator)
        weights[name] = values / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.3 * values
        if name.endswith(".bias"):
            weights[name] = 0.3 * values
    if layout.nested:
        count = layout.config["draft_vocab_size"]
        ids = torch.randperm(VOCABULARY, generator=generator)[:count].sort().values
        weights["d2t"] = ids - torch.arange(count)
        weights["t2d"] = torch.zeros(VOCABULARY).bool().index_fill_(0, ids, True)
    folder.mkdir()
    shape = {
        **SHAPE,
        "model_type": "qwen3",
        "num_hidden_layers": len(layout.windows),
        "head_dim": DIM,
        **layout.shape,
    }
    hf = {"architectures": ["DFlashDraftModel"], **layout.config}
    hf |= {"transformer_layer_config": shape} if layout.nested else shape
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(weights, folder / "model.safetensors")
    return weights


def oracle(layout: Layout, weights: Tensors, features: Tensor, embeds: Tensor) -> Tensor:
    """The normed states ``(W, hidden)`` at a block's tokens.

    ``features (P, F)``: of all positions before it. ``embeds (W, hidden)``: the block's tokens.
    """
    before, width = len(features), len(embeds)
    context, x = rms(linear(weights, "fc", features), weights["hidden_norm.weight"]), embeds
    positions = torch.arange(before + width)
    ahead = positions - positions[before:, None]
    for number, (window, causal) in enumerate(zip(layout.windows, layout.causal, strict=True)):
        layer = f"layers.{number}"
        normed = rms(x, weights[f"{layer}.input_layernorm.weight"])
        every, name = torch.cat([context, normed]), f"{layer}.self_attn"
        q = linear(weights, f"{name}.q_proj", normed).view(width, -1, DIM)
        k, v = (linear(weights, f"{name}.{n}_proj", every).view(-1, KV_HEADS, DIM) for n in "kv")
        q = rotate(rms(q, weights[f"{name}.q_norm.weight"]), positions[before:])
        k = rotate(rms(k, weights[f"{name}.k_norm.weight"]), positions)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        hidden = (ahead > 0) & causal
        if window is not None:
            hidden |= ahead.abs() >= window
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        x = x + linear(weights, f"{name}.o_proj", mixed.flatten(1))
        x = x + mlp(weights, layer, rms(x, weights[f"{layer}.post_attention_layernorm.weight"]))
    return rms(x, weights["norm.weight"])
