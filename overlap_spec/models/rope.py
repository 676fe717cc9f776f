"""Rotary position embedding (RoFormer, arXiv 2104.09864) and its scaling rules."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Rotation speed of each pair of channels, and the factor on cos and sin.

    Returns:
        float32 ``(head_dim / 2,)`` on the CPU, in radians a position; and YaRN's attention
        factor (1.0 for all other rules).

    Raises:
        CheckpointError: a scaling rule that is not known.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    base = 1.0 / (rope.theta**exponent)
    scaling = dict(rope.scaling)
    if rope.kind in ("default", "dynamic"):
        # Dynamic NTK turns all frequencies once the sequence outgrows the original context,
        # which cached keys cannot follow: rope_limit() keeps the context within it.
        return base, 1.0
    if rope.kind == "linear":
        return base / scaling["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(base, scaling), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope.theta, head_dim, scaling)
    raise CheckpointError(f"rope_type {rope.kind!r} is not supported")


def rope_limit(rope: RopeConfig) -> int | None:
    """Longest context in tokens that the rule can serve with cached keys, or None."""
    limit = dict(rope.scaling).get("original_max_position_embeddings")
    return int(limit) if rope.kind == "dynamic" and limit else None


def _llama3(base: Tensor, scaling: dict[str, float]) -> Tensor:
    """Llama 3.1: slow channels are slowed by ``factor``, fast ones kept, a ramp between."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * base / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return base * keep + base / factor * (1 - keep)


def _yarn(
    base: Tensor, theta: float, head_dim: int, scaling: dict[str, float]
) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate by wavelength, and scale attention."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = channel(scaling.get("beta_fast", 32.0))
    high = channel(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = base * (1 - ramp) + base / factor * ramp

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        both = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = mscale(both[0]) / mscale(both[1]) if both[0] and both[1] else mscale(1.0)
    return frequencies, attention


def rope_table(rope: RopeConfig, head_dim: int, positions: int) -> Tensor:
    """Cosines and signed sines of every position.

    Returns:
        float32 ``(positions, 2, head_dim)`` on the CPU: ``[:, 0]`` cos, ``[:, 1]`` sin with its
        first half negated, so that a rotation is ``x * cos + roll(x, head_dim / 2) * sin``. Without
        values where torch's default device is meta, as a module has none there.
    """
    if torch.get_default_device().type == "meta":
        return torch.empty(positions, 2, head_dim)
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(positions, dtype=torch.float32, device="cpu")[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
