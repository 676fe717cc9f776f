"""GPT-OSS: sinks in the attention, a window on every other layer, experts with clamped SwiGLU."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import (
    HIGHEST_THETA,
    ExpertsConfig,
    ModelConfig,
    alternating_windows,
    llama_family,
    number,
    whole,
)

ARCHITECTURE = "GptOssForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    bias, layers = bool(hf.get("attention_bias", True)), whole(hf, "num_hidden_layers")
    experts = ExpertsConfig(
        count=whole(hf, "num_local_experts"),
        per_token=whole(hf, "num_experts_per_tok"),
        intermediate_size=whole(hf, "intermediate_size"),
        layers=(True,) * layers,
        limit=number("swiglu_limit", hf.get("swiglu_limit"), 7.0, HIGHEST_THETA),
    )
    return llama_family(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        sliding_windows=alternating_windows(hf, 2),
        experts=experts,
    )
