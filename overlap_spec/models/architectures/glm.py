"""GLM-4 (9B chat, as transformers has it): half of each head turned in pairs of neighbours."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.models.config import Layout, ModelConfig, llama_family, read_rope, whole

ARCHITECTURE = "GlmForCausalLM"
LAYOUT = Layout(fused=("gate_up_proj",))


def describe(hf: Mapping[str, Any], **differences: Any) -> ModelConfig:
    rope = read_rope({"partial_rotary_factor": 0.5, **hf})
    common = {
        "head_dim": whole(hf, "head_dim", 128),
        "qkv_bias": bool(hf.get("attention_bias", True)),
        "rope": replace(rope, interleaved=True),
        "layout": LAYOUT,
    }
    return llama_family({"rms_norm_eps": 1.5625e-07, **hf}, **{**common, **differences})
