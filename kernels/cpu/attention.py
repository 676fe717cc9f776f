"""Paged attention on the CPU: see :mod:`overlap_spec.kernels.attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.kernels import attention
from overlap_spec.kernels.attention import USUAL, KeySpan, Scoring
from overlap_spec.kernels.dispatch import reference_of

ops = torch.ops.overlap_spec
in_chunks = reference_of(attention.tree_attention)


def rotate_and_store(
    qkv: Tensor,
    rotary: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    weight, eps = (None, 0.0) if norm is None else norm
    q: Tensor = ops.rotate_and_store(qkv, rotary, k_cache, v_cache, slots, weight, eps)
    return q


def page_slots(pages: Tensor, logical: Tensor, page_size: int) -> Tensor:
    slots: Tensor = ops.page_slots(pages, logical, page_size)
    return slots


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    span: KeySpan,
    window: int | None = None,
    scoring: Scoring = USUAL,
) -> Tensor:
    if span.mask is None and span.offsets is not None:
        # A prompt's chunk has many queries: oneDNN's products of all of them with all keys.
        return in_chunks(q, k_cache, v_cache, span, window, scoring)
    keys = span.pages, span.prefix, span.positions, span.mask, span.offsets, span.first, window
    out: Tensor = ops.tree_attention(q, k_cache, v_cache, *keys, *scoring)
    return out
