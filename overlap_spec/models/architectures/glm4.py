"""GLM-4 (0414): norms on both sides, half of each head turned in pairs of neighbours."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.models.config import Layout, ModelConfig, llama_family, read_rope, whole

ARCHITECTURE = "Glm4ForCausalLM"
LAYOUT = Layout(
    names=(
        ("post_attention_layernorm", "post_self_attn_layernorm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    ),
    fused=("gate_up_proj",),
)


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    rope = read_rope({"partial_rotary_factor": 0.5, **hf})
    return llama_family(
        {"rms_norm_eps": 1.5625e-07, **hf},
        head_dim=whole(hf, "head_dim", 128),
        qkv_bias=bool(hf.get("attention_bias", True)),
        rope=replace(rope, interleaved=True),
        sandwich_norms=True,
        layout=LAYOUT,
    )
