"""The recorded passes of steps that only decode, by tier and batch size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from overlap_spec.drafters.base import Roots
from overlap_spec.kernels import Tree
from overlap_spec.types import StepPlan, Tier
from overlap_spec.worker.graphs import CudaGraph, Recorded, Tensors, Trace, padded_size

if TYPE_CHECKING:
    from overlap_spec.worker.passes import Passes


class Replay(NamedTuple):
    """One tier's passes; ``extend`` is None where there is no drafter."""

    draft: Recorded
    verify: Recorded
    extend: Recorded | None


class Replays:
    """What a worker has recorded.

    Args:
        passes: Whose passes they are.
        enabled: False records nothing.

    Attributes:
        bytes: Memory that CUDA graphs took.
    """

    def __init__(self, passes: Passes, enabled: bool) -> None:
        self.bytes = 0
        self._passes, self._enabled = passes, enabled
        self._cuda = passes.device.type == "cuda"
        self._pool: Any = None
        self._found: dict[tuple[Tier, int], Replay] = {}

    def sizes(self, most: int) -> list[int]:
        """Batch sizes to record, up to ``most`` requests: each CUDA graph's own, largest first, so
        that smaller ones can use its memory."""
        if not self._enabled:
            return []
        if self._cuda:
            return sorted({padded_size(n) for n in range(1, most + 1)}, reverse=True)
        # A trace is good for any batch; in that of a single row, sizes of 1 would look alike.
        return [2]

    def find(self, plan: StepPlan, rows: int) -> Replay | None:
        """What the step's ``rows`` trees can be replayed with; None beside a prefill."""
        if plan.chunks:
            return None
        return self._found.get((plan.tier, rows if self._cuda else 2))

    def record(self, tier: Tier, size: int) -> None:
        """Record a tier's passes, over rows that are nobody's: no request's state is touched."""
        passes, before = self._passes, self._reserved()
        nobody = torch.full((size,), passes.tables.nobody, device=passes.device)
        pages = passes.tables.pages[nobody]
        draft = self._make(partial(passes.grow, tier), nobody, pages)
        tokens, positions, *tree = draft(nobody, pages)
        inputs = read_inputs(Roots(nobody, pages, tokens, positions), Tree(*tree))
        verify = self._make(partial(passes.read, tier), *inputs)
        _, *features = verify(*inputs)
        extend = None
        if features:
            path, chosen = (nobody.new_zeros(size, tier.steps + 1) for _ in range(2))
            lesson = nobody, pages, positions, *features, chosen, path, nobody.new_zeros(size)
            extend = self._make(partial(passes.learn, tier), *lesson)
        self._found[tier, size] = Replay(draft, verify, extend)
        self.bytes += self._reserved() - before

    def _make(self, work: Callable[..., Tensors], *inputs: Tensor) -> Recorded:
        if not self._cuda:
            return Trace(self._passes, work, inputs)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return CudaGraph(work, inputs, self._pool)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._passes.device) if self._cuda else 0


def read_inputs(roots: Roots, tree: Tree) -> Tensors:
    """What :meth:`Passes.read` takes."""
    return roots.pages, roots.positions, tree.tokens, tree.depths, tree.ancestors
