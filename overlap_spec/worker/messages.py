"""What rank 0 tells the other ranks of tensor parallelism: calls of the worker, and decisions.

A step takes two messages. The first has the calls up to its verify, the plan among them, as bytes
in a block of one size, so that one broadcast does; what does not fit follows in a second one. The
other, the step's decision with its mask rows, is an int32 tensor whose size the plan tells: one
broadcast.

Calls are pickled, so that who can send them can run anything in a rank: they are signed with the
group's key, and not looked at unless they are. What a rank answers, its spans, is plain data.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from overlap_spec.steps import TOLD
from overlap_spec.worker.in_flight import InFlightStep

# A name of a method of the worker, and its arguments.
Call = tuple[str, tuple[Any, ...]]
# Lane, name, start and end in nanoseconds, step: what a `RecordSpan` takes.
SpanFields = tuple[str, str, int, int, int]
BLOCK_BYTES = 4096
LENGTH_BYTES, SIGNATURE_BYTES = 8, 32


def encode_calls(calls: Sequence[Call], key: bytes) -> list[Tensor]:
    """The tensors to be broadcast, one after the other: uint8 ``(BLOCK_BYTES,)``, and what is
    left.

    Args:
        key: Of the group.
    """
    data = pickle.dumps(list(calls), pickle.HIGHEST_PROTOCOL)
    return _in_blocks(_signature(data, key) + data)


def decode_calls(receive: Callable[[Tensor], None], key: bytes) -> list[Call]:
    """What was encoded; ``receive`` fills a tensor with the next broadcast.

    Raises:
        RuntimeError: it does not come from rank 0.
    """
    whole = _from_blocks(receive)
    signature, data = whole[:SIGNATURE_BYTES], whole[SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(data, key)):
        raise RuntimeError("calls that rank 0 has not signed")
    calls: list[Call] = pickle.loads(data)
    return calls


def encode_spans(spans: Sequence[SpanFields]) -> list[Tensor]:
    """A rank's spans, for which rank 0 has asked, as tensors to be broadcast."""
    return _in_blocks(msgspec.msgpack.encode(spans))


def decode_spans(receive: Callable[[Tensor], None]) -> list[SpanFields]:
    """What :func:`encode_spans` has made.

    Raises:
        ValueError: these are no spans.
    """
    try:
        return msgspec.msgpack.decode(_from_blocks(receive), type=list[SpanFields])
    except msgspec.MsgspecError as error:
        raise ValueError(f"a rank sent no spans: {error}") from None


def _signature(data: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SIGNATURE_BYTES, key=key).digest()


def _in_blocks(data: bytes) -> list[Tensor]:
    whole = np.zeros(max(BLOCK_BYTES, LENGTH_BYTES + len(data)), np.uint8)
    whole[:LENGTH_BYTES].view(np.int64)[0] = len(data)
    whole[LENGTH_BYTES : LENGTH_BYTES + len(data)] = np.frombuffer(data, np.uint8)
    block, rest = torch.from_numpy(whole).tensor_split([BLOCK_BYTES])
    return [block, rest] if len(rest) else [block]


def _from_blocks(receive: Callable[[Tensor], None]) -> bytes:
    block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    receive(block)
    data = block.numpy()
    length = int(data[:LENGTH_BYTES].view(np.int64)[0])
    if length > BLOCK_BYTES - LENGTH_BYTES:
        rest = torch.empty(length - BLOCK_BYTES + LENGTH_BYTES, dtype=torch.uint8)
        receive(rest)
        data = np.concatenate([data, rest.numpy()])
    return data[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()


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
