"""Paged keys and values of one model, addressed through the rows' page tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from overlap_spec.kernels import KeySpan, move_kv, page_slots, tree_attention
from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Heads, Latents
from overlap_spec.models.delta import Flow

# Bytes, as torch aligns its own.
ALIGNMENT = 64


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU their memory is taken when it is first written to, as most of a cache's
    never is."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    # From calloc, which for this size is fresh memory of the system; torch.zeros writes.
    room = np.zeros(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return torch.from_numpy(room[start : start + size]).view(dtype).view(shape)


class KVPool(nn.Module):
    """Keys ``k`` and values ``v`` of all layers that have such, in pages: ``(layers, pages,
    page_size, heads, D)``; of latents ``v`` has these, and ``k`` what of their keys is rotated.

    Page 0 belongs to no request: rows without pages point there. Pages start as zeros: a masked key
    still meets a weight of zero, which a NaN would survive. ``page_size`` is in tokens; ``first``
    is a sequence's first slot that exists (1 in a cache of EAGLE's heads).
    """

    k: Tensor
    v: Tensor

    def __init__(
        self,
        config: ModelConfig,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        first: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.page_size, self.first = config, page_size, first
        self._dtype, self._device = dtype, device
        self.index = {layer: index for index, layer in enumerate(config.key_layers)}

    def allocate(self, pages: int) -> None:
        """Take the memory of ``pages`` pages; nothing else works before."""
        config = self.config
        shape = len(self.index), pages, self.page_size, config.own_kv_heads
        for name, dim in (("k", config.head_dim), ("v", config.value_dim)):
            self.register_buffer(name, lazy_zeros((*shape, dim), self._dtype, self._device))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of keys and values over all layers."""
        config = self.config
        heads, both = len(self.index) * config.own_kv_heads, config.head_dim + config.value_dim
        return heads * both * self.page_size * self._dtype.itemsize

    def slots(self, pages: Tensor, logical: Tensor) -> Tensor:
        """Physical slots of logical ones: see :func:`overlap_spec.kernels.page_slots`."""
        return page_slots(pages, logical, self.page_size)

    def attend(
        self, pages: Tensor, slots: Tensor, prefix: Tensor, positions: Tensor, mask: Tensor | None
    ) -> PagedAttend:
        """See :class:`overlap_spec.drafters.base.DraftCache`."""
        seen = None if mask is None else mask.flatten(0, 1)
        span = KeySpan(pages, prefix, positions.flatten(), seen, self.first)
        return PagedAttend(self, self.slots(pages, slots).flatten(), span)

    def move(self, pages: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy logical slots ``source (B, W)`` to ``target (B, W)`` in every layer."""
        come, go = (self.slots(pages, slots) for slots in (source, target))
        move_kv(self.k, self.v, come, go)

    def clear(self, pages: tuple[int, ...]) -> None:
        """Zero pages that may hold NaN before another request reads them masked."""
        for page in pages:
            self.k[:, page].zero_()
            self.v[:, page].zero_()


@dataclass(frozen=True)
class PagedAttend:
    """Attention of queries laid end to end: stores their keys in the physical ``slots`` int64
    ``(T,)``, then reads what ``span`` shows. ``states``: what layers without keys call in its place
    (``worker/state_pool.py``)."""

    pool: KVPool
    slots: Tensor
    span: KeySpan
    states: Callable[[int, Flow], Tensor] | None = None

    def __call__(self, layer: int, heads: Heads | Latents | Flow) -> Tensor:
        if isinstance(heads, Flow):
            assert self.states is not None
            return self.states(layer, heads)
        keys, values = (cache[self.pool.index[layer]] for cache in (self.pool.k, self.pool.v))
        q = heads.store(keys, values, self.slots)
        window = self.pool.config.window(layer)
        return tree_attention(q, keys, values, self.span, window, heads.scoring)
