"""Recordings of a GPU: CUDA graphs, each of one padded number of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from overlap_spec.tiers import Tier
from overlap_spec.worker import examples
from overlap_spec.worker.graphs import (
    CudaGraph,
    Eager,
    Place,
    Recorded,
    Tensors,
    Work,
    graph_size,
    packed_size,
)
from overlap_spec.worker.recordings import CHAIN, TREE, Record, Recordings


class CudaGraphs(Recordings):
    """All are made before serving (``worker/warm_up.py``). Graphs of the target's pass write to one
    place, as no two of their outputs are wanted at once; and so do drafts of trees of one size,
    whatever their tier, so that what comes behind is recorded once. A graph takes another one's
    inputs and outputs where they are: a step copies neither."""

    _pool: Any = None
    # Where all graphs of the target's pass write: logits, and features if any.
    _outputs: Tensors = ()

    more_rows = 0

    def kinds(self, tier: Tier, batch: int) -> tuple[int, Tier, Tier, Tier]:
        return batch, _places(tier), _shape(tier), _shape(tier)

    def draft(self, tier: Tier, batch: int, sampled: bool, told: bool) -> Recorded:
        made = super().draft(tier, batch, sampled, told)
        # Before the drafts run: what is recorded behind them runs them too.
        self.behind(tier, batch)
        return made

    def make_draft(
        self, record: Record, tier: Tier, sampled: bool, told: bool, rows: int
    ) -> Recorded:
        key = "trees", _places(tier), rows
        first: Recorded | None = self._known.get(key)
        if first is None:
            made = super().make_draft(record, tier, sampled, told, rows)
            if not isinstance(made, Eager):
                self._known[key] = made
            return made
        # Behind any drafts of this size come the same graphs, whose inputs these are.
        given, work = examples.padding(self.runner, rows), self.drafts.trees
        outputs = first(*given)
        return record(
            partial(work, tier, sampled, told), first.kept(*given), given, lambda _: outputs
        )

    def packed(self, tier: Tier, batch: int, count: int) -> Recorded:
        return self._packed(tier.nodes, count, batch)

    def trees(self, tier: Tier, rows: int) -> tuple[Tensors, Tensors]:
        draft: Recorded | None = self._known.get(("trees", _places(tier), rows))
        if draft is None:
            return super().trees(tier, rows)
        given = examples.padding(self.runner, rows)
        trees = draft(*given)
        return draft.kept(*given), trees

    def writes(self, tier: Tier, rows: int) -> Tensors:
        """Where a verify's graph writes them."""
        if self.runner.states is None:
            return ()
        self.verify(tier, rows)
        behind = 2 if self.runner.feature_layers else 1
        return tuple(x[: rows * tier.nodes] for x in self._outputs[behind:])

    def extended(self, tier: Tier, rows: int) -> Tensors:
        """Where the passes before it write what they do."""
        given, (_, roots, *_) = self.trees(tier, rows)
        _, _, _, *own = super().extended(tier, rows)
        if self.runner.feature_layers:
            self.verify(tier, rows)
            own[3] = self._outputs[1][: rows * tier.nodes]
        return *given, roots, *own

    def make_target(self, work: Work, *inputs: Tensor) -> Recorded:
        return self.make(work, inputs, self._target_place)

    def _target_place(self, found: Tensors) -> Tensors:
        room = self._outputs
        if not room or any(len(own) < len(new) for own, new in zip(room, found, strict=True)):
            room = self._outputs = tuple(torch.zeros_like(x) for x in found)
        return tuple(own[: len(new)] for own, new in zip(room, found, strict=True))

    def make(self, work: Work, inputs: Tensors, place: Place | None = None) -> Recorded:
        self.count += 1
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return CudaGraph(work, inputs, self._pool, place)

    def padded(self, batch: int) -> int:
        return graph_size(batch)

    def packed_size(self, tier: Tier, rows: int, wanted: int) -> int:
        return packed_size(rows, tier.nodes, wanted)

    def reserved(self) -> int:
        """Bytes of the device that are taken, but for what runs have left for the next ones."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.runner.device)

    def clear(self) -> None:
        super().clear()
        self._pool, self._outputs = None, ()


@cache
def _places(tier: Tier) -> Tier:
    """The same for tiers whose trees are as large, and chains or none: all that a verify minds, and
    where drafts write to."""
    return replace(CHAIN if tier.is_chain else TREE, nodes=tier.nodes)


@cache
def _shape(tier: Tier) -> Tier:
    """The same for tiers behind whose drafts come the same passes, whoever has drafted."""
    base = None if tier.base is None else CHAIN
    return replace(tier, top_k=min(tier.top_k, 2), base=base)
