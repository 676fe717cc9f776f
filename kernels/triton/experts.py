"""A mixture of experts as two products of all tokens with the weights of their experts."""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels.elementwise import silu_and_mul
from overlap_spec.kernels.experts import MANY, activate
from overlap_spec.kernels.triton.launch import launch, power_of_two, require_float
from overlap_spec.kernels.tuning import config


class _Sorted(NamedTuple):
    """Picks, a token's choices of an expert, by expert, int64: ``order``, and how many picks and
    blocks of them there are up to each expert."""

    order: Tensor
    row_ends: Tensor
    block_ends: Tensor


@triton.jit
def _grouped(
    x, weight, bias, order, row_ends, block_ends, out, each, columns, depth,
    x_row, w_expert, w_column, w_depth,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    number = tl.arange(0, SLOTS)
    ends = tl.load(block_ends + number, mask=number < EXPERTS, other=0)
    expert = tl.sum(((ends <= block) & (number < EXPERTS)).to(tl.int64), 0)
    # There are as many blocks as there could be at most.
    if expert < EXPERTS:
        later = expert > 0
        before = tl.load(block_ends + expert - 1, mask=later, other=0)
        first = tl.load(row_ends + expert - 1, mask=later, other=0)
        row = first + (block - before) * ROWS + tl.arange(0, ROWS)
        real = row < tl.load(row_ends + expert)
        pick = tl.load(order + row, mask=real, other=0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < columns
        source = x + (pick // each)[:, None] * x_row
        matrix = weight + expert * w_expert + column.to(tl.int64)[None, :] * w_column
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            at = start + tl.arange(0, DEPTH)
            rows = tl.load(
                source + at[None, :], mask=real[:, None] & (at < depth)[None, :], other=0.0
            )
            part = tl.load(
                matrix + at.to(tl.int64)[:, None] * w_depth,
                mask=(at < depth)[:, None] & inside[None, :],
                other=0.0,
            )
            total = tl.dot(rows, part, total, input_precision="ieee")
        if BIAS:
            added = tl.load(bias + expert * columns + column, mask=inside, other=0.0)
            total += added.to(tl.float32)[None, :]
        to = out + pick[:, None] * columns + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def mix_experts(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    limit: float | None,
) -> Tensor:
    """See :func:`overlap_spec.kernels.mix_experts`; sizes do not depend on the choice."""
    require_float("mix_experts", x, up, down)
    tokens, each = ids.shape
    experts, picks = up.shape[0], ids.numel()
    tuned = config("experts/many" if picks > MANY * experts else "experts", x.device)
    order = _sort(ids, experts, tuned["rows"])
    both = _products(x.contiguous(), up, up_bias, order, each, tuned)
    inner = silu_and_mul(both) if limit is None else activate(both, limit).contiguous()
    own = _products(inner, down, down_bias, order, 1, tuned)
    return (own.view(tokens, each, down.shape[1]) * shares[:, :, None]).sum(1)


def _sort(ids: Tensor, experts: int, rows: int) -> _Sorted:
    flat = ids.flatten()
    counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (counts + (rows - 1)) // rows
    return _Sorted(flat.sort(stable=True)[1], counts.cumsum(0), blocks.cumsum(0))


def _products(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: _Sorted, each: int, tuned: dict[str, int]
) -> Tensor:
    """Of every pick: its row, number ``pick // each`` of ``x``, with its expert's weight
    ``(N, K)``: ``(picks, N)``."""
    experts, columns, depth = weight.shape
    picks = len(order.order)
    out = x.new_empty(picks, columns)
    blocks = picks // tuned["rows"] + min(picks, experts)
    launch(
        _grouped, (blocks, -(-columns // tuned["columns"])),
        x, weight, out if bias is None else bias.contiguous(), *order, out, each, columns, depth,
        x.stride(0), *weight.stride(),
        EXPERTS=experts, SLOTS=power_of_two(experts), BIAS=bias is not None,
        ROWS=tuned["rows"], COLUMNS=tuned["columns"], DEPTH=tuned["depth"],
        num_warps=tuned["num_warps"], num_stages=tuned["num_stages"],
    )  # fmt: skip
    return out
