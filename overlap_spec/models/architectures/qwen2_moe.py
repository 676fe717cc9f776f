"""Qwen2's mixtures of experts, Qwen1.5's too: Qwen2 with an expert that every token is sent to
beside those that it chooses."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import (
    ExpertsConfig,
    ModelConfig,
    layer_windows,
    llama_family,
    whole,
)

ARCHITECTURE = "Qwen2MoeForCausalLM"


def shared_experts(hf: Mapping[str, Any], normalised: bool) -> ExpertsConfig:
    """Experts in all layers but those that the file names, one of them every token's.

    Args:
        normalised: Whether shares add up to 1 where the file does not say.
    """
    step, plain = whole(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return ExpertsConfig(
        count=whole(hf, "num_experts"),
        per_token=whole(hf, "num_experts_per_tok"),
        intermediate_size=whole(hf, "moe_intermediate_size"),
        layers=tuple(
            i not in plain and (i + 1) % step == 0 for i in range(whole(hf, "num_hidden_layers"))
        ),
        normalised=bool(hf.get("norm_topk_prob", normalised)),
        shared_size=whole(hf, "shared_expert_intermediate_size"),
    )


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    return llama_family(
        hf,
        qkv_bias=bool(hf.get("qkv_bias", True)),
        sliding_windows=layer_windows(hf),
        experts=shared_experts(hf, normalised=False),
    )
