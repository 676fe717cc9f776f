"""A step under way: its events, its buffers, and everything that its results need for reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from overlap_spec.steps import TOLD, HostTrees, Int32s, Int64s, StepPlan
from overlap_spec.tiers import Tier
from overlap_spec.worker.batch import PlanUpload, Staging
from overlap_spec.worker.graphs import graph_size
from overlap_spec.worker.kv_pool import lazy_zeros
from overlap_spec.worker.packed_rows import row_width
from overlap_spec.worker.passes import GrammarRows, StepTensors
from overlap_spec.worker.sampler import Masks
from overlap_spec.worker.streams import Event, Streams


class Events:
    """One step's events, in the order in which they are recorded; pooled with its buffers."""

    def __init__(self, streams: Streams) -> None:
        self.uploaded, self.pages_entered, self.prefilled = (streams.event() for _ in range(3))
        self.drafted, self.tree_on_host, self.verified = (streams.event() for _ in range(3))
        self.masks_ready, self.results_on_host = streams.event(), streams.event()
        self.prefill_extended, self.free = streams.event(), streams.event()

    def reset(self) -> None:
        """Forget what was recorded: waiting for it raises again."""
        for event in vars(self).values():
            event.reset()


@lru_cache
def _firsts(rows: int, nodes: int) -> tuple[Int64s, Int64s]:
    """The number of each node's root; and those of all roots, and where the last tree ends."""
    bounds = np.arange(rows + 1) * nodes
    return bounds[:-1].repeat(nodes), bounds


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Zeros in the host's memory. ``torch.zeros`` would start a second team of OpenMP's threads in
    the host's own thread: of more than there are cores none waits awake for its next product (a
    step of 0.75B parameters took a sixth longer)."""
    zeros = lazy_zeros(shape, dtype, torch.device("cpu"))
    return zeros.pin_memory() if pinned else zeros


class Mirrored(NamedTuple):
    """A buffer of the host, and its copy on the device, which on the CPU is the same memory."""

    host: Tensor
    device: Tensor

    def upload(self, count: int) -> Tensor:
        """Its first rows on the device, as the host has them now."""
        there = self.device[:count]
        if self.device is not self.host:
            there.copy_(self.host[:count], non_blocking=True)
        return there


class Buffers:
    """What one step in flight reads from and writes to the host; pinned where that matters.

    Attributes:
        links: int64, room for ``(3, S, nodes)``: tokens, first children, next siblings.
        masks, limits, runs, places: As :class:`HostTrees` and :class:`GrammarRows` have them.
        results: int64, room for the packed rows of trees and of final chunks.
        events: Recorded anew by each step that uses the buffers; ``events.free`` after its last
            use.
        keep: The step's tensors, which streams other than their own read until then.
    """

    def __init__(
        self, room: Tier, rows: int, words: int, streams: Streams, device: torch.device
    ) -> None:
        pinned, most = device.type == "cuda", graph_size(rows)
        nodes, columns = most * room.nodes, row_width(room.steps) + row_width(0)

        def mirrored(dtype: torch.dtype, *shape: int) -> Mirrored:
            host = host_zeros(shape, dtype, pinned)
            return Mirrored(host, torch.zeros_like(host, device=device) if pinned else host)

        self.links = host_zeros((3 * nodes,), torch.int64, pinned)
        self.masks = mirrored(torch.int32, nodes, words)
        self.limits = mirrored(torch.int64, most)
        self.runs = mirrored(torch.int32, 1 + nodes, TOLD)
        self.runs.host.numpy()[0] = -1
        self.places = mirrored(torch.int64, nodes + most)
        self.results = host_zeros((most * columns,), torch.int64, pinned)
        self.staging, self.events, self.in_use = Staging(), Events(streams), False
        self.keep: object = None


class Rotation:
    """The buffers of the steps in flight, taken in turn, for the largest tier."""

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
        tensors: What the streams' work hands on.
        trees: The drafted trees, once :meth:`read_trees` has been called.
        limits: Depth down to which each request's mask rows are good.
        results, logprobs: Of the trees and of the final chunks, on the host.
        extras: What the optional parts found, by name, on the host.
        dropped: Whether nothing of it is asked for any more.
    """

    plan: StepPlan
    buffers: Buffers
    accepted: Event
    constrained: bool
    tensors: StepTensors
    trees: HostTrees | None = None
    limits: tuple[int, ...] = ()
    results: list[Tensor] = field(default_factory=list)
    logprobs: list[tuple[Tensor, ...]] = field(default_factory=list)
    extras: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    dropped: bool = False

    @property
    def events(self) -> Events:
        return self.buffers.events

    def upload_plan(self, upload: PlanUpload) -> None:
        """Bring the plan to the device."""
        self.tensors.batch = upload(self.plan, self.buffers.staging)

    def draft(self, phase: Callable[[StepTensors, Any], None], proposal: object) -> None:
        """Have its trees drafted by ``phase``, unless they are not wanted any more."""
        if not self.dropped:
            phase(self.tensors, proposal)

    def copy_tree(self) -> None:
        """Bring the drafted trees to the host."""
        if self.tensors.drafted is not None:
            links = self.tensors.drafted.links.flatten()
            self.buffers.links[: len(links)].copy_(links, non_blocking=True)

    def upload_masks(self) -> GrammarRows:
        """Bring what the lane wrote to the device: no more rows than nodes have one."""
        plan, buffers, requests = self.plan, self.buffers, len(self.tensors.batch.rows)
        assert self.trees is not None
        count, nodes, final = int(self.trees.offsets[-1]), plan.tier.nodes, len(plan.final_chunks)
        places = buffers.places.upload(requests * nodes + final)
        every = count == len(plan.decode_rows) * nodes + final
        masks = Masks(buffers.masks.upload(count), None if every else places)
        limits, runs = buffers.limits.upload(requests), buffers.runs.upload(1 + count)
        self.tensors.grammar = GrammarRows(masks, limits, runs, places)
        return self.tensors.grammar

    def copy_results(self) -> None:
        """Bring what was decided to the host, and what the optional parts found."""
        room, prefilled = self.buffers.results, self.tensors.prefilled
        if prefilled is not None:
            told = prefilled.extras.items()
            self.extras = {name: tuple(map(_to_host, found)) for name, found in told}
        for part in self.tensors.decided:
            if part is None:
                continue
            host = room[: part.packed.numel()].view(part.packed.shape)
            room = room[part.packed.numel() :]
            self.results.append(host.copy_(part.packed, non_blocking=True))
            if part.logprobs is not None:
                self.logprobs.append(tuple(map(_to_host, part.logprobs)))

    def settle(self) -> None:
        """Enter into the plan what was drafted and is verified, where the drafts' stop chose it;
        once it is there."""
        drafted = self.tensors.drafted
        if drafted is None or (drafted.tier == self.plan.tier and drafted.nodes is None):
            return
        budget = self.plan.budget.stopped(drafted.tier, drafted.nodes)
        self.plan = replace(self.plan, budget=budget)

    def read_trees(self) -> HostTrees:
        """Wait for the drafted trees: the step's one wait. Numbers the nodes that have mask rows:
        the living ones of requests with a grammar, then a node for each such final chunk."""
        self.events.tree_on_host.synchronize()
        self.settle()
        plan, nodes, rows = self.plan, self.plan.tier.nodes, len(self.tensors.batch.rows)
        trees, every = len(plan.decode_rows), rows * nodes
        real, grammar = trees * nodes, [has_one for _, _, has_one in plan.verified]
        finals = zip(plan.final_chunks, grammar[trees:], strict=True)
        ends = [chunk.tokens[-1] for chunk, has_one in finals if has_one]
        packed = links = self.buffers.links.numpy()[: 3 * every].reshape(3, every)[:, :real]
        first, offsets = _firsts(trees, nodes)
        linked = links[1:] >= 0
        places = self.buffers.places.host.numpy()[: every + len(plan.final_chunks)]
        places.fill(-1)
        if all(grammar) and np.count_nonzero(linked) == real - trees:
            # All nodes but the roots are linked: none is dead.
            places[:real] = np.arange(real)
        else:
            living = np.zeros(real, bool)
            living[::nodes] = True
            living[(links[1:] + first)[linked]] = True
            living &= np.array(grammar[:trees], bool).repeat(nodes)
            (index,) = living.nonzero()
            places[index] = np.arange(len(index))
            own, packed = first[index], links.take(index, 1)
            packed[1:] = np.where(packed[1:] >= 0, places[packed[1:] + own] - places[own], -1)
            offsets = index.searchsorted(offsets)
        if plan.final_chunks:
            # They are linked to nothing.
            count, alone = int(offsets[-1]), np.full((3, len(ends)), -1)
            alone[0] = ends
            places[every:][grammar[trees:]] = np.arange(count, count + len(ends))
            packed = np.concatenate([packed, alone], 1)
            offsets = np.concatenate([offsets, count + np.cumsum(grammar[trees:])])
        buffers, count = self.buffers, int(offsets[-1])
        limits = buffers.limits.host.numpy()
        limits.fill(plan.tier.steps)
        tokens, first_child, next_sibling = packed
        told = tokens, first_child, next_sibling, offsets
        masks, runs = buffers.masks.host[:count].numpy(), buffers.runs.host[1 : 1 + count].numpy()
        self.trees = HostTrees(*told, masks, limits[: len(plan.verified)], runs)
        return self.trees

    @property
    def tree_is_read(self) -> bool:
        """Whether the drafted trees go to the host: for the grammar, or for whoever asked."""
        return self.constrained or self.tensors.features.reads_tree

    def mask_rows(self, index: int) -> Int32s:
        """int32 ``(nodes, words)``: mask rows of one of the plan's verified trees on the host,
        zero where a node has none."""
        trees, nodes = len(self.plan.decode_rows), self.plan.tier.nodes
        rows = len(self.tensors.batch.rows)
        first = index * nodes if index < trees else rows * nodes + index - trees
        places = self.buffers.places.host.numpy()[first : first + (nodes if index < trees else 1)]
        found: Int32s = self.buffers.masks.host.numpy()[places]
        found[places < 0] = 0
        return found

    @property
    def links(self) -> Int64s:
        """int64 ``(3, trees, nodes)``: tokens, first children and next siblings on the host."""
        trees, nodes = len(self.plan.decode_rows), self.plan.tier.nodes
        rows = self.tensors.batch.rows.shape[0]
        links: Int64s = self.buffers.links[: 3 * rows * nodes].numpy()
        return links.reshape(3, rows, nodes)[:, :trees]


def _to_host(found: Tensor) -> Tensor:
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
    return host.copy_(found, non_blocking=True)
