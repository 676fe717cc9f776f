"""MiMo: Qwen2 with next-token modules, which the drafter ``mtp`` reads."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import ModelConfig, layer_windows, llama_family

ARCHITECTURE = "MiMoForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    return llama_family(hf, qkv_bias=True, sliding_windows=layer_windows(hf))
