"""GLM-4 (0414): GLM with norms on both sides."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.models.architectures import glm
from overlap_spec.models.config import ModelConfig

ARCHITECTURE = "Glm4ForCausalLM"
NAMES = (
    ("post_attention_layernorm", "post_self_attn_layernorm"),
    ("pre_feedforward_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "post_mlp_layernorm"),
)


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    return glm.describe(hf, sandwich_norms=True, layout=replace(glm.LAYOUT, names=NAMES))
