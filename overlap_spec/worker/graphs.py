"""Passes recorded once and replayed: CUDA graphs on a GPU, TorchScript traces on the CPU.

A recorded pass costs the host one call instead of hundreds: on a GPU, whose kernels are shorter
than their launches; on the CPU, where the interpreter's time is the compute stream's, and where
each operation would give the interpreter lock away and wait to have it back. What is recorded reads
and writes the caches and tables in place, and depends on nothing else but its inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from overlap_spec.kernels.scripting import Tensors as Tensors
from overlap_spec.kernels.scripting import Trace

Work = Callable[..., Tensors]
# Where a recording writes its outputs: of the same shapes and types as those that it is given.
Place = Callable[[Tensors], Tensors]


class Recorded(ABC):
    """A pass that is replayed; its outputs are overwritten by the next replay of the same pass."""

    @abstractmethod
    def __call__(self, *inputs: Tensor) -> Tensors:
        """The outputs for ``inputs`` of the recorded shapes (a trace: of any batch)."""

    def kept(self, *inputs: Tensor) -> Tensors:
        """The last call's ``inputs``, where they are now: what later passes need not copy again."""
        return inputs


class TracedGraph(Recorded):
    """Operations in the order in which they were seen, run without the interpreter. ``owner``
    holds every parameter and buffer that ``work`` touches."""

    def __init__(self, owner: nn.Module, work: Work, inputs: Tensors) -> None:
        self.trace = Trace(work, inputs, [*owner.parameters(), *owner.buffers()])
        self(*inputs)

    def __call__(self, *inputs: Tensor) -> Tensors:
        return self.trace(*inputs)


class Eager(Recorded):
    """A pass that is not recorded."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self, *inputs: Tensor) -> Tensors:
        return self._work(*inputs)


class CudaGraph(Recorded):
    """Kernels on fixed addresses, launched at once.

    Args:
        inputs: Kept: a call copies into them what is not there already, so that one graph's
            outputs can be another one's inputs.
        pool: Memory that graphs replayed one after the other share.
        place: Where the outputs are written to, of which graphs may share some; None: to memory of
            their own.

    Attributes:
        inputs, outputs: Where they are.
    """

    def __init__(self, work: Work, inputs: Tensors, pool: Any, place: Place | None = None) -> None:
        # Calls write to them, and others to the outputs: of an expanded tensor each element needs
        # its own memory.
        self.inputs = inputs = tuple(x.contiguous() for x in inputs)
        # Kernels are compiled and libraries set up by a run that is not captured. Its outputs lie
        # outside the pool, where each graph overwrites what others have left.
        found = work(*inputs)
        self.outputs = tuple(x.contiguous() for x in found) if place is None else place(found)
        del found
        self._graph = torch.cuda.CUDAGraph()
        # ``torch.cuda.graph`` would wait for the device first, and give back all memory that runs
        # have left: hundreds of times in a start. Other threads may allocate meanwhile.
        self._graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            for own, new in zip(self.outputs, work(*inputs), strict=True):
                own.copy_(new)
        finally:
            self._graph.capture_end()

    def __call__(self, *inputs: Tensor) -> Tensors:
        for own, given in zip(self.inputs, inputs, strict=True):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self.outputs

    def kept(self, *inputs: Tensor) -> Tensors:  # noqa: ARG002
        """Those that the graph holds."""
        return self.inputs


def padded_size(batch: int) -> int:
    """Rows that a batch is filled up to: all sizes to 8, then steps of an eighth of a power of 2.
    oneDNN keeps code for each number of rows that it has seen."""
    step = 1 << max(0, (batch - 1).bit_length() - 3)
    return -(-batch // step) * step


def graph_size(batch: int) -> int:
    """Rows that a CUDA graph has for a batch: to 8 in steps of a quarter of a power of 2, then of
    8, from 128 on as :func:`padded_size`."""
    step = min(8, 1 << max(0, (batch - 1).bit_length() - 2))
    return max(-(-batch // step) * step, padded_size(batch))


# Least number by which those of verified nodes differ: fewer take a GPU as long. And most numbers
# of nodes of one number of rows.
GRAIN_NODES, PACKED_SIZES = 32, 8


def packed_size(rows: int, nodes: int, wanted: int) -> int:
    """Nodes of ``rows`` trees of ``nodes`` that the smallest CUDA graph verifies which holds
    ``wanted``."""
    every = rows * nodes
    step = max(GRAIN_NODES, -(-every // PACKED_SIZES))
    return min(-(-wanted // step) * step, every)


def packed_sizes(rows: int, nodes: int) -> list[int]:
    """All that are less than whole trees, which the graph of these verifies."""
    every = rows * nodes
    return sorted({packed_size(rows, nodes, n) for n in range(rows, every)} - {every})


def powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and ``most``."""
    power = 1
    while power < most:
        yield power
        power *= 2
    yield most
