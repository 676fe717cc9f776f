"""OLMo 2: norms behind attention and MLP instead of before them, and over all heads at once."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import ModelConfig, llama_family

ARCHITECTURE = "Olmo2ForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return llama_family(
        {"rms_norm_eps": 1e-5, **hf},
        qkv_bias=bias,
        o_bias=bias,
        joint_qk_norm=True,
        sandwich_norms=True,
        pre_norms=False,
    )
