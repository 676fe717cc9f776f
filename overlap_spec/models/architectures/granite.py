"""Granite 3: Llama with factors on embeddings, scores, what layers add, and logits."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import HIGHEST_THETA, ModelConfig, llama_family, number

ARCHITECTURE = "GraniteForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    def factor(name: str) -> float:
        return number(name, hf.get(name), 1.0, HIGHEST_THETA)

    bias = bool(hf.get("attention_bias", False))
    return llama_family(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        embed_scale=factor("embedding_multiplier"),
        query_scale=factor("attention_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logit_scale=1.0 / factor("logits_scaling"),
    )
