"""What rank 0 tells the other ranks of tensor parallelism: calls of the worker, and decisions.

A step takes two messages. The first has the calls up to its verify, the plan among them, as bytes
in a block of one size, so that one broadcast does; what does not fit follows in a second one. The
other, the step's decision with its mask rows, is an int32 tensor whose size the plan tells: one
broadcast.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overlap_spec.types import TOLD
from overlap_spec.worker.in_flight import InFlightStep

# A name of a method of the worker, and its arguments.
Call = tuple[str, tuple[Any, ...]]
# Lane, name, start and end in nanoseconds, step: what a `RecordSpan` takes.
SpanFields = tuple[str, str, int, int, int]
BLOCK_BYTES = 4096
LENGTH_BYTES = 8


def encode(what: Sequence[Any]) -> list[Tensor]:
    """The tensors to be broadcast, one after the other: uint8 ``(BLOCK_BYTES,)``, and what is
    left.

    Args:
        what: Calls; or a rank's spans, for which rank 0 has asked.
    """
    data = pickle.dumps(list(what), pickle.HIGHEST_PROTOCOL)
    whole = np.zeros(max(BLOCK_BYTES, LENGTH_BYTES + len(data)), np.uint8)
    whole[:LENGTH_BYTES].view(np.int64)[0] = len(data)
    whole[LENGTH_BYTES : LENGTH_BYTES + len(data)] = np.frombuffer(data, np.uint8)
    block, rest = torch.from_numpy(whole).tensor_split([BLOCK_BYTES])
    return [block, rest] if len(rest) else [block]


def decode(receive: Callable[[Tensor], None]) -> list[Any]:
    """What was encoded; ``receive`` fills a tensor with the next broadcast."""
    block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    receive(block)
    data = block.numpy()
    length = int(data[:LENGTH_BYTES].view(np.int64)[0])
    if length > BLOCK_BYTES - LENGTH_BYTES:
        rest = torch.empty(length - BLOCK_BYTES + LENGTH_BYTES, dtype=torch.uint8)
        receive(rest)
        data = np.concatenate([data, rest.numpy()])
    what: list[Any] = pickle.loads(data[LENGTH_BYTES : LENGTH_BYTES + length].tobytes())
    return what


def decision_sizes(step: InFlightStep) -> list[int]:
    """Numbers of a step's decision: whether it is accepted, which trees are free, and where any
    request has a grammar the depth limits, the runs and the mask rows."""
    plan, trees = step.plan, len(step.plan.decode_rows)
    if not step.constrained:
        return [1, trees, 0, 0, 0]
    nodes = trees * plan.tier.nodes + len(plan.final_chunks)
    words = step.buffers.masks.shape[1]
    return [1, trees, len(plan.verified), nodes * TOLD, nodes * words]


def pack_decision(step: InFlightStep, accepted: bool, free: Sequence[bool] = ()) -> Tensor:
    """What becomes of a step whose verify the others were told of: int32, on the host.

    Args:
        accepted: False: the step is dropped.
        free: As in :meth:`overlap_spec.worker.worker.Worker.accept`.
    """
    sizes, buffers = decision_sizes(step), step.buffers
    packed = torch.zeros(sum(sizes), dtype=torch.int32)
    head, inside, limits, runs, rows = packed.split(sizes)
    head.fill_(int(accepted))
    for index in range(min(len(free), len(inside))):
        inside[index] = int(free[index])
    if accepted:
        limits.copy_(buffers.limits[: len(limits)])
        runs.copy_(buffers.runs.view(-1)[: len(runs)])
        rows.copy_(buffers.masks.view(-1)[: len(rows)])
    return packed


def take_decision(step: InFlightStep, packed: Tensor) -> tuple[bool, list[bool]]:
    """Write a decision to the step's buffers; whether it is accepted, and which trees are free."""
    buffers = step.buffers
    head, inside, limits, runs, rows = packed.split(decision_sizes(step))
    accepted = bool(head[0])
    if accepted:
        buffers.limits.fill_(step.plan.tier.steps)
        buffers.limits[: len(limits)] = limits
        buffers.runs.view(-1)[: len(runs)] = runs
        buffers.masks.view(-1)[: len(rows)] = rows
    return accepted, inside.bool().tolist()
