"""Command R7B and Command A: Command R with a window on three layers of four, which alone turn."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.models.architectures import cohere
from overlap_spec.models.config import (
    NO_ROPE,
    ModelConfig,
    alternating_windows,
    read_rope,
    whole,
)

ARCHITECTURE = "Cohere2ForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    windows = alternating_windows(
        {"sliding_window": 4096, **hf}, whole(hf, "sliding_window_pattern", 4)
    )
    return cohere.describe(
        hf,
        rope=replace(NO_ROPE, interleaved=True),
        local_rope=replace(read_rope(hf), interleaved=True),
        sliding_windows=windows,
    )
