"""Recordings with a CUDA graph's manners, on the CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.graph_runner import GraphRunner
from overlap_spec.worker.graphs import Recorded, Tensors
from overlap_spec.worker.model_runner import ModelRunner


class Held(Recorded):
    """A CUDA graph's manners on the CPU: one size of batch, inputs and outputs in fixed places.

    Attributes:
        copied: Which of its inputs it has copied, by number.
    """

    def __init__(self, work: Any, inputs: Tensors, into: Tensors | None = None) -> None:
        self._work, self._inputs = work, inputs
        self.copied: set[int] = set()
        self._outputs = into or tuple(x.clone() for x in work(*inputs))

    def __call__(self, *inputs: Tensor) -> Tensors:
        for number, (own, given) in enumerate(zip(self._inputs, inputs, strict=True)):
            assert own.shape == given.shape
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)
                self.copied.add(number)
        for own, new in zip(self._outputs, self._work(*self._inputs), strict=True):
            own.copy_(new)
        return self._outputs

    def kept(self, *inputs: Tensor) -> Tensors:  # noqa: ARG002
        return self._inputs


class HeldGraphs(GraphRunner):
    def __init__(self, runner: ModelRunner, guard: DrafterGuard, enabled: bool) -> None:
        super().__init__(runner, guard, enabled)
        self._cuda = True

    def _make(self, work: Any, *inputs: Tensor, into: Tensors | None = None) -> Recorded:
        self.count += 1
        return Held(work, inputs, into)

    def _reserved(self) -> int:
        return 0
