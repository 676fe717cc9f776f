"""A step's plan on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overlap_spec.steps import Int64s, StepPlan


@dataclass(frozen=True)
class Chunks:
    """The plan's prefill on the device; C chunks of T tokens, F of which are final; all int64.

    Attributes:
        longest: Most tokens that a chunk has among the ``T + F``.
        lengths: Tokens of each chunk, on the host.
        kept: Behind which of its tokens a chunk has states that are kept, ascending; on the host.
        rows, starts, sizes, pages: ``(C,)``: each chunk's row, start, tokens, and page before it.
        tokens, positions, token_rows: ``(T,)``: all chunks' tokens, end to end.
        offsets: ``(C + 1,)``: where each chunk begins among the ``T``.
        last, final_rows: ``(F,)``: each final chunk's last token among the ``T``, and its row.
        extend_tokens, extend_positions, extend_rows: ``(T + F,)``: what the drafter takes in: the
            chunks' tokens, and after each final one the token that this step will choose.
        extend_features: ``(T + F,)``: the feature before each of these: below C, that at the end
            of the chunk's page before; from C on, that of token number (this - C).
        extend_offsets: ``(C + 1,)``: where each chunk begins among the ``T + F``.
        chosen: ``(F,)``: each token to be chosen among the ``T + F``.
        states: ``(C,)``: slot of the states before each chunk.
        kept_ends, kept_chunks, kept_slots: ``(K,)``: ``kept``, whose states they are, and where.
    """

    longest: int
    lengths: tuple[int, ...]
    kept: tuple[int, ...]
    rows: Tensor
    starts: Tensor
    sizes: Tensor
    pages: Tensor
    tokens: Tensor
    positions: Tensor
    token_rows: Tensor
    offsets: Tensor
    last: Tensor
    final_rows: Tensor
    extend_tokens: Tensor
    extend_positions: Tensor
    extend_rows: Tensor
    extend_features: Tensor
    extend_offsets: Tensor
    chosen: Tensor
    states: Tensor
    kept_ends: Tensor
    kept_chunks: Tensor
    kept_slots: Tensor


@dataclass(frozen=True)
class Batch:
    """The plan's numbers on the device; all int64.

    Attributes:
        chunks: None in a step that only decodes.
        rows: ``(S,)``: rows of the trees, then the padding row up to a recorded size.
        most: ``(S,)``: as in :class:`overlap_spec.tiers.Budget`; empty: all nodes are verified.
        page_index, page_values: ``(G,)``: entries of the flattened page table, and their pages.
    """

    plan: StepPlan
    chunks: Chunks | None
    rows: Tensor
    most: Tensor
    page_index: Tensor
    page_values: Tensor

    @property
    def trees(self) -> int:
        return len(self.plan.decode_rows)


class PlanUpload:
    """Packs a plan's numbers, and brings them to the device in one copy: ``max_pages`` columns of
    page tables; ``padded``: how many rows a batch is filled up to, by its own."""

    def __init__(
        self, max_pages: int, padding_row: int, padded: Callable[[int], int], device: torch.device
    ) -> None:
        self._max_pages, self._padding_row, self._padded = max_pages, padding_row, padded
        self._device = device

    def __call__(self, plan: StepPlan, staging: Staging) -> Batch:
        """The plan on the device, by way of ``staging``."""
        parts = self._decode_parts(plan)
        own = len(parts)
        if plan.chunks:
            parts += _chunk_parts(plan)
        packed = staging.upload(np.concatenate(parts).astype(np.int64, copy=False), self._device)
        tensors = packed.split([len(part) for part in parts])
        chunks = None
        if plan.chunks:
            longest = max(len(c.tokens) + c.final for c in plan.chunks)
            lengths = tuple(len(c.tokens) for c in plan.chunks)
            # The first of the last three parts.
            kept = tuple(parts[-3].tolist())
            chunks = Chunks(longest, lengths, kept, *tensors[own:])
        return Batch(plan, chunks, *tensors[:own])

    def _decode_parts(self, plan: StepPlan) -> list[Int64s]:
        trees, budget = len(plan.decode_rows), plan.budget
        padding = self._padded(trees) - trees
        most = [] if budget.nodes is None else [*budget.most, *[1] * padding]
        index: list[Any] = [_NONE]
        values: list[Any] = [_NONE]
        for row, first, pages in plan.pages:
            index.append(np.arange(len(pages)) + (row * self._max_pages + first))
            values.append(np.array(pages))
        return [
            np.array([*plan.decode_rows, *[self._padding_row] * padding], np.int64),
            np.array(most, np.int64),
            np.concatenate(index),
            np.concatenate(values),
        ]


def uploaded(host: Tensor, device: torch.device) -> Tensor:
    """``host``'s values on ``device``, for a stream's work alone: no other waits for the host's own
    stream. On the CPU they are used where they are."""
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Staging:
    """Host memory through which plans go to the device: pinned, and kept. On the CPU the numbers
    are used where they are."""

    def __init__(self) -> None:
        self._pinned: Tensor | None = None

    def upload(self, numbers: Int64s, device: torch.device) -> Tensor:
        """``numbers`` on the device; the memory is free again when the copy's stream is past it."""
        host = torch.from_numpy(numbers)
        if device.type != "cuda":
            return host
        if self._pinned is None or len(self._pinned) < len(host):
            self._pinned = torch.empty(2 * len(host), dtype=torch.int64, pin_memory=True)
        pinned = self._pinned[: len(host)]
        pinned.copy_(host)
        return pinned.to(device, non_blocking=True)


_NONE = np.zeros(0, np.int64)


def _chunk_parts(plan: StepPlan) -> list[Int64s]:
    """The fields of :class:`Chunks`, in order."""
    chunks, tokens = plan.chunks, [c.tokens for c in plan.chunks]
    fields = [(len(c.tokens), c.row, c.start, c.page_before) for c in chunks]
    sizes, rows, starts, pages = np.array(fields, np.int64).T
    final = np.array([c.final for c in chunks], bool)
    first, extended = np.cumsum(sizes) - sizes, sizes + final
    kept = sorted((at - 1, c, slot) for c, own in enumerate(chunks) for at, slot in own.kept)
    parts: list[Any] = [
        rows,
        starts,
        sizes,
        pages,
        np.concatenate(tokens),
        np.concatenate([s + np.arange(n) for s, n in zip(starts, sizes, strict=True)]),
        np.repeat(rows, sizes),
        np.concatenate([[0], np.cumsum(sizes)]),
        (first + sizes - 1)[final],
        rows[final],
        np.concatenate([np.append(t, -1) if f else t for t, f in zip(tokens, final, strict=True)]),
        np.concatenate([s + np.arange(n) for s, n in zip(starts, extended, strict=True)]),
        np.repeat(rows, extended),
        # Of a chunk's tokens, the first follows a page, each other one the token before it.
        np.concatenate(
            [
                np.concatenate([[c], len(chunks) + first[c] + np.arange(extended[c] - 1)])
                for c in range(len(chunks))
            ]
        ),
        np.concatenate([[0], np.cumsum(extended)]),
        (np.cumsum(extended) - 1)[final],
        np.array([c.row if c.state is None else c.state for c in chunks], np.int64),
        *np.array(kept, np.int64).reshape(-1, 3).T,
    ]
    return parts
