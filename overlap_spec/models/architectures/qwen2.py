"""Qwen2 and Qwen2.5: biases on query, key and value; a window on some layers if asked."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import ModelConfig, layer_windows, llama_family

ARCHITECTURE = "Qwen2ForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    return llama_family(hf, qkv_bias=True, sliding_windows=layer_windows(hf))
