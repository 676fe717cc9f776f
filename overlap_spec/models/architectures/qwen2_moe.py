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


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    step, plain = whole(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    experts = ExpertsConfig(
        count=whole(hf, "num_experts"),
        per_token=whole(hf, "num_experts_per_tok"),
        intermediate_size=whole(hf, "moe_intermediate_size"),
        layers=tuple(
            i not in plain and (i + 1) % step == 0 for i in range(whole(hf, "num_hidden_layers"))
        ),
        normalised=bool(hf.get("norm_topk_prob", False)),
        shared_size=whole(hf, "shared_expert_intermediate_size"),
    )
    return llama_family(
        hf,
        qkv_bias=bool(hf.get("qkv_bias", True)),
        sliding_windows=layer_windows(hf),
        experts=experts,
    )
