"""StableLM: layer norms with biases, heads turned in part; the 12B normed heads, and an MLP beside
the attention."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import Layout, ModelConfig, llama_family, number, read_rope

ARCHITECTURE = "StableLmForCausalLM"
LAYOUT = Layout(names=(("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")), norms_apart=True)


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    has_normed_heads = bool(hf.get("qk_layernorm", False))
    return llama_family(
        hf,
        rms_norm_eps=number("layer_norm_eps", hf.get("layer_norm_eps"), 1e-5, 1.0),
        norm="layer",
        norm_bias=True,
        qkv_bias=bool(hf.get("use_qkv_bias", False)),
        qk_norm=has_normed_heads,
        rope=read_rope({"partial_rotary_factor": 0.25, **hf}),
        parallel_norms=int(bool(hf.get("use_parallel_residual", False))),
        layout=LAYOUT if has_normed_heads else Layout(),
    )
