"""A step under way: its events, its buffers, and everything that its results need for reading."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overlap_spec.steps import TOLD, HostTrees, StepPlan
from overlap_spec.tiers import Tier
from overlap_spec.worker.batch import Batch, Staging
from overlap_spec.worker.graphs import padded_size
from overlap_spec.worker.kv_pool import lazy_zeros
from overlap_spec.worker.packed_rows import row_width
from overlap_spec.worker.streams import Event, Streams, Value

if TYPE_CHECKING:
    from overlap_spec.worker.tables import SamplingFeatures


class Events:
    """One step's events, in the order in which they are recorded; pooled with its buffers."""

    def __init__(self, streams: Streams) -> None:
        self.uploaded = streams.event()
        self.pages_entered = streams.event()
        self.prefilled = streams.event()
        self.drafted = streams.event()
        self.tree_on_host = streams.event()
        self.verified = streams.event()
        self.masks_ready = streams.event()
        self.results_on_host = streams.event()
        self.prefill_extended = streams.event()
        self.free = streams.event()

    def reset(self) -> None:
        """Forget what was recorded: waiting for it raises again."""
        for event in vars(self).values():
            event.reset()


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Zeros in the host's memory. Not by ``torch.zeros``: in the host's own thread it would start
    a second team of OpenMP's threads, and once these are more than the cores, none waits awake for
    its next product (a step of 0.75B parameters took a sixth longer)."""
    zeros = lazy_zeros(shape, dtype, torch.device("cpu"))
    return zeros.pin_memory() if pinned else zeros


class Buffers:
    """What one step in flight reads from and writes to the host; pinned where that matters.

    Attributes:
        links: int64, room for ``(3, S, nodes)``: tokens, first children, next siblings of all
            trees.
        masks, limits: int32 ``(nodes, words)`` mask rows and int64 ``(requests,)`` depth limits
            on the host; ``device_masks``, ``device_limits`` their copies on the device, which on
            the CPU are the same memory.
        runs: int32 ``(nodes, TOLD)``: what the grammar forces behind each node, a run, and
            the node's state; ``device_runs`` likewise.
        results: int64, room for the packed rows of trees and of final chunks.
        events: Recorded anew by each step that uses the buffers; ``events.free`` after its last
            use.
        keep: The step's tensors, which streams other than their own read until then.
    """

    def __init__(
        self, room: Tier, rows: int, words: int, streams: Streams, device: torch.device
    ) -> None:
        pinned = device.type == "cuda"
        most = padded_size(rows)
        nodes = most * room.nodes
        self.links = host_zeros((3 * nodes,), torch.int64, pinned)
        self.masks = host_zeros((nodes, words), torch.int32, pinned)
        self.limits = host_zeros((most,), torch.int64, pinned)
        self.runs = host_zeros((nodes, TOLD), torch.int32, pinned)
        self.device_masks, self.device_limits = self.masks, self.limits
        self.device_runs = self.runs
        if pinned:
            self.device_masks = torch.zeros(nodes, words, dtype=torch.int32, device=device)
            self.device_limits = torch.zeros(most, dtype=torch.int64, device=device)
            self.device_runs = torch.zeros_like(self.runs, device=device)
        columns = row_width(room.steps) + row_width(0)
        self.results = host_zeros((most * columns,), torch.int64, pinned)
        self.staging = Staging()
        self.events = Events(streams)
        self.in_use = False
        self.keep: object = None

    def mask_rows(self, count: int) -> NDArray[np.int32]:
        """The lane's view of the first ``count`` rows."""
        rows: NDArray[np.int32] = self.masks[:count].numpy()
        return rows


class Rotation:
    """The buffers of the steps in flight, taken in turn: allocated before serving, for the largest
    tier."""

    def __init__(self, rows: int, words: int, streams: Streams, device: torch.device) -> None:
        self._of = rows, words, streams, device
        self._room = Tier(0, 1, 0)
        self._buffers: list[Buffers] = []
        # What steps under way may still read, of which no tier is taken any more.
        self._outgrown: list[Buffers] = []

    def reserve(self, tiers: Iterable[Tier]) -> None:
        """Have room for steps of any of these tiers."""
        every = (self._room, *tiers)
        room = Tier(max(t.steps for t in every), 1, max(t.nodes for t in every))
        if room != self._room:
            self._room, self._outgrown = room, [*self._outgrown, *self._buffers]
            self._buffers = [Buffers(room, *self._of) for _ in range(2)]

    def clear(self) -> None:
        """Let go of all memory."""
        self._buffers, self._outgrown, self._room = [], [], Tier(0, 1, 0)

    def take(self, tier: Tier) -> Buffers:
        """The buffers used longest ago, when all that used them has passed."""
        self.reserve((tier,))
        buffers = self._buffers.pop(0)
        self._buffers.append(buffers)
        if buffers.in_use:
            buffers.events.free.synchronize()
            buffers.events.reset()
        buffers.in_use = True
        return buffers


@dataclass
class InFlightStep:
    """One step between its plan and its results.

    Attributes:
        plan: After :meth:`settle`, with what was drafted for its tier.
        accepted: When its tokens were decided; outlives the buffers, since the next step's idle
            time is measured from it.
        constrained: Whether any of its requests has a grammar.
        features: What its requests ask of the sampler.
        batch, prefilled, drafted, verified, decided: What the streams' work hands on.
        limits: Depth down to which each request's mask rows are good.
        results: The packed results of the trees and of the final chunks, on the host.
        extras: What the optional parts found, by name, on the host.
        dropped: Whether nothing of it is asked for any more.
    """

    plan: StepPlan
    buffers: Buffers
    accepted: Event
    constrained: bool
    features: SamplingFeatures
    batch: Value[Batch] = field(default_factory=Value)
    prefilled: Value[Any] = field(default_factory=Value)
    drafted: Value[Any] = field(default_factory=Value)
    verified: Value[Any] = field(default_factory=Value)
    decided: Value[Any] = field(default_factory=Value)
    limits: tuple[int, ...] = ()
    results: list[Tensor] = field(default_factory=list)
    logprobs: list[tuple[Tensor, ...]] = field(default_factory=list)
    extras: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    dropped: bool = False

    @property
    def events(self) -> Events:
        return self.buffers.events

    def settle(self) -> None:
        """Enter into the plan what was drafted and is verified, where the drafts' stop chose it;
        once ``drafted`` is known to be there."""
        drafted = self.drafted.get()
        if drafted is None or (drafted.tier == self.plan.tier and drafted.nodes is None):
            return
        budget = self.plan.budget.stopped(drafted.tier, drafted.nodes)
        self.plan = replace(self.plan, budget=budget)

    def host_trees(self) -> HostTrees:
        """The drafted trees, then a node for each final chunk; once ``tree_on_host`` has passed."""
        plan, final = self.plan, self.plan.final_chunks
        trees, nodes = len(plan.decode_rows), plan.tier.nodes
        links = self.links
        tokens, child, sibling = links.reshape(3, trees * nodes)
        sizes = [nodes] * trees + [1] * len(final)
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        if final:
            none = np.full(len(final), -1, np.int64)
            ends = np.array([chunk.tokens[-1] for chunk in final], np.int64)
            tokens = np.concatenate([tokens, ends])
            child, sibling = np.concatenate([child, none]), np.concatenate([sibling, none])
        return HostTrees(tokens, child, sibling, offsets)

    @property
    def tree_is_read(self) -> bool:
        """Whether the drafted trees go to the host: for the grammar, or for whoever asked."""
        return self.constrained or self.features.reads_tree

    def mask_rows(self, index: int) -> NDArray[np.int32]:
        """int32 ``(nodes, words)``: mask rows of one of the plan's verified trees on the host."""
        trees, nodes = len(self.plan.decode_rows), self.plan.tier.nodes
        if index >= trees:
            return self.buffers.mask_rows(trees * nodes + index - trees + 1)[-1:]
        return self.buffers.mask_rows((index + 1) * nodes)[index * nodes :]

    @property
    def links(self) -> NDArray[np.int64]:
        """int64 ``(3, trees, nodes)``: tokens, first children and next siblings on the host."""
        trees, nodes = len(self.plan.decode_rows), self.plan.tier.nodes
        rows = self.batch.get().rows.shape[0]
        links: NDArray[np.int64] = self.buffers.links[: 3 * rows * nodes].numpy()
        return links.reshape(3, rows, nodes)[:, :trees]
