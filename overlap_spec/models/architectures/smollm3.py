"""SmolLM3: Llama whose every fourth layer does not rotate."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import (
    NO_ROPE,
    ModelConfig,
    layer_windows,
    llama_family,
    whole,
)

ARCHITECTURE = "SmolLM3ForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    layers, step = whole(hf, "num_hidden_layers"), whole(hf, "no_rope_layer_interval", 4)
    turns = hf.get("no_rope_layers") or [(i + 1) % step for i in range(layers)]
    bias = bool(hf.get("attention_bias", False))
    return llama_family(
        {"rope_theta": 2e6, "tie_word_embeddings": True, **hf},
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        local_rope=NO_ROPE,
        local_layers=tuple(not turn for turn in turns[:layers]),
        sliding_windows=layer_windows(hf),
    )
