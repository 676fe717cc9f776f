"""Norm and activation on the CPU: see :mod:`overlap_spec.kernels.elementwise`."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.kernels import elementwise
from overlap_spec.kernels.dispatch import reference_of

ops = torch.ops.overlap_spec


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = ops.rms_norm(x, weight, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.dtype != residual.dtype:
        # Under autocast.
        return reference_of(elementwise.add_rms_norm)(x, residual, weight, eps)
    normed, total = ops.add_rms_norm(x, residual, weight, eps)
    return normed, total


def silu_and_mul(x: Tensor) -> Tensor:
    product: Tensor = ops.silu_and_mul(x)
    return product


def gelu_and_mul(x: Tensor) -> Tensor:
    product: Tensor = ops.gelu_and_mul(x)
    return product
