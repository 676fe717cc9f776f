"""Passes recorded once and replayed: CUDA graphs on a GPU, TorchScript traces on the CPU.

A recorded pass costs the host one call instead of hundreds: on a GPU, whose kernels are shorter
than their launches; on the CPU, where the interpreter's time is the compute stream's, and where
every operation by itself would give the interpreter lock away and wait to have it back.

A CUDA graph is one tier's and one batch size's; a trace is one tier's, whatever the batch and its
pages, and the target's is good for all chains, or for all trees. What is recorded reads and writes
the caches and tables in place, and depends on nothing else but its inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from overlap_spec.kernels.scripting import Tensors as Tensors
from overlap_spec.kernels.scripting import Trace


class Recorded(ABC):
    """A pass that is replayed; its outputs are overwritten by the next replay of the same pass."""

    @abstractmethod
    def __call__(self, *inputs: Tensor) -> Tensors:
        """The outputs for ``inputs`` of the recorded shapes (a trace: of any batch)."""

    def kept(self, *inputs: Tensor) -> Tensors:
        """The last call's ``inputs``, where they are now: what later passes need not copy again."""
        return inputs


class TracedGraph(Recorded):
    """Operations in the order in which they were seen, run without the interpreter.

    Args:
        owner: Holds every parameter and buffer that ``work`` touches.
    """

    def __init__(self, owner: nn.Module, work: Callable[..., Tensors], inputs: Tensors) -> None:
        self.trace = Trace(work, inputs, [*owner.parameters(), *owner.buffers()])
        self(*inputs)

    def __call__(self, *inputs: Tensor) -> Tensors:
        return self.trace(*inputs)


class Eager(Recorded):
    """A pass that is not recorded."""

    def __init__(self, work: Callable[..., Tensors]) -> None:
        self._work = work

    def __call__(self, *inputs: Tensor) -> Tensors:
        return self._work(*inputs)


class CudaGraph(Recorded):
    """Kernels on fixed addresses, launched at once.

    Args:
        inputs: Kept: a call copies into them what is not there already, so that one graph's
            outputs can be another one's inputs.
        pool: Memory that graphs replayed one after the other share.
    """

    def __init__(self, work: Callable[..., Tensors], inputs: Tensors, pool: Any) -> None:
        # Kernels are compiled and libraries set up by a run that is not captured.
        work(*inputs)
        self._inputs, self._graph = inputs, torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self._graph,
            pool,
            torch.cuda.current_stream(),
            # Other threads may allocate meanwhile.
            capture_error_mode="thread_local",
        ):
            self._outputs = work(*inputs)

    def __call__(self, *inputs: Tensor) -> Tensors:
        for own, given in zip(self._inputs, inputs, strict=True):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def kept(self, *inputs: Tensor) -> Tensors:  # noqa: ARG002
        """Those that the graph holds."""
        return self._inputs


def padded_size(batch: int) -> int:
    """Rows that a batch is filled up to: all sizes to 8, then steps of an eighth of a power of 2.

    So few sizes need recording; and oneDNN keeps code for each number of rows that it has seen.
    """
    step = 1 << max(0, (batch - 1).bit_length() - 3)
    return -(-batch // step) * step


def padded(x: Tensor, rows: int) -> Tensor:
    """``x`` with zeros after it, up to ``rows`` rows."""
    if len(x) == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
