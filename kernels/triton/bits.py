"""Masks as bits: a row of a tree's mask fits in a register."""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels.triton.launch import launch


@triton.jit(do_not_specialize=["rows"])
def _pack_mask(mask, out, rows, width, WORDS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bit = tl.arange(0, 64)
    column = tl.program_id(1) * 64 + bit
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(mask + place, mask=inside, other=0).to(tl.int64)
    word = tl.sum(value << bit.to(tl.int64)[None, :], 1)
    tl.store(out + row.to(tl.int64) * WORDS + tl.program_id(1), word, mask=row < rows)


def pack_mask(mask: Tensor) -> Tensor:
    """See :func:`overlap_spec.kernels.pack_mask`."""
    width = mask.shape[-1]
    words = -(-width // 64)
    rows = mask.numel() // width
    out = torch.empty(*mask.shape[:-1], words, dtype=torch.int64, device=mask.device)
    launch(
        _pack_mask, (-(-rows // 16), words),
        mask.contiguous().view(torch.uint8), out, rows, width, WORDS=words, ROWS=16, num_warps=4,
    )  # fmt: skip
    return out
