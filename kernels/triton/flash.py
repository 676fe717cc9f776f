"""Attention by FlashAttention-3 (arXiv 2407.08608), where it is installed and chosen.

It has no mask of trees. So a chunk's attention is its own, causal; of a tree it takes the prefix,
which all nodes see, this project's kernel takes the tree's own keys, and the two are joined by the
logarithms of their weights' sums. Lengths stay on the device (``cache_seqlens``), as capture asks.

Left to the other kernel are float32, latents, draft caches, whose slot 0 does not exist, and trees
in a sliding window: what a node sees of its prefix depends on its depth there.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import importlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels.attention import KeySpan, Scoring
from overlap_spec.kernels.dispatch import FLASH, wants_flash
from overlap_spec.kernels.triton.launch import launch

HALF = (torch.float16, torch.bfloat16)


def takes(q: Tensor, span: KeySpan, window: int | None, scoring: Scoring) -> bool:
    """Whether FlashAttention-3 is chosen, and can do this: a chunk, or the prefix of a tree.

    A chunk has no other scores to be joined with, where a sink's would go.
    """
    alone = window is None if span.mask is not None else scoring.sinks is None
    return wants_flash() and q.dtype in HALF and span.first == 0 and alone


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, span: KeySpan, window: int | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """A chunk's attention, or that of a tree's nodes over their prefix.

    Args:
        q: ``(T, heads, D)``; all as in :func:`overlap_spec.kernels.tree_attention`.

    Returns:
        Means ``(T, heads, D)`` in the type of q; natural logarithms of the weights' sums, float32
        ``(B, heads, T / B)``, or ``(heads, T)`` of ragged queries: -inf where no key was seen.
    """
    pages, prefix, ends, offsets = span.as_int32
    tree, ragged = span.mask is not None, offsets is not None
    with_kvcache: Any = importlib.import_module(FLASH).flash_attn_with_kvcache
    found = with_kvcache(
        q if ragged else q.unflatten(0, (pages.shape[0], -1)),
        k_cache,
        v_cache,
        page_table=pages,
        cache_seqlens=prefix if tree else ends,
        cu_seqlens_q=offsets,
        max_seqlen_q=span.longest if ragged else None,
        softmax_scale=q.shape[2] ** -0.5 if scoring.scale is None else scoring.scale,
        causal=not tree,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=scoring.soft_cap or 0.0,
        return_softmax_lse=True,
    )
    return found[0].view(q.shape), found[1]


def join(mean: Tensor, log_sum: Tensor, prefix: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Two attentions of the same rows over different keys, as one over all of them.

    Args:
        mean, log_sum: Of a tree's own keys: float32 ``(T * heads, 2, D)`` and ``(T * heads, 2)``,
            the first of each two; logarithms in base 2.
        prefix: Of its prefix, from :func:`attend`.
        out: Filled: ``(T, heads * D)``.
    """
    other, natural = prefix
    heads, dim = other.shape[1:]
    queries = natural.shape[-1]
    launch(
        _join, (mean.shape[0],), mean, log_sum, other, natural.contiguous(), out, queries,
        HEADS=heads, DIM=dim, SIZE=max(16, triton.next_power_of_2(dim)), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries"])
def _join(
    mean, log_sum, other, natural, out, queries,
    HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One query's head: the means by the weights of their keys."""
    row = tl.program_id(0).to(tl.int64)
    query, head = row // HEADS, row % HEADS
    place = (query // queries * HEADS + head) * queries + query % queries
    mine = tl.load(log_sum + 2 * row)
    theirs = tl.load(natural + place) * 1.4426950408889634
    best = tl.maximum(mine, theirs)
    # A row that has seen nothing: any finite number stands in for its maximum.
    best = tl.where(best == -float("inf"), 0.0, best)
    weight, other_weight = tl.exp2(mine - best), tl.exp2(theirs - best)
    total = weight + other_weight
    column = tl.arange(0, SIZE)
    inside = column < DIM
    tree = tl.load(mean + 2 * row * DIM + column, mask=inside, other=0.0)
    far = tl.load(other + row * DIM + column, mask=inside, other=0.0).to(tl.float32)
    joined = (tree * weight + far * other_weight) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + column, joined.to(out.dtype.element_ty), mask=inside)
