"""Qwen3.5 with a vision tower, as published, of which the text model is read."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.architectures import qwen3_5
from overlap_spec.models.config import ModelConfig

ARCHITECTURE = "Qwen3_5ForConditionalGeneration"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    return qwen3_5.describe(qwen3_5.text_of(hf), beside_vision=True)
