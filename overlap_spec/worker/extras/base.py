"""Optional parts of a step: the contract, and which parts a request asks for.

A part is one file of this folder with one subclass of :class:`Extra`, which says what it plans,
computes, reads and attaches. Its name is the file's, and that of the field of
:class:`overlap_spec.SamplingParams` that asks for it, or one that the request's grammar asks for. A
part that nobody asks for costs a step nothing, and without its file all else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from overlap_spec.config import own_class
from overlap_spec.errors import ConfigError, InvalidRequest
from overlap_spec.models.decoder import Decoder
from overlap_spec.steps import Chunk, Int32s, Int64s, RowResult, StepPlan
from overlap_spec.types import Delta, Output, Request, SamplingParams
from overlap_spec.worker.batch import Batch
from overlap_spec.worker.kv_pool import KVPool


class Row(NamedTuple):
    """What a step brought one request, before the stop rules cut it.

    Attributes:
        step: The step's number.
        tokens, accepted, grafted, limited: As of :class:`overlap_spec.steps.RowResult`.
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


class Runner(Protocol):
    """What a part computes with: the target, its cache, and the rows' page tables ``tables.pages``,
    int64 ``(R, P)``."""

    target: Decoder
    pool: KVPool
    tables: Any
    device: torch.device

    def token_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Physical slots of tokens at ``positions (T,)`` of ``rows (T,)``."""


class Ask(NamedTuple):
    """What a part asks of one chunk, whose first token is number ``first`` of the step's chunks."""

    first: int
    chunk: Chunk
    what: Any


@dataclass
class Surroundings:
    """What parts may know of the engine: the grammars' ``vocabulary``; ``encode``, text → tokens,
    without special ones; ``longest``, most tokens of a prompt and its output; ``has_states``,
    whether the target has layers that keep a state, and no keys."""

    vocabulary: Any
    encode: Callable[[str], Sequence[int]]
    longest: int
    has_states: bool = False
    _shared: dict[str, Any] = field(default_factory=dict)

    def share(self, name: str, make: Callable[[Surroundings], Any]) -> Any:
        """What all requests share of a part, which is made once."""
        found = self._shared.get(name)
        return found or self._shared.setdefault(name, make(self))


class Extra:
    """A part, as one request has asked for it; it lives as long as the request. The scheduler plans
    with it, the worker computes and reads by its static methods, which may run in other threads and
    ranks, and the output processor attaches what came of it.

    Attributes:
        name: The part's, which is the file's.
        reads_rows: Whether :meth:`read_row` tells of each step's tokens.
        reads_tree: Whether it needs the drafted trees on the host for that.
    """

    name: ClassVar[str]
    reads_rows: ClassVar[bool] = False
    reads_tree: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """A part is called as its file is; one's own ``package.module:Class``."""
        package, _, file = cls.__module__.rpartition(".")
        cls.name = file if package == __package__ else f"{cls.__module__}:{cls.__name__}"

    def __init__(self, request: Request, engine: Surroundings) -> None:
        """Raises InvalidRequest where the part cannot do what is asked of it."""

    # Plan

    def reusable(self, tokens: int) -> int:
        """How many of the request's first ``tokens`` tokens may come from the cache."""
        return tokens

    def ask(self, start: int, end: int) -> Any:
        """What a chunk of the prompt's tokens ``start .. end - 1`` is asked, which is planned now;
        None: nothing. Ranks are sent it."""

    @property
    def passes(self) -> int:
        """Passes of its own behind the prompt, each with the prompt's last chunk, that have still
        to be planned; one that waits for another request's has one; at 0 the output begins."""
        return 0

    @property
    def most_behind(self) -> int:
        """Slots behind the prompt that the passes may write."""
        raise NotImplementedError

    @property
    def next_behind(self) -> int | None:
        """Slots that the next pass writes; None: not now."""
        raise NotImplementedError

    def ask_pass(self) -> Any:
        """What the next pass is asked, which is planned now. Ranks are sent it."""
        raise NotImplementedError

    def leave(self) -> None:
        """The request has lost its place, for now or for good; none of its steps is under way."""

    # Compute, on the prefill stream

    @staticmethod
    def compute(runner: Runner, hidden: Tensor, asked: Sequence[Ask]) -> tuple[Tensor, ...]:
        """What goes to the host of a step's chunks, by one call for all requests; ``hidden``
        ``(T, hidden_size)``: the target's last layer over all chunks' tokens."""
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

    def begin(self, row: RowResult, step: int) -> RowResult:
        """The first tokens of the output, or what it has instead of them."""
        del step
        return row

    def take(self, told: Any, kept: int) -> None:
        """Take in what :meth:`read_row` told of a step, ``kept`` tokens of which are output."""

    def pieces(self) -> Iterator[Delta]:
        """Pieces of its own that come before the request's next one."""
        yield from ()

    def attach(self, delta: Delta, first: int) -> Delta:
        """``delta``, whose tokens are the output's from ``first`` on, with what it has to tell."""
        del first
        return delta

    def complete(self, last: Delta, output: Output) -> tuple[Delta, Output]:
        """The last piece and the whole output, with what it has to tell."""
        return last, output


@cache
def load(name: str) -> type[Extra]:
    """The part of a name, which is a file's of this folder or ``package.module:Class``;
    InvalidRequest: there is none."""
    file, setting = f"{__package__}.{name}", name
    if ":" in name:
        file, setting = name, "parts"
    elif not (Path(__file__).parent / f"{name}.py").is_file():
        raise InvalidRequest(
            f"{name}: this installation is without that part (overlap_spec/worker/extras/{name}.py)"
            ": leave it out, or install overlap-spec again",
            name,
        )
    try:
        part: type[Extra] = own_class(file, Extra, f"{setting}:")
    except ConfigError as error:
        raise InvalidRequest(str(error), setting) from None
    return part


def extras_of(request: Request, engine: Surroundings) -> dict[str, Extra]:
    """The parts that a request asks for, by name; InvalidRequest names one that is not there."""
    names = request.sampling.extras
    if request.grammar is not None:
        names += request.grammar.extras
    return {name: load(name)(request, engine) for name in names}


def row_extras(sampling: SamplingParams) -> frozenset[type[Extra]]:
    """The parts that tell of each step's tokens, of those that are asked for."""
    return frozenset(part for part in map(load, sampling.extras) if part.reads_rows)


def told_of(parts: Iterable[type[Extra]], row: Row) -> dict[str, Any]:
    """What parts tell of a step's tokens, by name."""
    return {part.name: part.read_row(row) for part in parts}


def compute(runner: Runner, batch: Batch, hidden: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """What the parts compute of a step's chunks, by name; ``hidden`` as in :class:`Extra`."""
    chunks, asked = batch.plan.chunks, dict[str, list[Ask]]()
    if not any(chunk.asks for chunk in chunks):
        return {}
    ends = np.cumsum([len(chunk.tokens) for chunk in chunks]).tolist()
    for chunk, end in zip(chunks, ends, strict=True):
        for name, ask in chunk.asks.items():
            asked.setdefault(name, []).append(Ask(end - len(chunk.tokens), chunk, ask))
    return {name: load(name).compute(runner, hidden, each) for name, each in asked.items()}


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
