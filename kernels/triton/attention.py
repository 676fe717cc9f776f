"""Paged attention in one pass over the keys, which several programs may share (split-K).

The heads of a group and the queries of a request are rows of one tile, so that a key is read once
for all of them (as in FlashDecoding). Softmax runs online in float32 (arXiv 2205.14135), in base 2.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels.attention import USUAL, KeySpan, Scoring
from overlap_spec.kernels.triton import flash
from overlap_spec.kernels.triton.bits import pack_mask
from overlap_spec.kernels.triton.cache import move_kv, page_slots, rotate_and_store
from overlap_spec.kernels.triton.elementwise import soft_sign
from overlap_spec.kernels.triton.launch import launch, power_of_two, require_float
from overlap_spec.kernels.tuning import Config, config, multiprocessors

__all__ = [
    "move_kv", "pack_mask", "page_slots", "rotate_and_store", "tree_attention",
]  # fmt: skip

LOG2_E = math.log2(math.e)
# Rows (queries times heads of a group) beyond which a request takes the table of prefills.
LONG_ROWS = 64
# So many warps that each scheduler of a multiprocessor has one.
LEAST_WARPS = 4


@triton.jit
def _window_bits(words, offset, live, WORDS: tl.constexpr):
    """64 bits of each row's mask from window key ``offset`` on, which may lie outside of it.

    A gather of the bool mask instead would take more registers than there are.
    """
    # Of a block that starts in the prefix the bits belong further up.
    behind = tl.maximum(-offset, 0)
    offset = tl.maximum(offset, 0)
    word, shift = tl.where(live, offset // 64, WORDS), offset % 64
    low = tl.load(words + word, mask=word < WORDS, other=0)
    high = tl.load(words + word + 1, mask=word + 1 < WORDS, other=0)
    # Shifts are kept under 64, beyond which they mean nothing; those of negative numbers copy
    # the sign, which the mask takes away.
    keep = (tl.full((), 1, tl.int64) << (63 - shift)) - 1
    low = (low >> shift) & ((keep << 1) | 1)
    high = tl.where(shift == 0, 0, high << ((64 - shift) % 64))
    # 64 behind or more, no key of the block is the window's, and no bit is asked for.
    return (low | high) << (behind % 64)


@triton.jit(
    do_not_specialize=["queries", "pages_row", "width", "first", "window"],
    do_not_specialize_on_alignment=["pages", "prefix", "positions", "offsets"],
)
def _attend(
    q, k_cache, v_cache, pages, prefix, positions, mask, offsets, sinks, out, part, log_sum,
    queries, q_query, q_head, pages_row, width, first, window, key_slot, key_head, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, REST_SIZE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One tile of rows (query, head of the group) of one key head over one share of its keys.

    Of latents a key is its value, of DIM numbers, and REST more, which ``k_cache`` has.
    """
    head = tl.program_id(1) % HEADS
    split = tl.program_id(1) // HEADS
    request = tl.program_id(2).to(tl.int64)
    # The request's first query, and how many it has.
    begin = request * queries
    if RAGGED:
        begin = tl.load(offsets + request)
        queries = (tl.load(offsets + request + 1) - begin).to(tl.int32)
        if tl.program_id(0) * ROWS >= queries * GROUP:
            return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query, member = row // GROUP, row % GROUP
    live = query < queries
    column = tl.arange(0, SIZE)
    own = live[:, None] & (column < DIM)[None, :]
    q_row = query.to(tl.int64) * q_query + (head * GROUP + member) * q_head
    tile = tl.load(q + begin * q_query + q_row[:, None] + column[None, :], mask=own, other=0.0)
    if REST:
        later = tl.arange(0, REST_SIZE)
        rest = tl.load(
            q + begin * q_query + q_row[:, None] + (DIM + later)[None, :],
            mask=live[:, None] & (later < REST)[None, :], other=0.0,
        )  # fmt: skip
    start = tl.load(prefix + request).to(tl.int32)
    # Blocks from open_low to open_end are seen by every row as a whole.
    if TREE:
        end, open_end = start + width, start
    else:
        # The tile's first and last queries.
        earliest = tl.program_id(0) * ROWS // GROUP
        latest = (tl.program_id(0) * ROWS + ROWS - 1) // GROUP
        end, open_end = start + tl.minimum(queries, latest + 1), start + earliest + 1
    low, open_low = first, first
    if WINDOW:
        position = tl.load(positions + begin + query, mask=live, other=0).to(tl.int32)
        nearest = tl.min(tl.where(live, position, 2147483647), 0)
        low = tl.maximum(low, tl.minimum(nearest - window + 1, start))
        open_low = tl.maximum(low, tl.max(position, 0) - window + 1)
    low = low // KEYS * KEYS
    share = tl.maximum(tl.cdiv(tl.cdiv(end - low, KEYS), SPLITS), LEAST) * KEYS
    low = low + split * share
    high = tl.minimum(low + share, end)
    out_row = (begin + query) * (HEADS * GROUP) + head * GROUP + member
    part_row = out_row * SPLITS + split
    best = tl.full([ROWS], -float("inf"), tl.float32)
    if SPLITS > 1 and low >= end:
        tl.store(log_sum + part_row, best, live)
        return
    total = tl.zeros([ROWS], tl.float32)
    if SINK:
        # A key without a value, in the first share alone.
        sink = tl.load(sinks + head * GROUP + member, mask=live, other=0.0).to(tl.float32)
        best = tl.where(split == 0, sink * 1.4426950408889634, best)
        total = tl.where(split == 0, total + 1.0, total)
    mean = tl.zeros([ROWS, SIZE], tl.float32)
    pages += request * pages_row
    words = mask + begin * WORDS + query * WORDS
    if REST == 0:
        k_cache += head * key_head
    v_cache += head * key_head
    key = low + tl.arange(0, KEYS)
    # Pages are looked up a block ahead: a copy that waited for its address could not be under way
    # while the block before is computed.
    page = tl.load(pages + key // PAGE, mask=key < high, other=0)
    for block in tl.range(low, high, KEYS):
        key = block + tl.arange(0, KEYS)
        present = key < high
        place = page * PAGE + key % PAGE
        slot = place * key_slot
        page = tl.load(pages + (key + KEYS) // PAGE, mask=key + KEYS < high, other=0)
        inside = present[:, None] & (column < DIM)[None, :]
        if REST:
            values = tl.load(v_cache + slot[:, None] + column[None, :], mask=inside, other=0.0)
            turned = tl.load(
                k_cache + ((place * HEADS + head) * REST)[:, None] + later[None, :],
                mask=present[:, None] & (later < REST)[None, :], other=0.0,
            )  # fmt: skip
            score = tl.dot(tile, tl.trans(values), input_precision="ieee")
            score = tl.dot(rest, tl.trans(turned), score, input_precision="ieee") * scale
        else:
            keys = tl.load(k_cache + slot[:, None] + column[None, :], mask=inside, other=0.0)
            score = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale
        if CAP:
            # Of the scaled product over the cap; the cap brings its logarithm's base along.
            score = soft_sign(score) * cap
        if (block < open_low) | (block + KEYS > open_end):
            # Not every query sees every key of the block.
            offset = key - start
            if TREE:
                bits = _window_bits(words, block - start, live, WORDS)
                bit = (bits[:, None] >> tl.arange(0, KEYS)[None, :]) & 1
                seen = (bit != 0) | (offset < 0)[None, :]
            else:
                seen = offset[None, :] <= query[:, None]
            seen = seen & (present & (key >= first))[None, :]
            if WINDOW:
                near = key[None, :] > position[:, None] - window
                if TREE:
                    near = near | (offset >= 0)[None, :]
                seen = seen & near
            score = tl.where(seen, score, -float("inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        # A row that has seen nothing yet: any finite number stands in for its maximum.
        pivot = tl.where(new_best == -float("inf"), 0.0, new_best)
        weight = tl.exp2(score - pivot[:, None])
        fade = tl.exp2(best - pivot)
        if REST == 0:
            values = tl.load(v_cache + slot[:, None] + column[None, :], mask=inside, other=0.0)
        total = total * fade + tl.sum(weight, 1)
        mean = tl.dot(weight.to(values.dtype), values, mean * fade[:, None], input_precision="ieee")
        best = new_best
    # A share may hold nothing that a row sees: its maximum is then -inf, and so is its weight.
    total = tl.where(total == 0.0, 1.0, total)
    mean = mean / total[:, None]
    if SPLITS == 1:
        tl.store(out + out_row[:, None] * DIM + column[None, :], mean.to(out.dtype.element_ty), own)
    else:
        tl.store(part + part_row[:, None] * DIM + column[None, :], mean, own)
        tl.store(log_sum + part_row, best + tl.log2(total), live)


@triton.jit
def _merge(
    part, log_sum, out,
    DIM: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The mean of a row's shares, each by the weight of its keys."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PARTS)
    column = tl.arange(0, SIZE)
    exists = split < SPLITS
    weight = tl.load(log_sum + row * SPLITS + split, mask=exists, other=-float("inf"))
    best = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(best == -float("inf"), 0.0, best))
    # What holds no weight may never have been written.
    inside = (weight > 0.0)[:, None] & (column < DIM)[None, :]
    flat = (row * SPLITS + split)[:, None] * DIM + column[None, :]
    means = tl.load(part + flat, mask=inside, other=0.0)
    total = tl.sum(weight, 0)
    mean = tl.sum(means * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + column, mean.to(out.dtype.element_ty), mask=column < DIM)


def _shares(tuned: Config, programs: int, keys: int, device: torch.device) -> int:
    """Shares of at most ``keys`` keys: as many programs as fill the device, and no more, since a
    few that begin when all others end take as long as these did.

    A request of fewer keys has fewer shares: the kernel leaves those without work unwritten.
    """
    wanted = tuned["waves"] * multiprocessors(device) // programs
    most = max(1, min(wanted, keys // tuned["split_keys"], tuned["max_splits"]))
    # A number of shares is a kernel of its own: few of them.
    return 1 << (most.bit_length() - 1)


def _blocks(rows: int, chunks: bool, dim: int, dtype: torch.dtype, device: torch.device) -> Config:
    """The table's entry, with no more rows a program than there are; tensor cores want 16.

    Chunks have any number of rows, and one entry: each size would be a kernel of its own.
    """
    rows = max(rows, LONG_ROWS + 1) if chunks else rows
    kind = "prefill" if rows > LONG_ROWS else "decode"
    tuned = config(f"attention.{kind}/{8 * dtype.itemsize}bit/{dim}", device)
    own = min(tuned["rows"], max(16, power_of_two(rows)))
    warps = max(min(LEAST_WARPS, tuned["num_warps"]), tuned["num_warps"] * own // tuned["rows"])
    # A tree's bits are read 64 at a time.
    return tuned | {"rows": own, "keys": min(tuned["keys"], 64), "num_warps": warps}


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    span: KeySpan,
    window: int | None = None,
    scoring: Scoring = USUAL,
) -> Tensor:
    """See :func:`overlap_spec.kernels.tree_attention`; a query that sees no key gets zeros."""
    require_float("tree_attention", q, k_cache, v_cache)
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("tree_attention: the cache of a layer must be contiguous")
    total, heads, dim = q.shape[0], q.shape[1], v_cache.shape[3]
    rest = q.shape[2] - dim
    batch, page_size, kv_heads = span.pages.shape[0], k_cache.shape[1], k_cache.shape[2]
    group, device, size = heads // kv_heads, q.device, max(16, power_of_two(dim))
    ragged, tree = span.offsets is not None, span.mask is not None
    apart = not rest and flash.takes(q, span, window, scoring)
    if apart and not tree:
        return flash.attend(q, k_cache, v_cache, span, window, scoring)[0].flatten(1)
    queries = span.longest if ragged else total // batch
    width = span.mask.shape[1] if span.mask is not None else queries
    tuned = _blocks(queries * group, ragged and not tree, size, q.dtype, device)
    tiles = -(-queries * group // tuned["rows"])
    # Programs with something to do: each request leaves at most one tile in part empty.
    working = min(tiles * batch, total * group // tuned["rows"] + batch)
    pages, q = span.pages.contiguous(), q if q.stride(2) == 1 else q.contiguous()
    shares = _shares(tuned, working * kv_heads, pages.shape[1] * page_size, device)
    splits, least = shares, max(1, tuned["split_keys"] // tuned["keys"])
    if apart:
        # The tree's own keys, of which the first of two shares has all: of its prefix no key is
        # within a window of 1.
        window, shares, splits, least = 1, 1, 2, power_of_two(width // tuned["keys"] + 2)
    out = torch.empty(total, heads * dim, dtype=q.dtype, device=device)
    part, log_sum = out, out
    if splits > 1:
        part = torch.empty(total * heads, splits, dim, dtype=torch.float32, device=device)
        log_sum = torch.empty(part.shape[:2], dtype=torch.float32, device=device)
    scale, cap, sinks = scoring
    # Scores are taken in base 2; under a cap only once they have been bent.
    factor = (1 / math.sqrt(q.shape[2]) if scale is None else scale) * (1 / cap if cap else LOG2_E)
    launch(
        _attend, (tiles, kv_heads * shares, batch),
        q, k_cache, v_cache, pages, span.prefix.contiguous(), span.positions.contiguous(),
        span.packed if tree else pages,
        pages if span.offsets is None else span.offsets.contiguous(),
        out if sinks is None else sinks.contiguous(), out, part, log_sum,
        queries, *q.stride()[:2], pages.stride(0),
        width, span.first, window or 0, kv_heads * dim, dim, factor, (cap or 0.0) * LOG2_E,
        HEADS=kv_heads, GROUP=group, DIM=dim, REST=rest, PAGE=page_size, RAGGED=ragged,
        TREE=tree, WINDOW=window is not None, CAP=cap is not None, SINK=sinks is not None,
        SPLITS=splits, LEAST=least, ROWS=tuned["rows"],
        KEYS=tuned["keys"], SIZE=size, REST_SIZE=max(16, power_of_two(rest)), WORDS=-(-width // 64),
        num_warps=tuned["num_warps"], num_stages=tuned["num_stages"],
    )  # fmt: skip
    if apart:
        flash.join(part, log_sum, flash.attend(q, k_cache, v_cache, span, None, scoring), out)
    elif shares > 1:
        launch(
            _merge, (total * heads,), part, log_sum, out,
            DIM=dim, SPLITS=shares, PARTS=power_of_two(shares), SIZE=size, num_warps=4,
        )  # fmt: skip
    return out
