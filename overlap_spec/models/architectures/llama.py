"""Llama 2, 3, 3.1, 3.2 and everything saved as LlamaForCausalLM."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import ModelConfig, llama_family

ARCHITECTURE = "LlamaForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return llama_family(hf, qkv_bias=bias, o_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))
