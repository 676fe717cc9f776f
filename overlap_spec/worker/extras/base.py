"""Optional parts of a step: the contract, and which parts a request asks for.

A part is one file of this folder with one subclass of :class:`Extra`. Its name is the file's, and
that of the field of :class:`overlap_spec.SamplingParams` that asks for it. It says what the part
plans, computes, reads and attaches; a part that nobody asks for costs a step nothing, and without
its file all else runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from overlap_spec.errors import InvalidRequest
from overlap_spec.models.decoder import Decoder
from overlap_spec.steps import Int32s, Int64s, StepPlan
from overlap_spec.types import Delta, Output, Request, SamplingParams
from overlap_spec.worker.batch import Batch


class Row(NamedTuple):
    """What a step brought one request, before the stop rules cut it.

    Attributes:
        step: The step's number.
        tokens: Accepted drafts, then the bonus.
        accepted: How many of them are drafts.
        grafted: How many of these, which they begin, the grammar had forced.
        limited: Whether the root's mask row alone was there in time.
        links: int64 ``(3, nodes)``: tokens, first children, next siblings of its tree, where the
            tree went to the host; None of a tree of one node.
        masks: int32 ``(nodes, words)``: the mask row after each node, zero where the grammar's walk
            did not come; None where no mask chose the tokens.
    """

    step: int
    tokens: Sequence[int]
    accepted: int
    grafted: int
    limited: bool
    links: Int64s | None
    masks: Int32s | None


class Extra:
    """A part, as one request has asked for it; it lives as long as the request.

    The scheduler plans with it, the worker computes and reads by its static methods, which may run
    in other threads and ranks, and the output processor attaches what came of it.

    Attributes:
        name: The part's, which is the file's.
        reads_rows: Whether :meth:`read_row` tells of each step's tokens.
        reads_tree: Whether it needs the drafted trees on the host for that.
    """

    name: ClassVar[str]
    reads_rows: ClassVar[bool] = False
    reads_tree: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """A part is called as its file is."""
        cls.name = cls.__module__.rpartition(".")[2]

    def __init__(self, request: Request) -> None:
        """Raises InvalidRequest where the part cannot do what is asked of it."""

    # Plan

    def reusable(self, tokens: int) -> int:
        """How many of the request's first ``tokens`` tokens may come from the cache."""
        return tokens

    def ask(self, start: int, end: int) -> Any:
        """What a chunk of the prompt's tokens ``start .. end - 1`` is asked, which is planned now;
        None: nothing. Ranks are sent it."""

    # Compute, on the prefill stream

    @staticmethod
    def compute(
        target: Decoder, hidden: Tensor, asked: Sequence[tuple[int, Any]]
    ) -> tuple[Tensor, ...]:
        """What goes to the host of a step's chunks.

        Args:
            hidden: ``(T, hidden_size)``: the target's last layer over all chunks' tokens.
            asked: Of each chunk that is asked, its first token's index among the ``T``, and what.
        """
        raise NotImplementedError

    # Read, on the host

    @staticmethod
    def read(found: Sequence[Tensor], asked: Sequence[Any]) -> list[Any]:
        """What :meth:`compute` found for each of ``asked``."""
        raise NotImplementedError

    @staticmethod
    def read_row(row: Row) -> Any:
        """What there is to tell of a step's tokens."""
        raise NotImplementedError

    # Attach

    def hear(self, told: Any) -> None:
        """Take in what :meth:`read` told of a chunk; chunks come in their order."""

    def take(self, told: Any, kept: int) -> None:
        """Take in what :meth:`read_row` told of a step, ``kept`` tokens of which are output."""

    def pieces(self) -> Iterator[Delta]:
        """Pieces of its own that come before the request's next one."""
        yield from ()

    def attach(self, delta: Delta, first: int) -> Delta:
        """``delta``, whose tokens are the output's from ``first`` on, with what it has to tell."""
        del first
        return delta

    def complete(self, output: Output) -> Output:
        """The whole output, with what it has to tell."""
        return output


@cache
def load(name: str) -> type[Extra]:
    """The part of a name.

    Raises:
        InvalidRequest: it is not installed.
    """
    if not (Path(__file__).parent / f"{name}.py").is_file():
        raise InvalidRequest(
            f"{name}: this installation is without that part (overlap_spec/worker/extras/{name}.py)"
            ": leave it out, or install overlap-spec again",
            name,
        )
    found = vars(importlib.import_module(f"{__package__}.{name}")).values()
    (part,) = (v for v in found if isinstance(v, type) and issubclass(v, Extra) and v is not Extra)
    return part


def extras_of(request: Request) -> dict[str, Extra]:
    """The parts that a request asks for, by name; InvalidRequest names one that is not there."""
    return {name: load(name)(request) for name in request.sampling.extras}


def row_extras(sampling: SamplingParams) -> frozenset[type[Extra]]:
    """The parts that tell of each step's tokens, of those that are asked for."""
    return frozenset(part for part in map(load, sampling.extras) if part.reads_rows)


def compute(target: Decoder, batch: Batch, hidden: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """What the parts compute of a step's chunks, by name; ``hidden`` as in :class:`Extra`."""
    chunks, asked = batch.plan.chunks, dict[str, list[tuple[int, Any]]]()
    if not any(chunk.asks for chunk in chunks):
        return {}
    ends = np.cumsum([len(chunk.tokens) for chunk in chunks]).tolist()
    for chunk, end in zip(chunks, ends, strict=True):
        for name, ask in chunk.asks.items():
            asked.setdefault(name, []).append((end - len(chunk.tokens), ask))
    return {name: load(name).compute(target, hidden, each) for name, each in asked.items()}


def read(plan: StepPlan, found: Mapping[str, Sequence[Tensor]]) -> dict[int, dict[str, Any]]:
    """What :func:`compute` found, on the host: by request id, then by name."""
    told: dict[int, dict[str, Any]] = {}
    ids = plan.request_ids[len(plan.decode_rows) :]
    for name, parts in found.items():
        asking = [i for i, c in zip(ids, plan.chunks, strict=True) if name in c.asks]
        asks = [c.asks[name] for c in plan.chunks if name in c.asks]
        for request_id, value in zip(asking, load(name).read(parts, asks), strict=True):
            told.setdefault(request_id, {})[name] = value
    return told
