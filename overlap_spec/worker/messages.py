"""What rank 0 tells the other ranks of tensor parallelism: calls of the worker, and decisions.

A step takes two messages. The first has the calls up to its verify, the plan among them, as bytes
in a block of one size, so that one broadcast does; what does not fit follows in a second one. The
other is its decision: an int32 tensor whose size the plan tells, and where a request has a grammar
one of mask rows, whose size the trees tell: those of all ranks are the same, which is checked.

Calls are pickled, so who can send them can run anything in a rank: they are signed with the group's
key, and not read unless they are. What a rank answers, its spans, is plain data.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from overlap_spec.worker.in_flight import InFlightStep

# A name of a method of the worker, and its arguments.
Call = tuple[str, tuple[Any, ...]]
# Lane, name, start and end in nanoseconds, step: what a `RecordSpan` takes.
SpanFields = tuple[str, str, int, int, int]
BLOCK_BYTES = 4096
LENGTH_BYTES, SIGNATURE_BYTES = 8, 32


def encode_calls(calls: Sequence[Call], key: bytes) -> list[Tensor]:
    """The tensors to be broadcast: uint8 ``(BLOCK_BYTES,)``, and what is left. ``key``: the
    group's."""
    data = pickle.dumps(list(calls), pickle.HIGHEST_PROTOCOL)
    return _in_blocks(_signature(data, key) + data)


def decode_calls(receive: Callable[[Tensor], None], key: bytes) -> list[Call]:
    """What was encoded; ``receive`` fills a tensor with the next broadcast. RuntimeError: it does
    not come from rank 0."""
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
    """What :func:`encode_spans` has made; ValueError: these are no spans."""
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


def pack_decision(step: InFlightStep, accepted: bool, free: Sequence[bool] = ()) -> list[Tensor]:
    """What becomes of a step whose verify the others were told of, as tensors to be broadcast: the
    head, and where a step with a grammar is ``accepted``, not dropped, the runs and the mask rows.
    ``free``: as in :meth:`overlap_spec.worker.worker.Worker.accept`.
    """
    head = torch.zeros(sum(_head_sizes(step)), dtype=torch.int32)
    told, inside, limits = head.split(_head_sizes(step))
    told[0] = int(accepted)
    some = free[: len(inside)]
    inside[: len(some)] = torch.tensor(some)
    if not (accepted and step.constrained):
        return [head]
    told[1], rows, runs = _mark(step), *_body(step)
    limits.copy_(step.buffers.limits.host[: len(limits)])
    return [head, torch.cat([runs.flatten(), rows.flatten()])]


def take_decision(step: InFlightStep, receive: Callable[[Tensor], None]) -> tuple[bool, list[bool]]:
    """Write a decision to the step's buffers; whether it is accepted, and which trees are free.
    ``receive`` fills a tensor with the next broadcast. RuntimeError: this rank has drafted other
    trees than rank 0."""
    head = torch.empty(sum(_head_sizes(step)), dtype=torch.int32)
    receive(head)
    told, inside, limits = head.split(_head_sizes(step))
    accepted = bool(told[0])
    if accepted and step.constrained:
        step.read_trees()
        if int(told[1]) != _mark(step):
            raise RuntimeError("this rank has drafted other trees than rank 0: one is at fault")
        step.buffers.limits.host[: len(limits)] = limits
        rows, runs = _body(step)
        body = torch.empty(runs.numel() + rows.numel(), dtype=torch.int32)
        receive(body)
        for own, new in zip((runs, rows), body.split([runs.numel(), rows.numel()]), strict=True):
            own.copy_(new.view_as(own))
    return accepted, inside.bool().tolist()


def _head_sizes(step: InFlightStep) -> list[int]:
    """Numbers of a decision's head: whether it is accepted, and its trees' mark; which trees are
    free; and where any request has a grammar the depth limits."""
    plan = step.plan
    return [2, len(plan.decode_rows), len(plan.verified) if step.constrained else 0]


def _mark(step: InFlightStep) -> int:
    """A number that equal trees have in common."""
    assert step.trees is not None
    return zlib.crc32(step.trees.tokens.data, zlib.crc32(step.trees.offsets.data)) >> 1


def _body(step: InFlightStep) -> tuple[Tensor, Tensor]:
    """The mask rows and runs of a step's nodes, where the lane wrote them."""
    assert step.trees is not None
    return torch.from_numpy(step.trees.rows), torch.from_numpy(step.trees.runs)
