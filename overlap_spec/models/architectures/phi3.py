"""Phi-3 and Phi-4: Llama with fused projections in the file, LongRoPE, heads turned in part."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import Layout, ModelConfig, llama_family, read_rope, whole

ARCHITECTURE = "Phi3ForCausalLM"
# How early files name LongRoPE.
OLDER = ("su", "yarn")


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    scaling = dict(hf.get(name) or {})
    for field in ("type", "rope_type"):
        if scaling.get(field) in OLDER:
            scaling[field] = "longrope"
    rope = read_rope({**hf, name: scaling})
    windows = (hf.get("sliding_window"),) * whole(hf, "num_hidden_layers")
    layout = Layout(fused=("qkv_proj", "gate_up_proj"))
    return llama_family(hf, layout=layout, rope=rope, sliding_windows=windows)
