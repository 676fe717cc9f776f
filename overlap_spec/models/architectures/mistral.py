"""Mistral: Llama with a sliding window in its first version."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.config import ModelConfig, llama_family

ARCHITECTURE = "MistralForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    window = hf.get("sliding_window")
    return llama_family(hf, sliding_windows=(window,) * int(hf["num_hidden_layers"]))
