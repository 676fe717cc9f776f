"""Qwen2 and Qwen2.5: biases on query, key and value; a window on some layers if asked."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import ModelConfig, llama_family

ARCHITECTURE = "Qwen2ForCausalLM"


def layer_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Window of each layer: by ``layer_types``, or from ``max_window_layers`` on."""
    layers = int(hf["num_hidden_layers"])
    window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i >= int(hf.get("max_window_layers", layers)) else "full_attention"
        for i in range(layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    return llama_family(hf, qkv_bias=True, sliding_windows=layer_windows(hf))
