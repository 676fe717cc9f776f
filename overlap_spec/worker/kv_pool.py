"""Paged keys and values of one model, addressed through the rows' page tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec.kernels import KeySpan, move_kv, page_slots, store_kv, tree_attention
from overlap_spec.models.config import ModelConfig
from overlap_spec.worker.tables import RowTables


class KVPool:
    """Keys and values of ``layers`` layers in pages of ``page_size`` slots.

    Page 0 belongs to no request: rows without pages point there. Pages start as zeros, since a
    masked key still meets a weight of zero, which a NaN would survive.

    Args:
        config: Shape of the layers.
        first: First slot of a sequence that exists (1 in a draft cache).
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        tables: RowTables,
        dtype: torch.dtype,
        first: int = 0,
    ) -> None:
        shape = (config.num_layers, pages, page_size, config.num_kv_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=tables.device)
        self.v = torch.zeros(shape, dtype=dtype, device=tables.device)
        self.config, self.page_size, self.tables, self.first = config, page_size, tables, first
        self.visible_pages = 1

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of keys and values over all layers."""
        heads = config.num_layers * config.num_kv_heads * config.head_dim
        return 2 * heads * page_size * dtype.itemsize

    def see(self, max_tokens: int) -> None:
        """Let attention read the first ``max_tokens`` slots of every row: this step's bound."""
        needed = -(-max_tokens // self.page_size)
        self.visible_pages = min(needed, self.tables.pages.shape[1])

    def slots(self, rows: Tensor, logical: Tensor) -> Tensor:
        """Physical slots of ``logical (B, Q)`` slots of ``rows (B,)``."""
        return page_slots(self.tables.pages, rows, logical, self.page_size)

    def attend(
        self, rows: Tensor, slots: Tensor, prefix: Tensor, positions: Tensor, mask: Tensor | None
    ) -> PagedAttend:
        """See :class:`overlap_spec.drafters.base.DraftCache`."""
        pages = self.tables.pages[rows, : self.visible_pages]
        span = KeySpan(pages, prefix, positions, mask, self.first)
        return PagedAttend(self, self.slots(rows, slots).flatten(), (span,))

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy logical slots ``source (B, W)`` to ``target (B, W)`` in every layer."""
        move_kv(self.k, self.v, self.slots(rows, source), self.slots(rows, target))

    def clear(self, pages: tuple[int, ...]) -> None:
        """Zero pages that may hold NaN before another request reads them masked."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.k.device)
        self.k[:, index] = 0
        self.v[:, index] = 0


@dataclass(frozen=True)
class PagedAttend:
    """Attention of rectangles of queries laid end to end: stores their keys, then reads.

    ``slots`` int64 ``(T,)`` physical slots of all queries; ``spans`` one rectangle each.
    """

    pool: KVPool
    slots: Tensor
    spans: tuple[KeySpan, ...]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.pool.k[layer], self.pool.v[layer]
        store_kv(keys, values, self.slots, k, v)
        window = self.pool.config.window(layer)
        outputs, start = [], 0
        for span in self.spans:
            batch, queries = span.positions.shape
            part = q[start : start + batch * queries].reshape(batch, queries, *q.shape[1:])
            outputs.append(tree_attention(part, keys, values, span, window).flatten(0, 1))
            start += batch * queries
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def join(parts: list[PagedAttend]) -> PagedAttend:
    """The parts' rectangles as one run."""
    if len(parts) == 1:
        return parts[0]
    slots = torch.cat([part.slots for part in parts])
    return PagedAttend(parts[0].pool, slots, tuple(span for part in parts for span in part.spans))
