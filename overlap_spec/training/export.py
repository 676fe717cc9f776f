"""Checkpoints in the Hugging Face layout, bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.eagle import EagleHead
from overlap_spec.models.eagle3 import Eagle3Head
from overlap_spec.models.parallel_eagle import ParallelConfig
from overlap_spec.models.weights import export_state


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


def write_json(path: Path, data: dict[str, Any]) -> None:
    """A file of indented JSON."""
    path.write_text(json.dumps(data, indent=2) + "\n")


def write_checkpoint(
    out: Path, module: torch.nn.Module, architecture: str, shape: ModelConfig, **others: Any
) -> None:
    """Write ``config.json``, with ``others`` behind the shape, and ``model.safetensors``."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", {"architectures": [architecture], **_shape(shape), **others})
    state = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in export_state(module).items()
    }
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def export_head(head: EagleHead | Eagle3Head, out: Path) -> None:
    """Write the draft head's checkpoint in its published layout."""
    if isinstance(head, EagleHead):
        shape = head.config
        write_checkpoint(out, head, "LlamaForCausalLMEagle", shape, tie_word_embeddings=False)
        return
    config, parallel = head.config, {}
    assert config.feature_layers is not None
    if isinstance(config, ParallelConfig):
        parallel = {"parallel_drafting": True, "ptd_token_id": config.mask_token}
    write_checkpoint(
        out,
        head,
        "LlamaForCausalLMEagle3",
        config.layer,
        draft_vocab_size=config.draft_vocab_size,
        target_hidden_size=config.target_hidden_size,
        # An id names the state after that layer, the input of the next.
        eagle_aux_hidden_state_layer_ids=[i - 1 for i in config.feature_layers],
        tie_word_embeddings=False,
        **parallel,
    )
