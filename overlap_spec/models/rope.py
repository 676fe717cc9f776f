"""Rotary position embedding (RoFormer, arXiv 2104.09864) and its scaling rules."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import RopeConfig, yarn_scale


def rotary_dim(rope: RopeConfig, head_dim: int) -> int:
    """How many of a head's channels turn; the others stay."""
    return int(head_dim * rope.share)


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, positions: int | None = None
) -> tuple[Tensor, float]:
    """Rotation speed of each pair of channels that turn, and the factor on cos and sin.

    Args:
        positions: How many are served, which LongRoPE asks; None: no more than it was trained on.

    Returns:
        float32 ``(rotary_dim / 2,)`` on the CPU, in radians a position; and the attention factor of
        YaRN and LongRoPE (1.0 for all other rules).

    Raises:
        CheckpointError: a scaling rule that is not known, or factors of another length.
    """
    head_dim = rotary_dim(rope, head_dim)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    base = 1.0 / (rope.theta**exponent)
    scaling = dict(rope.scaling)
    if rope.kind == "none":
        return torch.zeros_like(base), 1.0
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
    if rope.kind == "longrope":
        return _longrope(rope, base, scaling, positions)
    raise CheckpointError(f"rope_type {rope.kind!r} is not supported")


def trained_length(rope: RopeConfig) -> int | None:
    """Context in tokens up to which LongRoPE's first list holds; None for other rules."""
    original = dict(rope.scaling).get("original_max_position_embeddings")
    return int(original) if rope.kind == "longrope" and original else None


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

    attention = scaling.get("attention_factor")
    if attention is None:
        more, less = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = yarn_scale(factor, more if more and less else 1.0)
        if more and less:
            attention /= yarn_scale(factor, less)
    return frequencies, attention


def _longrope(
    rope: RopeConfig, base: Tensor, scaling: dict[str, float], positions: int | None
) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): each pair slowed by its own factor.

    The second list is for texts that outgrow the original context. Cached keys cannot change
    theirs, so that the longest context to be served decides.
    """
    original = scaling["original_max_position_embeddings"]
    factors = torch.tensor(rope.factors[(positions or 0) > original])
    if factors.shape != base.shape:
        raise CheckpointError(
            f"config.json: short_factor and long_factor must have {len(base)} numbers, one a pair "
            f"of rotated channels: {len(factors)}"
        )
    attention, factor = scaling.get("attention_factor"), scaling["factor"]
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return base / factors, attention


def channel_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """The file's channels of a query's or key's head in the order in which they are kept here.

    A rotation turns the two halves of a whole head against each other. Where only the first
    ``rotary_dim`` channels turn, their second half is moved to the head's, and of channels that
    turn in pairs the second ones; products of queries and keys do not depend on the order.

    Returns:
        int64 ``(head_dim,)`` on the CPU, or None: the file's own order.
    """
    turning = rotary_dim(rope, head_dim)
    if turning == head_dim and not rope.interleaved:
        return None
    order = torch.arange(head_dim, device="cpu")
    both, rest = order.split([turning, head_dim - turning])
    first, second = (both[::2], both[1::2]) if rope.interleaved else both.chunk(2)
    near = head_dim // 2 - turning // 2
    return torch.cat([first, rest[:near], second, rest[near:]])


def rope_table(rope: RopeConfig, head_dim: int, positions: int) -> Tensor:
    """Cosines and signed sines of every position.

    Returns:
        float32 ``(positions, 2, head_dim)`` on the CPU: ``[:, 0]`` cos, ``[:, 1]`` sin with its
        first half negated, so that a rotation is ``x * cos + roll(x, head_dim / 2) * sin``. Without
        values where torch's default device is meta, as a module has none there.
    """
    if torch.get_default_device().type == "meta":
        return torch.empty(positions, 2, head_dim)
    frequencies, factor = inverse_frequencies(rope, head_dim, positions)
    angles = torch.arange(positions, dtype=torch.float32, device="cpu")[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    # Channels that stay: see channel_order().
    rest = head_dim // 2 - len(frequencies)
    cos, sin = F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
