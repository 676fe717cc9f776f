"""Qwen3.5's mixtures of experts with a vision tower, as published, of which the text model is
read."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.architectures import qwen3_5, qwen3_5_moe
from overlap_spec.models.config import ModelConfig

ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    return qwen3_5_moe.describe(qwen3_5.text_of(hf), beside_vision=True)
