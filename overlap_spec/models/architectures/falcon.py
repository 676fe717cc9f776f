"""Falcon (7B, 40B, 180B, Falcon 2): few heads of keys in one matrix with their queries, an MLP
without gates beside the attention."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import Layout, ModelConfig, llama_family, number, whole

ARCHITECTURE = "FalconForCausalLM"
NAMES = (
    ("model", "transformer"),
    ("embed_tokens", "word_embeddings"),
    ("layers", "h"),
    ("norm", "ln_f"),
    ("self_attn", "self_attention"),
    ("qkv_proj", "query_key_value"),
    ("o_proj", "dense"),
    ("up_proj", "dense_h_to_4h"),
    ("down_proj", "dense_4h_to_h"),
)
TWO_NORMS = (("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp"))


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("alibi"):
        raise CheckpointError("config.json: alibi (Falcon-RW's bias of scores) is not supported")
    heads, hidden = whole(hf, "num_attention_heads"), whole(hf, "hidden_size")
    is_new = bool(hf.get("new_decoder_architecture", False))
    is_parallel = is_new or bool(hf.get("parallel_attn", True))
    norms = (hf.get("num_ln_in_parallel_attn") or 2) if is_new else int(is_parallel)
    if norms not in (0, 1, 2):
        raise CheckpointError(f"config.json: num_ln_in_parallel_attn must be 1 or 2: {norms}")
    has_one_key = not is_new and bool(hf.get("multi_query", True))
    bias = bool(hf.get("bias", False))
    shape = {
        "hidden_act": hf.get("activation") or "gelu",
        "intermediate_size": whole(hf, "ffn_hidden_size", 4 * hidden),
        "num_key_value_heads": 1 if has_one_key else whole(hf, "num_kv_heads", heads),
        "max_position_embeddings": whole(hf, "max_position_embeddings", 2048),
    }
    return llama_family(
        {"tie_word_embeddings": True, **hf, **shape},
        rms_norm_eps=number("layer_norm_epsilon", hf.get("layer_norm_epsilon"), 1e-5, 1.0),
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        parallel_norms=norms,
        layout=Layout(
            names=NAMES + (TWO_NORMS if norms == 2 else ()), fused=("qkv_proj",), grouped=True
        ),
    )
