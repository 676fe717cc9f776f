"""Draft heads in their published layouts, with random weights, and their arithmetic in plain torch.

The head's own arithmetic is written out here, from the names in its file.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from overlap_spec.models.eagle3 import SPECULATORS
from tests.support.checkpoints import SHAPE
from tests.support.plain_layers import Tensors, attention, block, linear, mlp, rms

HIDDEN, INNER, VOCABULARY = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
HEADS, KV_HEADS = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
DRAFT_VOCABULARY = 96
PROMPT = "the train to platform 4 leaves at 10:15"


@dataclass(frozen=True)
class Layout:
    """A published layout: config, and names of tensors.

    ``prefix``: before all names. ``layer``: name of EAGLE-3's layer. ``file``: as it is saved.
    ``features``: layers of the target whose inputs are read, of EAGLE-3. ``later_norm``: name of
    the first norm of EAGLE-3's layers after the first. ``fc_norm``: names of the norms over each
    feature. ``shape``: fields beside the target's.
    """

    algorithm: str
    config: dict[str, Any]
    prefix: str = ""
    layer: str = "midlayer"
    file: str = "model.safetensors"
    embedding: bool = False
    bias: bool = False
    layers: int = 1
    maps: tuple[str, ...] = ("d2t", "t2d")
    vocabulary: int = DRAFT_VOCABULARY
    head_dim: int = HIDDEN // HEADS
    features: tuple[int, ...] = (1, 2, 3)
    residual_normed: bool = False
    later_norm: str = "input_layernorm"
    input_norm: bool = False
    fc_norm: tuple[str, ...] = ()
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    own_head: bool = True
    inner: int = INNER
    window: int | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    mask: tuple[int, ...] = ()

    @property
    def fusing(self) -> bool:
        """Whether it is EAGLE-3's, or more than that."""
        return self.algorithm != "eagle"


IDS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
INPUTS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], **IDS}
LAYOUTS: dict[str, Layout] = {
    "EAGLE-1/2, fc.bias, pytorch_model.bin": Layout("eagle",
        {"architectures": ["LlamaForCausalLM"]}, file="pytorch_model.bin", embedding=True,
        bias=True),
    "EAGLE-1/2 of Llama 3, no bias": Layout(
        "eagle", {"architectures": ["LlamaForCausalLM"]}, file="pytorch_model.bin", embedding=True
    ),
    "EAGLE-1/2, SGLang's name": Layout("eagle", {"architectures": ["LlamaForCausalLMEagle"]}),
    "EAGLE-1/2, vLLM's name": Layout(
        "eagle", {"architectures": ["EagleLlamaForCausalLM"]}, prefix="model.", embedding=True
    ),
    "EAGLE-1/2, two layers": Layout("eagle", {"architectures": ["LlamaForCausalLM"]}, layers=2),
    "EAGLE-3, pytorch_model.bin": Layout("eagle3", EAGLE3, file="pytorch_model.bin"),
    "EAGLE-3, no t2d": Layout("eagle3", EAGLE3, maps=("d2t",)),
    "EAGLE-3, whole vocabulary": Layout("eagle3", EAGLE3, maps=(), vocabulary=VOCABULARY),
    "EAGLE-3, layers.0, own embedding": Layout("eagle3", EAGLE3, layer="layers.0", embedding=True),
    "EAGLE-3 of Qwen3, head_dim": Layout("eagle3", EAGLE3, prefix="model.", head_dim=16),
    "EAGLE-3, vLLM's name": Layout(
        "eagle3", {"architectures": ["Eagle3LlamaForCausalLM"], **INPUTS}, layer="layers.0"
    ),
    "speculators": Layout("eagle3", {"architectures": ["Eagle3Speculator"],
        "norm_before_residual": False, **INPUTS}, layer="layers.0", embedding=True),
    "speculators, norm_before_residual": Layout("eagle3",
        {"architectures": ["Eagle3Speculator"], "norm_before_residual": True, **INPUTS},
        layer="layers.0", embedding=True, residual_normed=True),
    "speculators, norm_before_fc, norm_output": Layout(
        "eagle3",
        {
            "architectures": ["Eagle3DraftModel"],
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
            "fc_norm": False,
            **INPUTS,
        },
        layer="layers.0",
        residual_normed=True,
        input_norm=True,
        norm_output=True,
    ),
    "speculators, sliding window": Layout(
        "eagle3",
        {"architectures": ["Eagle3DraftModel"], "norm_before_residual": False, **INPUTS},
        layer="layers.0",
        window=9,
        shape={
            "layer_types": ["sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "speculators of Qwen3, q_norm and k_norm": Layout("eagle3",
        {"architectures": ["Eagle3Speculator"], "norm_before_residual": False, **INPUTS},
        layer="layers.0", embedding=True, head_dim=16, qk_norm=True, shape={"model_type": "qwen3"}),
    "speculators, two layers": Layout("eagle3", {"architectures": ["Eagle3Speculator"],
        "norm_before_residual": False, **INPUTS}, layer="layers.0", layers=2),
    "EAGLE-3.1, fc_norm and norm_output": Layout("eagle3",
        {**EAGLE3, "fc_norm": True, "norm_output": True}, prefix="model.", layer="layers.0",
        fc_norm=("fc_norm.0", "fc_norm.1", "fc_norm.2"), norm_output=True),
    "EAGLE-3, aux_norm_low, _mid and _high": Layout("eagle3", {**EAGLE3, "use_aux_norm": True},
        fc_norm=("aux_norm_low", "aux_norm_mid", "aux_norm_high")),
    "EAGLE-3, three layers": Layout(
        "eagle3", EAGLE3, layer="layers.0", layers=3, later_norm="hidden_norm"
    ),
    "EAGLE-3, two features": Layout(
        "eagle3", {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [0, 2]}, features=(1, 3)
    ),
    "EAGLE-3, eagle_config": Layout("eagle3", {"architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {**IDS, "norm_before_fc": True}}, input_norm=True),
    "EAGLE-3, biases": Layout("eagle3", EAGLE3, bias=True, attention_bias=True),
    "EAGLE-3, the target's head": Layout(
        "eagle3", EAGLE3, maps=(), vocabulary=VOCABULARY, own_head=False
    ),
    "EAGLE-3 of Llama 4": Layout(
        "eagle3", EAGLE3, inner=72, shape={"model_type": "llama4_text", "intermediate_size_mlp": 72}
    ),
    "P-EAGLE, ptd_token_id": Layout("parallel", {**EAGLE3, "parallel_drafting": True,
        "ptd_token_id": 5}, layer="layers.0", layers=2, mask=(1,)),
    "P-EAGLE, pard_token, own embedding": Layout("parallel",
        {"architectures": ["Eagle3LlamaForCausalLM"], "pard_token": 250, **INPUTS}, prefix="model.",
        embedding=True, maps=(), vocabulary=VOCABULARY, mask=(1,)),
    "P-EAGLE of speculators": Layout("parallel",
        {"architectures": ["PEagleDraftModel"], "norm_before_residual": False, "mask_token_id": 7,
        **INPUTS}, layer="layers.0", layers=3, mask=(1, 1)),
}  # fmt: skip


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Every tensor of a layout's file."""
    eagle3, dim = layout.fusing, layout.head_dim
    width = HIDDEN * (len(layout.features) if eagle3 else 2)
    found: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, width)}
    if layout.bias:
        found["fc.bias"] = (HIDDEN,)
    if layout.embedding:
        found["embed_tokens.weight"] = (VOCABULARY, HIDDEN)
    if layout.input_norm:
        found["input_norm.weight"] = (width,)
    if layout.mask:
        found["mask_hidden"] = (*layout.mask, width)
    found |= {f"{name}.weight": (HIDDEN,) for name in layout.fc_norm}
    for number in range(layout.layers):
        first = eagle3 and not number
        layer, read = (layout.layer, 2 * HIDDEN) if first else (f"layers.{number}", HIDDEN)
        outputs = {"q": HEADS * dim, "k": KV_HEADS * dim, "v": KV_HEADS * dim}
        found |= {f"{layer}.self_attn.{n}_proj.weight": (x, read) for n, x in outputs.items()}
        found |= {
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * dim),
            f"{layer}.mlp.gate_proj.weight": (layout.inner, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (layout.inner, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, layout.inner),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if layout.attention_bias:
            found |= {f"{layer}.self_attn.{n}_proj.bias": (x,) for n, x in outputs.items()}
            found[f"{layer}.self_attn.o_proj.bias"] = (HIDDEN,)
        if layout.qk_norm:
            found |= {f"{layer}.self_attn.{n}_norm.weight": (dim,) for n in "qk"}
        if first:
            found[f"{layer}.hidden_norm.weight"] = (HIDDEN,)
        if first or number:
            found[f"{layer}.{layout.later_norm if number else 'input_layernorm'}.weight"] = (
                HIDDEN,
            )
    if eagle3:
        found["norm.weight"] = (HIDDEN,)
        if layout.own_head:
            found["lm_head.weight"] = (layout.vocabulary, HIDDEN)
    return found


def write(folder: Path, layout: Layout) -> Tensors:
    """A random head in ``folder``; its tensors without the file's prefix."""
    generator = torch.Generator().manual_seed(3)
    weights: Tensors = {}
    for name, shape in shapes(layout).items():
        values = torch.randn(shape, generator=generator)
        weights[name] = values / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.3 * values
        if name == "mask_hidden":
            weights[name] = values
        if name.endswith(".bias"):
            weights[name] = 0.3 * values
    if layout.fusing and layout.maps:
        ids = torch.randperm(VOCABULARY, generator=generator)[: layout.vocabulary].sort().values
        maps = {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(VOCABULARY).bool()}
        maps["t2d"][ids] = True
        weights |= {name: maps[name] for name in layout.maps}
    folder.mkdir()
    shape = {
        **SHAPE,
        "model_type": "llama",
        "num_hidden_layers": layout.layers,
        "head_dim": layout.head_dim,
        **layout.shape,
    }
    hf = {"draft_vocab_size": layout.vocabulary, **layout.config}
    if hf["architectures"][0] in SPECULATORS:
        hf["transformer_layer_config"] = shape
    else:
        hf |= shape
    (folder / "config.json").write_text(json.dumps(hf))
    named = {layout.prefix + name: x.contiguous() for name, x in weights.items()}
    if layout.file == "pytorch_model.bin":
        torch.save(named, folder / layout.file)
    else:
        save_file(named, folder / layout.file)
    return weights


def oracle(
    layout: Layout, weights: Tensors, embeds: Tensor, features: Tensor, positions: Tensor
) -> Tensor:
    """The head's output at every token, ``features`` being of the position before."""
    dim = layout.head_dim
    if layout.fusing:
        if layout.input_norm:
            features = rms(features, weights["input_norm.weight"])
        if layout.fc_norm:
            each = zip(features.chunk(len(layout.fc_norm), -1), layout.fc_norm, strict=True)
            features = torch.cat([rms(x, weights[f"{name}.weight"]) for x, name in each], -1)
        layer, feature = layout.layer, linear(weights, "fc", features)
        hidden = rms(feature, weights[f"{layer}.hidden_norm.weight"])
        own = rms(embeds, weights[f"{layer}.input_layernorm.weight"])
        x = hidden if layout.residual_normed else feature
        both = torch.cat([own, hidden], -1)
        x = x + attention(weights, layer, both, positions, dim, layout.window)
        x = x + mlp(weights, layer, rms(x, weights[f"{layer}.post_attention_layernorm.weight"]))
        for number in range(1, layout.layers):
            layer = f"layers.{number}"
            normed = rms(x, weights[f"{layer}.{layout.later_norm}.weight"])
            x = block(weights, layer, x, normed, positions, dim)
        return rms(x, weights["norm.weight"]) if layout.norm_output else x
    x = linear(weights, "fc", torch.cat([embeds, features], -1))
    for number in range(layout.layers):
        layer = f"layers.{number}"
        normed = rms(x, weights[f"{layer}.input_layernorm.weight"]) if number else x
        x = block(weights, layer, x, normed, positions, dim)
    return x
