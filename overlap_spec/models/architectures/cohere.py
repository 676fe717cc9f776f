"""Command R: layer norms without biases, an MLP beside the attention, scaled logits, and heads
turned in pairs of neighbours."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.models.config import HIGHEST_THETA, ModelConfig, llama_family, number, read_rope

ARCHITECTURE = "CohereForCausalLM"


def describe(hf: Mapping[str, Any], **differences: Any) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    common = {
        "rms_norm_eps": number("layer_norm_eps", hf.get("layer_norm_eps"), 1e-5, 1.0),
        "norm": "layer",
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": bool(hf.get("use_qk_norm", False)),
        "rope": replace(read_rope({"rope_theta": 5e5, **hf}), interleaved=True),
        "parallel_norms": 1,
        "logit_scale": number("logit_scale", hf.get("logit_scale"), 0.0625, HIGHEST_THETA),
    }
    return llama_family({"tie_word_embeddings": True, **hf}, **{**common, **differences})
