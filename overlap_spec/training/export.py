"""Checkpoints in the Hugging Face layout, bfloat16: the target's and the draft head's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.eagle3 import Eagle3Head
from overlap_spec.models.weights import export_state
from overlap_spec.training.data import BOS, END, PAD
from overlap_spec.training.tokenizer import save_tokenizer, special_id


def _shape(config: ModelConfig) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    if config.rope.kind != "default":
        shape["rope_scaling"] = {"rope_type": config.rope.kind, **dict(config.rope.scaling)}
    return shape


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def _write_weights(module: torch.nn.Module, path: Path) -> None:
    state = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in export_state(module).items()
    }
    save_file(state, path, metadata={"format": "pt"})
    path.chmod(0o644)


def export_target(model: Decoder, tokenizer: Tokenizer, out: Path) -> None:
    """Write the target's checkpoint: weights, configs, tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    ids = {name: special_id(tokenizer, name) for name in (BOS, END, PAD)}
    special = {"bos_token_id": ids[BOS], "eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    _write_json(
        out / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            **_shape(model.config),
            "tie_word_embeddings": model.config.tie_embeddings,
            **special,
        },
    )
    _write_json(out / "generation_config.json", {"do_sample": False, **special})
    save_tokenizer(tokenizer, out, model.config.max_position)
    _write_weights(model, out / "model.safetensors")


def export_head(head: Eagle3Head, out: Path) -> None:
    """Write the draft head's checkpoint in the published EAGLE-3 layout."""
    out.mkdir(parents=True, exist_ok=True)
    config = head.config
    assert config.feature_layers is not None
    _write_json(
        out / "config.json",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            **_shape(config.layer),
            "num_hidden_layers": 1,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            # An id names the state after that layer, the input of the next.
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.feature_layers],
            "tie_word_embeddings": False,
        },
    )
    _write_weights(head, out / "model.safetensors")
