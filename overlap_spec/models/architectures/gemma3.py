"""Gemma 3, the text model: Gemma 2 with normed heads, and windows on five layers of six that rotate
by a frequency of their own."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.architectures.gemma2 import gemma
from overlap_spec.models.config import (
    ModelConfig,
    RopeConfig,
    alternating_windows,
    read_rope,
    whole,
)

ARCHITECTURE = "Gemma3ForCausalLM"


def read_ropes(hf: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Rotations of layers without and with a window, in the older or newer spelling."""
    both = hf.get("rope_parameters") or {}
    if both and not isinstance(both.get("full_attention"), dict):
        raise CheckpointError("config.json: rope_parameters has no full_attention")
    plain = {k: v for k, v in hf.items() if k not in ("rope_parameters", "rope_scaling")}
    far = {**plain, "rope_theta": hf.get("rope_theta") or 1e6}
    near = {**plain, "rope_theta": hf.get("rope_local_base_freq") or 1e4}
    scaling = both.get("full_attention") or hf.get("rope_scaling")
    return (
        read_rope({**far, "rope_parameters": scaling}),
        read_rope({**near, "rope_parameters": both.get("sliding_attention")}),
    )


def describe(hf: Mapping[str, Any], **differences: Any) -> ModelConfig:
    if hf.get("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is for encoders, not here")
    rope, local = read_ropes(hf)
    windows = alternating_windows(hf, whole(hf, "sliding_window_pattern", 6))
    return gemma(
        hf, qk_norm=True, rope=rope, local_rope=local, sliding_windows=windows, **differences
    )
