"""StarCoder2: layer norms and biases, an MLP without gates, a window."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import Layout, ModelConfig, llama_family, number, whole

ARCHITECTURE = "Starcoder2ForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    bias = bool(hf.get("use_bias", True))
    return llama_family(
        {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, **hf},
        rms_norm_eps=number("norm_epsilon", hf.get("norm_epsilon"), 1e-5, 1.0),
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        sliding_windows=(hf.get("sliding_window"),) * whole(hf, "num_hidden_layers"),
        layout=Layout(names=(("up_proj", "c_fc"), ("down_proj", "c_proj"))),
    )
