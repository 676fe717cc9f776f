"""Qwen3's mixtures of experts: Qwen3 with experts in all layers but those that the file names."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import (
    ExpertsConfig,
    ModelConfig,
    layer_windows,
    llama_family,
    whole,
)

ARCHITECTURE = "Qwen3MoeForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    step, plain = whole(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    layers = whole(hf, "num_hidden_layers")
    count = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    experts = ExpertsConfig(
        count=whole(hf, count),
        per_token=whole(hf, "num_experts_per_tok"),
        intermediate_size=whole(hf, "moe_intermediate_size"),
        layers=tuple(i not in plain and (i + 1) % step == 0 for i in range(layers)),
        normalised=bool(hf.get("norm_topk_prob", False)),
    )
    return llama_family(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sliding_windows=layer_windows(hf),
        experts=experts,
    )
