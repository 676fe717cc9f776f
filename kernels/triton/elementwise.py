"""Norm, rotation and activation: one read and one write of each element."""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels.triton.launch import launch, power_of_two, require_float
from overlap_spec.kernels.tuning import config


@triton.jit
def normed(x, weight, eps, size, INSIDE):
    """Rows ``x`` in float32 over their root mean square, rounded as the reference does."""
    wide = x.to(tl.float32)
    wide = tl.where(INSIDE, wide, 0.0)
    mean = tl.sum(wide * wide, 1) / size
    wide = wide * tl.rsqrt(mean + eps)[:, None]
    return (wide.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, residual, weight, out, total, rows, x_outer, x_inner, size, eps,
    INNER: tl.constexpr, WEIGHT_ROWS: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    wide_row = row.to(tl.int64)
    source = (wide_row // INNER) * x_outer + (wide_row % INNER) * x_inner
    value = tl.load(x + source[:, None] + column[None, :], mask=inside, other=0.0)
    flat = wide_row[:, None] * size + column[None, :]
    if ADD:
        other = tl.load(residual + flat, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + flat, value, mask=inside)
    factor_row = row % WEIGHT_ROWS
    factor = tl.load(weight + factor_row[:, None] * size + column[None, :], mask=inside, other=0.0)
    tl.store(out + flat, normed(value, factor, eps, size, inside), mask=inside)


def _norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor
) -> None:
    require_float("rms_norm", x, weight)
    size = x.shape[-1]
    if x.dim() != 3 or x.stride(2) != 1:
        x = x.reshape(-1, 1, size)
    rows, inner = x.shape[0] * x.shape[1], x.shape[1]
    weight_rows = weight.shape[0] if weight.dim() == 2 else 1
    if weight_rows not in (1, inner):
        raise ValueError(f"rms_norm: {weight_rows} rows of weights for {inner} rows of x")
    tuned = config("rms_norm", x.device)
    width = power_of_two(size)
    tile = max(1, tuned["elements"] // width)
    launch(
        _rms_norm, (-(-rows // tile),),
        x, residual, weight.contiguous(), out, total, rows, x.stride(0), x.stride(1), size, eps,
        INNER=inner, WEIGHT_ROWS=weight_rows, ADD=residual is not None, ROWS=tile, SIZE=width,
        num_warps=tuned["num_warps"],
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`overlap_spec.kernels.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm_rows(x, None, weight, eps, out, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`overlap_spec.kernels.add_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _norm_rows(x, residual.contiguous(), weight, eps, out, total)
    return out, total


@triton.jit
def rotated(x, partner, cos, sin):
    """``x * cos + partner * sin``, rounded as the reference does."""
    first = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)
    return (first + partner.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def _apply_rope(
    x, rotary, out, rows, x_token, x_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    inside = (row < rows)[:, None] & (column < DIM)[None, :]
    token = (row // HEADS).to(tl.int64)
    source = (token * x_token + (row % HEADS) * x_head)[:, None]
    partner = (column + DIM // 2) % DIM
    angle = (token * (2 * DIM))[:, None] + column[None, :]
    value = rotated(
        tl.load(x + source + column[None, :], mask=inside, other=0.0),
        tl.load(x + source + partner[None, :], mask=inside, other=0.0),
        tl.load(rotary + angle, mask=inside, other=0.0),
        tl.load(rotary + angle + DIM, mask=inside, other=0.0),
    )
    tl.store(out + row.to(tl.int64)[:, None] * DIM + column[None, :], value, mask=inside)


def apply_rope(x: Tensor, rotary: Tensor) -> Tensor:
    """See :func:`overlap_spec.kernels.apply_rope`."""
    require_float("apply_rope", x, rotary)
    tokens, heads, dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tuned = config("rope", x.device)
    width = power_of_two(dim)
    tile = max(1, tuned["elements"] // width)
    launch(
        _apply_rope, (-(-tokens * heads // tile),),
        x, rotary.contiguous(), out, tokens * heads, x.stride(0), x.stride(1),
        HEADS=heads, DIM=dim, ROWS=tile, SIZE=width, num_warps=tuned["num_warps"],
    )  # fmt: skip
    return out


@triton.jit
def soft_sign(x):
    """tanh in float32, of its exponential alone: Triton's interpreter has no other."""
    fall = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - fall) / (1.0 + fall)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _activate_and_mul(x, out, x_row, size, GELU: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < size
    gate = tl.load(x + row * x_row + column, mask=inside, other=0.0)
    up = tl.load(x + row * x_row + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if GELU:
        # sqrt(2 / pi) and the cubic's weight, as in the reference.
        bent = soft_sign(0.7978845608028654 * (wide + 0.044715 * wide * wide * wide))
        activated = 0.5 * wide * (1.0 + bent)
    else:
        activated = wide / (1.0 + tl.exp(-wide))
    activated = activated.to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + column, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """See :func:`overlap_spec.kernels.silu_and_mul`."""
    return _activated(x, "silu_and_mul", False)


def gelu_and_mul(x: Tensor) -> Tensor:
    """See :func:`overlap_spec.kernels.gelu_and_mul`."""
    return _activated(x, "gelu_and_mul", True)


def _activated(x: Tensor, name: str, gelu: bool) -> Tensor:
    require_float(name, x)
    size = x.shape[-1] // 2
    flat = x.reshape(-1, 2 * size)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    tuned = config("silu_and_mul", x.device)
    launch(
        _activate_and_mul, (flat.shape[0], -(-size // tuned["block"])),
        flat, out, flat.stride(0), size, GELU=gelu,
        SIZE=tuned["block"], num_warps=tuned["num_warps"],
    )  # fmt: skip
    return out
