"""Paged keys and values of one model, addressed through the rows' page tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from overlap_spec.kernels import KeySpan, move_kv, page_slots, rotate_and_store, tree_attention
from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Heads


class KVPool(nn.Module):
    """Keys ``k`` and values ``v`` of all layers in pages: ``(layers, pages, page_size, heads, D)``.

    Page 0 belongs to no request: rows without pages point there. Pages start as zeros, since a
    masked key still meets a weight of zero, which a NaN would survive.

    Args:
        config: Shape of the layers.
        page_size: Slots of a page, in tokens.
        first: First slot of a sequence that exists (1 in a draft cache).
    """

    k: Tensor
    v: Tensor

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        first: int = 0,
    ) -> None:
        super().__init__()
        shape = (config.num_layers, pages, page_size, config.num_kv_heads, config.head_dim)
        self.register_buffer("k", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("v", torch.zeros(shape, dtype=dtype, device=device))
        self.config, self.page_size, self.first = config, page_size, first

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of keys and values over all layers."""
        heads = config.num_layers * config.num_kv_heads * config.head_dim
        return 2 * heads * page_size * dtype.itemsize

    def attend(
        self, pages: Tensor, slots: Tensor, prefix: Tensor, positions: Tensor, mask: Tensor | None
    ) -> PagedAttend:
        """See :class:`overlap_spec.drafters.base.DraftCache`."""
        span = KeySpan(pages, prefix, positions, mask, self.first)
        return PagedAttend(self, page_slots(pages, slots, self.page_size).flatten(), (span,))

    def move(self, pages: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy logical slots ``source (B, W)`` to ``target (B, W)`` in every layer."""
        come, go = (page_slots(pages, slots, self.page_size) for slots in (source, target))
        move_kv(self.k, self.v, come, go)

    def clear(self, pages: tuple[int, ...]) -> None:
        """Zero pages that may hold NaN before another request reads them masked."""
        for page in pages:
            self.k[:, page].zero_()
            self.v[:, page].zero_()


@dataclass(frozen=True)
class PagedAttend:
    """Attention of rectangles of queries laid end to end: stores their keys, then reads.

    ``slots`` int64 ``(T,)`` physical slots of all queries; ``spans`` one rectangle each.
    """

    pool: KVPool
    slots: Tensor
    spans: tuple[KeySpan, ...]

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        keys, values = self.pool.k[layer], self.pool.v[layer]
        q = rotate_and_store(heads.qkv, heads.rotary, keys, values, self.slots, heads.norm)
        window = self.pool.config.window(layer)
        if len(self.spans) == 1:
            (span,) = self.spans
            rectangle = q.view(*span.positions.shape, *q.shape[1:])
            return tree_attention(rectangle, keys, values, span, window).flatten(0, 1)
        out, start = q.new_empty(len(q), q.shape[1] * q.shape[2]), 0
        for span in self.spans:
            here = slice(start, start := start + span.positions.numel())
            rectangle = q[here].view(*span.positions.shape, *q.shape[1:])
            part = out[here].view(*span.positions.shape, -1)
            tree_attention(rectangle, keys, values, span, window, part)
        return out


def join(parts: list[PagedAttend]) -> PagedAttend:
    """The parts' rectangles as one run."""
    if len(parts) == 1:
        return parts[0]
    slots = torch.cat([part.slots for part in parts])
    return PagedAttend(parts[0].pool, slots, tuple(span for part in parts for span in part.spans))
