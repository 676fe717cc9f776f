"""Writes into the paged cache: new keys and values, rotated or not, and the accepted path."""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels.triton.elementwise import normed, rotated
from overlap_spec.kernels.triton.launch import launch, power_of_two, require_float
from overlap_spec.kernels.tuning import config


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=["rows"])
def _rotate_and_store(
    qkv, rotary, weight, k_cache, v_cache, slots, out, rows, token_stride, head_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)[None, :]
    alive = row < rows
    inside = alive[:, None] & (column < DIM)
    token, head = (row // (HEADS + 2 * KV_HEADS)).to(tl.int64), row % (HEADS + 2 * KV_HEADS)
    source = (token * token_stride + head * head_stride)[:, None]
    turned = inside & (head < HEADS + KV_HEADS)[:, None]
    partner_column = (column + DIM // 2) % DIM
    raw = tl.load(qkv + source + column, mask=inside, other=0.0)
    partner = tl.load(qkv + source + partner_column, mask=turned, other=0.0)
    value = raw
    if NORM:
        own = head[:, None] * DIM
        factor = tl.load(weight + own + column, mask=turned, other=0.0)
        partner_factor = tl.load(weight + own + partner_column, mask=turned, other=0.0)
        value = normed(value, factor, eps, DIM, inside)
        partner = normed(partner, partner_factor, eps, DIM, inside)
    angle = (token * (2 * DIM))[:, None] + column
    cos = tl.load(rotary + angle, mask=turned, other=0.0)
    sin = tl.load(rotary + angle + DIM, mask=turned, other=0.0)
    value = rotated(value, partner, cos, sin)
    slot = tl.load(slots + token, mask=alive, other=0)
    kv_head = head - HEADS
    is_query = inside & (kv_head < 0)[:, None]
    is_key = turned & (kv_head >= 0)[:, None]
    is_value = inside & (kv_head >= KV_HEADS)[:, None]
    key_place = ((slot * KV_HEADS + kv_head) * DIM)[:, None] + column
    tl.store(out + ((token * HEADS + head) * DIM)[:, None] + column, value, mask=is_query)
    tl.store(k_cache + key_place, value, mask=is_key)
    tl.store(v_cache + key_place - KV_HEADS * DIM, raw, mask=is_value)


def rotate_and_store(
    qkv: Tensor,
    rotary: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """See :func:`overlap_spec.kernels.rotate_and_store`."""
    require_float("rotate_and_store", qkv, rotary, k_cache)
    tokens, total, dim = qkv.shape
    kv_heads = k_cache.shape[2]
    heads = total - 2 * kv_heads
    qkv = _dense_rows(qkv)
    out = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    weight, eps = norm if norm is not None else (rotary, 0.0)
    tuned = config("rope", qkv.device)
    width = power_of_two(dim)
    tile = max(1, tuned["elements"] // width)
    launch(
        _rotate_and_store, (-(-tokens * total // tile),),
        qkv, rotary.contiguous(), weight.contiguous(), k_cache, v_cache, slots.contiguous(), out,
        tokens * total, qkv.stride(0), qkv.stride(1), eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, NORM=norm is not None,
        ROWS=tile, SIZE=width, num_warps=tuned["num_warps"],
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count", "width", "pages_row", "logical_row", "logical_column"])
def _page_slots(pages, logical, out, count, width, pages_row, logical_row, logical_column,
                PAGE: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    request, column = (index // width).to(tl.int64), index % width
    key = tl.load(logical + request * logical_row + column * logical_column, mask=inside, other=0)
    page = tl.load(pages + request * pages_row + key // PAGE, mask=inside, other=0)
    tl.store(out + index, page * PAGE + key % PAGE, mask=inside)


def page_slots(pages: Tensor, logical: Tensor, page_size: int) -> Tensor:
    """See :func:`overlap_spec.kernels.page_slots`."""
    out = torch.empty(logical.shape, dtype=torch.int64, device=pages.device)
    launch(
        _page_slots, (-(-out.numel() // 128),),
        pages, logical, out, out.numel(), out.shape[1],
        pages.stride(0), *logical.stride(), PAGE=page_size, SIZE=128, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _move_kv(
    k_cache, v_cache, source, target, width, k_layer, v_layer, k_size, v_size,
    WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """All slots of one request's path: a piece of each key and value, in one layer."""
    blocks = tl.cdiv(tl.maximum(k_size, v_size), SIZE)
    layer = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * SIZE + tl.arange(0, SIZE)
    step = tl.arange(0, WIDTH)
    alive = step < width
    is_key = alive[:, None] & (column < k_size)[None, :]
    is_value = alive[:, None] & (column < v_size)[None, :]
    path = tl.program_id(1).to(tl.int64) * width + step
    come = tl.load(source + path, mask=alive, other=0)[:, None]
    go = tl.load(target + path, mask=alive, other=0)[:, None]
    k_cache += layer * k_layer + column[None, :]
    v_cache += layer * v_layer + column[None, :]
    key = tl.load(k_cache + come * k_size, mask=is_key)
    value = tl.load(v_cache + come * v_size, mask=is_value)
    # A target may be another thread's source: all must have read before any writes.
    tl.debug_barrier()
    tl.store(k_cache + go * k_size, key, mask=is_key)
    tl.store(v_cache + go * v_size, value, mask=is_value)


def move_kv(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """See :func:`overlap_spec.kernels.move_kv`."""
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("move_kv: the caches must be contiguous")
    batch, width = source.shape
    layers, sizes = k_cache.shape[0], [k_cache[0, 0, 0].numel(), v_cache[0, 0, 0].numel()]
    rows = power_of_two(width)
    tuned = config("move_kv", k_cache.device)
    size = min(max(16, tuned["elements"] // rows), power_of_two(max(sizes)))
    launch(
        _move_kv, (layers * -(-max(sizes) // size), batch),
        k_cache, v_cache, source.contiguous(), target.contiguous(), width,
        k_cache.stride(0), v_cache.stride(0), *sizes,
        WIDTH=rows, SIZE=size, num_warps=tuned["num_warps"],
    )  # fmt: skip
