"""Gemma 2: norms on both sides, GeGLU, soft caps, and a window on every other layer."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import (
    HIGHEST_THETA,
    ModelConfig,
    alternating_windows,
    llama_family,
    number,
    soft_cap,
    whole,
)

ARCHITECTURE = "Gemma2ForCausalLM"


def gemma(hf: Mapping[str, Any], **differences: Any) -> ModelConfig:
    """What Gemma 2 and 3 share."""
    bias = bool(hf.get("attention_bias", False))
    scalar = number("query_pre_attn_scalar", hf.get("query_pre_attn_scalar"), 256, HIGHEST_THETA)
    common = {
        "activation": "gelu_pytorch_tanh",
        "tie_embeddings": bool(hf.get("tie_word_embeddings", True)),
        "head_dim": whole(hf, "head_dim", 256),
        "qkv_bias": bias,
        "o_bias": bias,
        "embed_scale": whole(hf, "hidden_size") ** 0.5,
        "query_scale": scalar**-0.5,
        "score_cap": soft_cap(hf, "attn_logit_softcapping"),
        "logit_cap": soft_cap(hf, "final_logit_softcapping"),
        "unit_offset": True,
        "sandwich_norms": True,
    }
    return llama_family(hf, **{**common, **differences})


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return gemma({**caps, **hf}, sliding_windows=alternating_windows(hf, 2))
