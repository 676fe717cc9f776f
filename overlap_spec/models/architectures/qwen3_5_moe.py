"""Qwen3.5's mixtures of experts, the text model: Qwen3.5 with Qwen3-Next's experts."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.architectures import qwen3_5
from overlap_spec.models.architectures.qwen2_moe import shared_experts
from overlap_spec.models.config import ModelConfig, whole

ARCHITECTURE = "Qwen3_5MoeForCausalLM"


def describe(hf: Mapping[str, Any], **differences: Any) -> ModelConfig:
    # No layer has an MLP, whose size the file does not say.
    sized = {**hf, "intermediate_size": whole(hf, "moe_intermediate_size")}
    experts = shared_experts({**hf, "norm_topk_prob": True}, normalised=True)
    return qwen3_5.describe(sized, experts=experts, **differences)
