"""Norm, rotation and activation of the decoder's layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels.dispatch import operation


@operation
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, summed in float32.

    ``x (..., D)`` any float type; ``weight (D,)`` or broadcastable rows ``(R, D)``, of x's type or
    in float32, which the product is then made in; the result has x's type.
    """
    if weight.dim() == 1 and x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out = wide.to(weight.dtype) * weight
    # A recording would keep even a conversion that does nothing.
    return out if out.dtype == x.dtype else out.to(x.dtype)


@operation
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm` of ``x + residual``, and that sum.

    ``x, residual (..., D)``, ``weight (D,)`` → two tensors ``(..., D)``.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total


@operation
def apply_rope(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other.

    ``x (T, heads, D)``; ``rotary (T, 2, D)``: cosines, and sines with the first half negated.
    Returns ``(T, heads, D)``: ``x * cos + roll(x, D / 2) * sin``.
    """
    cos, sin = rotary[:, 0, None], rotary[:, 1, None]
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@operation
def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x (..., 2 * I)`` with the gate in its first half → ``(..., I)``."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@operation
def gelu_and_mul(x: Tensor) -> Tensor:
    """``gelu(gate) * up`` of ``x (..., 2 * I)`` with the gate in its first half → ``(..., I)``.

    GELU (arXiv 1606.08415) by its approximation with tanh.
    """
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
