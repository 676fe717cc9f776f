"""A step's plan on the device, and the buffers through which it meets the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overlap_spec.types import Int64s, StepPlan, Tier
from overlap_spec.worker.streams import Event, Streams


@dataclass(frozen=True)
class Batch:
    """The plan's numbers on the device; all int64.

    Attributes:
        rows: ``(B + F,)``: rows of the trees, then of the final chunks, the verified requests.
        chunk_rows, chunk_starts, chunk_sizes: ``(C,)``, one a chunk.
        tokens, positions: ``(T,)``: all chunks' tokens and their positions, end to end.
        following: ``(T,)``: the token behind each; -1 where only this step will choose it.
        last: ``(F,)``: index of each final chunk's last token among the ``T``.
        page_index, page_values: ``(G,)``: entries of the flattened page table, and their pages.
    """

    plan: StepPlan
    rows: Tensor
    chunk_rows: Tensor
    chunk_starts: Tensor
    chunk_sizes: Tensor
    tokens: Tensor
    positions: Tensor
    following: Tensor
    last: Tensor
    page_index: Tensor
    page_values: Tensor

    @property
    def trees(self) -> int:
        return len(self.plan.decode_rows)

    @property
    def tree_rows(self) -> Tensor:
        return self.rows[: self.trees]

    @property
    def final_rows(self) -> Tensor:
        return self.rows[self.trees :]


def upload(plan: StepPlan, max_pages: int, device: torch.device) -> Batch:
    """Pack the plan's numbers, and bring them to the device in one copy."""
    chunks, final = plan.chunks, plan.final_chunks
    ends = np.cumsum([len(c.tokens) for c in chunks])
    last = [end - 1 for end, c in zip(ends, chunks, strict=True) if c.next_token is None]
    following = [
        np.append(c.tokens[1:], -1 if c.next_token is None else c.next_token) for c in chunks
    ]
    parts: list[list[int] | list[Int64s]] = [
        [*plan.decode_rows, *(c.row for c in final)],
        [c.row for c in chunks],
        [c.start for c in chunks],
        [len(c.tokens) for c in chunks],
        [c.tokens for c in chunks],
        [np.arange(c.start, c.start + len(c.tokens)) for c in chunks],
        following,
        last,
        [np.arange(len(pages)) + (row * max_pages + first) for row, first, pages in plan.pages],
        [np.array(pages) for _, _, pages in plan.pages],
    ]
    flat: list[Any] = [
        np.concatenate([np.atleast_1d(p) for p in part]) if part else [] for part in parts
    ]
    packed = torch.from_numpy(np.concatenate(flat).astype(np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return Batch(plan, *packed.split([len(part) for part in flat]))


class Buffers:
    """What one step in flight reads from and writes to the host; pinned where that matters.

    Attributes:
        links: int64 ``(3, nodes)``: tokens, first children, next siblings of all trees.
        masks, limits: int32 ``(nodes, words)`` mask rows and int64 ``(requests,)`` depth limits
            on the host; ``device_masks``, ``device_limits`` their copies on the device.
        results: int64 ``(requests, 2 + depth)``: accepted length, then the emitted tokens.
        free: Recorded behind the last use.
        keep: The step's tensors, which streams other than their own read until then.
    """

    def __init__(self, tier: Tier, rows: int, words: int, streams: Streams, device: torch.device):
        pinned = device.type == "cuda"
        nodes = rows * tier.nodes
        self.links = torch.zeros(3, nodes, dtype=torch.int64, pin_memory=pinned)
        self.masks = torch.zeros(nodes, words, dtype=torch.int32, pin_memory=pinned)
        self.limits = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self.device_masks = torch.zeros(nodes, words, dtype=torch.int32, device=device)
        self.device_limits = torch.zeros(rows, dtype=torch.int64, device=device)
        self.results = torch.zeros(rows, 2 + tier.steps, dtype=torch.int64, pin_memory=pinned)
        self.free: Event = streams.event()
        self.in_use = False
        self.keep: object = None

    def mask_rows(self, count: int) -> NDArray[np.int32]:
        """The lane's view of the first ``count`` rows."""
        rows: NDArray[np.int32] = self.masks[:count].numpy()
        return rows


class TierState:
    """What a tier owns: its buffers, allocated once and rotated over the steps in flight."""

    def __init__(
        self, tier: Tier, rows: int, words: int, streams: Streams, device: torch.device
    ) -> None:
        self.tier = tier
        self._buffers = [Buffers(tier, rows, words, streams, device) for _ in range(2)]

    def rotate(self) -> Buffers:
        """The buffers used longest ago, when all that used them has passed."""
        buffers = self._buffers.pop(0)
        self._buffers.append(buffers)
        if buffers.in_use:
            buffers.free.synchronize()
        buffers.in_use = True
        return buffers
