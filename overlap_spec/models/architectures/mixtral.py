"""Mixtral: Mistral with experts in every layer, under names of their own."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import ExpertsConfig, Layout, ModelConfig, llama_family, whole

ARCHITECTURE = "MixtralForCausalLM"
NAMES = (
    ("mlp", "block_sparse_moe"),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
    ("down_proj", "w2"),
)


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    layers = whole(hf, "num_hidden_layers")
    experts = ExpertsConfig(
        count=whole(hf, "num_local_experts", 8),
        per_token=whole(hf, "num_experts_per_tok", 2),
        intermediate_size=whole(hf, "intermediate_size"),
        layers=(True,) * layers,
    )
    windows = (hf.get("sliding_window"),) * layers
    return llama_family(
        {"rope_theta": 1e6, **hf}, layout=Layout(NAMES), experts=experts, sliding_windows=windows
    )
