"""Qwen3-Next: gated delta networks in three layers of four, attention with output gates in the
others, and experts of which one is every token's."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.architectures.qwen2_moe import shared_experts
from overlap_spec.models.config import (
    DeltaConfig,
    Layout,
    ModelConfig,
    llama_family,
    read_rope,
    whole,
)

ARCHITECTURE = "Qwen3NextForCausalLM"
KINDS = "linear_attention", "full_attention"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    layout = Layout(fused=("in_proj_qkvz", "in_proj_ba"))
    return hybrid(hf, experts=shared_experts(hf, normalised=True), layout=layout)


def hybrid(hf: Mapping[str, Any], **differences: Any) -> ModelConfig:
    """What Qwen3-Next and Qwen3.5 share."""
    bias = bool(hf.get("attention_bias", False))
    return llama_family(
        hf,
        head_dim=whole(hf, "head_dim", 256),
        rope=read_rope({"partial_rotary_factor": 0.25, **hf}),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        output_gate=True,
        unit_offset=True,
        delta=read_delta(hf),
        **differences,
    )


def read_delta(hf: Mapping[str, Any]) -> DeltaConfig:
    """The layers without attention, which ``layer_types`` names, or all but each fourth one."""
    layers, pattern = whole(hf, "num_hidden_layers"), whole(hf, "full_attention_interval", 4)
    kinds = hf.get("layer_types") or [KINDS[i % pattern == 0] for i in range(1, layers + 1)]
    if len(kinds) != layers or not set(kinds) <= {*KINDS} or KINDS[1] not in kinds:
        raise CheckpointError(
            f"config.json: layer_types must be {layers} times one of {', '.join(KINDS)}, and the "
            f"latter at least once: {str(kinds)[:50]}"
        )
    keys, values = (whole(hf, f"linear_num_{what}_heads") for what in ("key", "value"))
    if values % keys:
        raise CheckpointError(
            f"config.json: linear_num_value_heads {values} is no multiple of linear_num_key_heads "
            f"{keys}"
        )
    return DeltaConfig(
        layers=tuple(kind == KINDS[0] for kind in kinds),
        key_heads=keys,
        key_dim=whole(hf, "linear_key_head_dim"),
        groups=values // keys,
        value_dim=whole(hf, "linear_value_head_dim"),
        taps=whole(hf, "linear_conv_kernel_dim", 4),
    )
