"""DeepSeek-V2 and its Lite: attention over latents, experts of which some are every token's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import (
    HIGHEST_THETA,
    ExpertsConfig,
    LatentConfig,
    Layout,
    ModelConfig,
    llama_family,
    number,
    read_rope,
    whole,
    yarn_scale,
)

ARCHITECTURE = "DeepseekV2ForCausalLM"
LAYOUT = Layout(
    names=(
        ("kv_b_proj", "kv_b_proj.weight"),
        ("shared_expert", "shared_experts"),
        ("e_score_correction_bias", "gate.e_score_correction_bias"),
    )
)


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"config.json: topk_method {str(method)[:50]!r} is not supported")
    if hf.get("norm_topk_prob"):
        # What the factor does then depends on who reads the file.
        raise CheckpointError("config.json: norm_topk_prob is not supported with topk_method")
    expect(hf, "scoring_func", "softmax")
    experts = routed(hf, grouped=method == "group_limited_greedy")
    return latent_family(hf, experts, mlp_bias=bool(hf.get("mlp_bias", False)))


def expect(hf: Mapping[str, Any], name: str, only: Any) -> None:
    """CheckpointError where a field is there, and is not ``only``."""
    if hf.get(name) not in (None, only):
        raise CheckpointError(f"config.json: {name} must be {only!r}: {str(hf[name])[:50]!r}")


def routed(
    hf: Mapping[str, Any], grouped: bool, best: int = 1, **differences: Any
) -> ExpertsConfig:
    """The experts of both versions."""
    size, step = whole(hf, "moe_intermediate_size"), whole(hf, "moe_layer_freq", 1)
    count, chosen = whole(hf, "n_routed_experts"), whole(hf, "num_experts_per_tok")
    groups, opened = (whole(hf, name) if grouped else 1 for name in ("n_group", "topk_group"))
    each = count // groups
    if count % groups or opened > groups or chosen > each * opened or best > each:
        raise CheckpointError(
            f"config.json: n_group {groups} and topk_group {opened} do not fit n_routed_experts "
            f"{count} and num_experts_per_tok {chosen}"
        )
    dense = hf.get("first_k_dense_replace") or 0
    shared = whole(hf, "n_shared_experts") if hf.get("n_shared_experts") else 0
    return ExpertsConfig(
        count=count,
        per_token=chosen,
        intermediate_size=size,
        layers=tuple(i >= dense and i % step == 0 for i in range(whole(hf, "num_hidden_layers"))),
        normalised=bool(hf.get("norm_topk_prob", False)),
        shared_size=size * shared,
        shared_gate=False,
        wide=True,
        factor=number("routed_scaling_factor", hf.get("routed_scaling_factor"), 1.0, HIGHEST_THETA),
        groups=groups,
        open_groups=opened,
        best=best,
        **differences,
    )


def latent_family(
    hf: Mapping[str, Any], experts: ExpertsConfig, interleaved: bool = True, **differences: Any
) -> ModelConfig:
    """What both versions share beside their experts."""
    rope = replace(read_rope(hf), interleaved=interleaved)
    turning, straight = whole(hf, "qk_rope_head_dim"), whole(hf, "qk_nope_head_dim")
    latent = LatentConfig(
        rank=whole(hf, "kv_lora_rank"),
        query_rank=whole(hf, "q_lora_rank") if hf.get("q_lora_rank") else None,
        key_dim=straight,
        value_dim=whole(hf, "v_head_dim"),
    )
    scaling = dict(rope.scaling)
    longer = yarn_scale(scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0))
    bias = bool(hf.get("attention_bias", False))
    return llama_family(
        hf,
        num_kv_heads=1,
        head_dim=turning,
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        query_scale=(straight + turning) ** -0.5 * longer**2,
        layout=LAYOUT,
        latent=latent,
        experts=experts,
        **differences,
    )
