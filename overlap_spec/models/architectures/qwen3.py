"""Qwen3 (dense): RMSNorm on each query and key head before the rotation."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import ModelConfig, layer_windows, llama_family

ARCHITECTURE = "Qwen3ForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return llama_family(
        hf, qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=layer_windows(hf)
    )
