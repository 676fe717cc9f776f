"""Recordings with a CUDA graph's manners, on the CPU."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from overlap_spec.steps import StepPlan
from overlap_spec.worker import build as build_module
from overlap_spec.worker.cuda_graphs import CudaGraphs
from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.drafts import Drafts
from overlap_spec.worker.graphs import Place, Recorded, Tensors
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.recordings import Recordings


class Held(Recorded):
    """A CUDA graph's manners on the CPU: one size of batch, inputs and outputs in fixed places.

    Attributes:
        copied: Which of its inputs it has copied, by number.
    """

    def __init__(self, work: Any, inputs: Tensors, place: Place | None = None) -> None:
        # As a graph does: of an expanded tensor each element needs its own memory.
        inputs = tuple(x.contiguous() for x in inputs)
        self._work, self._inputs = work, inputs
        places = [x.data_ptr() for x in inputs if x.numel()]
        assert len(set(places)) == len(places), "two inputs share their memory"
        self.copied: set[int] = set()
        found = work(*inputs)
        self._outputs = tuple(x.clone() for x in found) if place is None else place(found)

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


class HeldGraphs(CudaGraphs):
    def make(self, work: Any, inputs: Tensors, place: Place | None = None) -> Recorded:
        self.count += 1
        return Held(work, inputs, place)

    def reserved(self) -> int:
        return 0


def all_columns(phase: Phases, _: StepPlan) -> int:
    """In the place of what a CPU's trees read of the page tables."""
    return phase.runner.tables.pages.shape[1]


def change_traits(monkeypatch: pytest.MonkeyPatch, **fields: bool) -> None:
    """Engines made from now on have a worker of other traits."""
    of = build_module.traits_of
    monkeypatch.setattr(build_module, "traits_of", lambda phases: replace(of(phases), **fields))


def serve_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings of one size each, over all columns of the page tables; and a warm start."""
    monkeypatch.setattr(build_module, "recordings_of", held_graphs)
    monkeypatch.setattr(Phases, "_visible", all_columns)
    change_traits(monkeypatch, compiles=True)


def held_graphs(drafts: Drafts, guard: DrafterGuard, recorded: bool) -> Recordings:
    """In the place of :func:`overlap_spec.worker.build.recordings_of`."""
    return HeldGraphs(drafts, guard) if recorded else Recordings(drafts, guard, False)
