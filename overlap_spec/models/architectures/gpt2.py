"""GPT-2: learned positions, layer norms and biases, an MLP without gates, matrices transposed."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import NO_ROPE, Layout, ModelConfig, llama_family, number, whole

ARCHITECTURE = "GPT2LMHeadModel"
LAYOUT = Layout(
    names=(
        ("model", "transformer"),
        ("embed_tokens", "wte"),
        ("embed_positions", "wpe.weight"),
        ("layers", "h"),
        ("norm", "ln_f"),
        ("input_layernorm", "ln_1"),
        ("self_attn", "attn"),
        ("qkv_proj", "c_attn"),
        ("o_proj", "c_proj"),
        ("post_attention_layernorm", "ln_2"),
        ("up_proj", "c_fc"),
        ("down_proj", "c_proj"),
    ),
    fused=("qkv_proj",),
    transposed=True,
    # Masks, which early files hold.
    ignored=(".attn.bias", ".attn.masked_bias"),
)


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if hf.get(name):
            raise CheckpointError(f"config.json: {name} is not supported")
    hidden, positions = whole(hf, "n_embd"), whole(hf, "n_positions")
    heads = whole(hf, "n_head")
    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": whole(hf, "n_layer"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": positions,
        "intermediate_size": whole(hf, "n_inner", 4 * hidden),
        "hidden_act": hf.get("activation_function") or "gelu_new",
    }
    return llama_family(
        {"tie_word_embeddings": True, **hf, **shape},
        rms_norm_eps=number("layer_norm_epsilon", hf.get("layer_norm_epsilon"), 1e-5, 1.0),
        rope=NO_ROPE,
        learned_positions=positions,
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        query_scale=None if hf.get("scale_attn_weights", True) else 1.0,
        layout=LAYOUT,
    )
