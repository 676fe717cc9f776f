"""Qwen3.5, the text model: Qwen3-Next with an MLP in each layer, and products cut in the file."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.architectures.qwen3_next import hybrid
from overlap_spec.models.config import ModelConfig, field

ARCHITECTURE = "Qwen3_5ForCausalLM"


def text_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the text model in a file of one that sees, too."""
    text = {**field(hf, "text_config"), "architectures": hf["architectures"]}
    tied = text.get("tie_word_embeddings")
    return {**text, "tie_word_embeddings": hf.get("tie_word_embeddings") if tied is None else tied}


def describe(hf: Mapping[str, Any], **differences: Any) -> ModelConfig:
    # Places in pictures turn by several numbers, which in texts are all the same.
    ropes = hf.get("rope_parameters") or {}
    plain = {name: value for name, value in ropes.items() if not name.startswith("mrope")}
    return hybrid({**hf, "rope_parameters": plain}, **differences)
