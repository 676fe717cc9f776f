"""Gemma 3 with a vision tower (4B and up), of which the text model is read."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.architectures import gemma3
from overlap_spec.models.config import ModelConfig, field

ARCHITECTURE = "Gemma3ForConditionalGeneration"
# What published files leave out, as `transformers` fills it in.
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    text = field(hf, "text_config")
    own = {name: value for name, value in text.items() if value is not None}
    names = {"architectures": hf["architectures"]}
    return gemma3.describe({**DEFAULTS, **own, **names}, beside_vision=True)
