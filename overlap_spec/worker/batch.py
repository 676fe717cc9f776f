"""A step's plan on the device, and the buffers through which it meets the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overlap_spec.types import StepPlan, Tier
from overlap_spec.worker.graphs import padded_size
from overlap_spec.worker.streams import Event, Streams


@dataclass(frozen=True)
class Batch:
    """The plan's numbers on the device; all int64.

    Attributes:
        rows: ``(B + F,)``: rows of the trees, then of the final chunks, the verified requests.
        tree_rows: ``(S,)``: rows of the trees, then nobody's row up to a recorded size.
        chunk_rows, chunk_starts, chunk_sizes, chunk_pages: ``(C,)``: each chunk's row, start,
            tokens, and the page before it.
        tokens, positions, token_rows: ``(T,)``: all chunks' tokens, end to end.
        last: ``(F,)``: index of each final chunk's last token among the ``T``.
        extend_tokens, extend_positions: ``(T + F,)``: what the drafter takes in of the chunks:
            their tokens, and behind each final one the token that this step will choose.
        extend_features: ``(T + F,)``: the feature before each of these: below C, that at the end
            of the chunk's page before; from C on, that of token number (this - C).
        chosen: ``(F,)``: index of each token to be chosen among the ``T + F``.
        page_index, page_values: ``(G,)``: entries of the flattened page table, and their pages.
    """

    plan: StepPlan
    rows: Tensor
    tree_rows: Tensor
    chunk_rows: Tensor
    chunk_starts: Tensor
    chunk_sizes: Tensor
    chunk_pages: Tensor
    tokens: Tensor
    positions: Tensor
    token_rows: Tensor
    last: Tensor
    extend_tokens: Tensor
    extend_positions: Tensor
    extend_features: Tensor
    chosen: Tensor
    page_index: Tensor
    page_values: Tensor

    @property
    def trees(self) -> int:
        return len(self.plan.decode_rows)

    @property
    def final_rows(self) -> Tensor:
        return self.rows[self.trees :]


def upload(plan: StepPlan, max_pages: int, nobody: int, device: torch.device) -> Batch:
    """Pack the plan's numbers, and bring them to the device in one copy."""
    chunks = plan.chunks
    sizes = np.array([len(c.tokens) for c in chunks], np.int64)
    final = np.array([c.final for c in chunks], bool)
    first = np.cumsum(sizes) - sizes
    extended = sizes + final
    rows = np.array([c.row for c in chunks], np.int64)
    starts = np.array([c.start for c in chunks], np.int64)
    tokens = [c.tokens for c in chunks]
    features = [
        # Of a chunk's tokens, the first follows a page, each other one the token before it.
        np.concatenate([[c], len(chunks) + first[c] + np.arange(extended[c] - 1)])
        for c in range(len(chunks))
    ]
    trees = len(plan.decode_rows)
    size = trees if chunks else padded_size(trees)
    parts: list[list[Any]] = [
        [*plan.decode_rows, *rows[final]],
        [*plan.decode_rows, *[nobody] * (size - trees)],
        [rows],
        [starts],
        [sizes],
        [[c.page_before for c in chunks]],
        tokens,
        [s + np.arange(n) for s, n in zip(starts, sizes, strict=True)],
        [np.repeat(rows, sizes)],
        [(first + sizes - 1)[final]],
        [np.append(t, -1) if f else t for t, f in zip(tokens, final, strict=True)],
        [s + np.arange(n) for s, n in zip(starts, extended, strict=True)],
        features,
        [(np.cumsum(extended) - 1)[final]],
        [np.arange(len(pages)) + (row * max_pages + at) for row, at, pages in plan.pages],
        [np.array(pages) for _, _, pages in plan.pages],
    ]
    flat = [np.concatenate([np.atleast_1d(p) for p in part] or [np.array([])]) for part in parts]
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
        results: int64, room for each request's accepted length, then its emitted tokens.
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
        self.results = torch.zeros(rows * (2 + tier.steps), dtype=torch.int64, pin_memory=pinned)
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
