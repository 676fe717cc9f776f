"""A GPU that is a table: what is queued on its streams takes the table's time, while the host's
code, the real one, plans, fills masks and reads.

Nothing on a stream depends on a value, and a wait captures a record that is already there: so when
a piece of work begins and ends is known when it is queued. What drafter and target would say is
known too: an :class:`Oracle` has each request's whole output, and hits it as often as it is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from overlap_spec.steps import RUN_TOKENS
from overlap_spec.types import Request
from overlap_spec.worker.graphs import packed_size
from overlap_spec.worker.packed_rows import pack_rows
from overlap_spec.worker.passes import (
    AcceptResult,
    Drafted,
    Prefilled,
    StepTensors,
    Verified,
)
from overlap_spec.worker.streams import Event, RecordSpan, Stream, Streams, Value

T = TypeVar("T")
Curve = Mapping[int, float]
# What has no column in a table, in microseconds of the device, and of the host for its launch.
LAUNCH_US = {"draft": 12.0, "verify": 12.0, "accept": 60.0, "extend": 12.0, "prefill": 1500.0}
OTHER_US, COPY_US, KERNEL_US = 10.0, 8.0, 2.0
# Kernels of a chain of 5 that a grammar's states add, and those of a tree with room for its runs
# (`tests/proofs/test_recordings.py` counts both).
TOLD_KERNELS, WIDE_KERNELS = 186, 85


@dataclass(frozen=True)
class Device:
    """A GPU with a model, by what each pass takes in microseconds; straight in between.

    Attributes:
        verify_us: By rows of the target's pass.
        draft_us: By requests, a chain of 5, greedy and without a grammar; other lengths take their
            share.
        accept_us, extend_us: By requests.
        prefill_us: By tokens.
        upload_gb_s: Of mask rows.
    """

    verify_us: Curve
    draft_us: Curve
    accept_us: Curve
    extend_us: Curve
    prefill_us: Curve
    upload_gb_s: float = 25.0


def at(curve: Curve, x: float) -> float:
    """A curve's value; beyond its ends as its last piece goes on, before its first point that."""
    xs = list(curve)
    if x > xs[-1] and len(xs) > 1:
        slope = (curve[xs[-1]] - curve[xs[-2]]) / (xs[-1] - xs[-2])
        return curve[xs[-1]] + slope * (x - xs[-1])
    return float(np.interp(x, xs, list(curve.values())))


ACCEPT_US, EXTEND_US = {1: 110, 16: 120, 64: 200}, {1: 310, 16: 350, 64: 600}
# All are estimates: the H100's of 8B parameters are those of a reading of this project's passes, at
# contexts of 512 in bfloat16; the others are scaled by bytes of weights and by bandwidth.
DEVICES = {
    "H100 8B": Device(
        {6: 6300, 96: 7000, 384: 11500}, {1: 1550, 16: 1700, 64: 2050}, ACCEPT_US, EXTEND_US,
        {1: 6300, 200: 7500, 1024: 28000},
    ),
    "4090 8B": Device(
        {6: 18500, 64: 19500, 384: 48000}, {1: 2600, 16: 2800, 64: 3600}, ACCEPT_US,
        {1: 500, 16: 600, 64: 1100}, {1: 18500, 128: 20500, 1024: 115000},
    ),
    "H100 0.75B": Device(
        {6: 1000, 96: 1150, 384: 2000}, {1: 900, 16: 950, 64: 1200}, ACCEPT_US,
        {1: 200, 16: 220, 64: 350}, {1: 1000, 200: 1300, 1024: 3300},
    ),
    "4090 0.75B": Device(
        {6: 1900, 96: 2400, 384: 5600}, {1: 1000, 16: 1100, 64: 1500}, ACCEPT_US,
        {1: 250, 16: 280, 64: 480}, {1: 1900, 128: 2300, 1024: 11500},
    ),
}  # fmt: skip


class HostClock:
    """The host's time in nanoseconds: the processor time of its thread, without what the
    simulation itself takes, and what it would have been busy or waiting for besides.

    So a run is as long as on a machine with nothing else to do, and no wait takes time.

    Attributes:
        waited_ns: How long the host has waited for the device, all in all.
    """

    def __init__(self, time_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self._time_ns, self._ahead_ns, self.waited_ns = time_ns, 0, 0

    def now(self) -> int:
        return self._time_ns() + self._ahead_ns

    def apart(self, work: Callable[[], T]) -> T:
        """Do ``work`` while the clock stands."""
        start = self._time_ns()
        try:
            return work()
        finally:
            self._ahead_ns -= self._time_ns() - start

    def spend(self, ns: int) -> None:
        """Be busy for so long, as a launch is."""
        self._ahead_ns += ns

    def wait(self, until_ns: int) -> None:
        """Wait until then."""
        left = max(0, until_ns - self.now())
        self._ahead_ns += left
        self.waited_ns += left


class TableEvent(Event):
    """A point in a stream's work, whose time is known as soon as it is recorded."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._passes: tuple[int, int] | None = None

    def set(self, time_ns: int, busy_ns: int) -> None:
        """It passes at ``time_ns``, until which its stream will have worked for ``busy_ns``."""
        self._passes = time_ns, busy_ns

    def reset(self) -> None:
        self._passes = None

    def captured(self) -> tuple[int, int]:
        if self._passes is None:
            raise RuntimeError("waiting on an event that was never recorded")
        return self._passes

    def synchronize(self) -> None:
        self._clock.wait(self.captured()[0])

    def elapsed_ms(self, later: Event) -> float:
        assert isinstance(later, TableEvent)
        return (later.captured()[0] - self.captured()[0]) / 1e6

    def idle_ms(self, later: Event) -> float:
        assert isinstance(later, TableEvent)
        (first, busy), (last, more) = self.captured(), later.captured()
        return max(0, last - first - (more - busy)) / 1e6

    @property
    def time_ns(self) -> int:
        return self.captured()[0]


class TableStream(Stream):
    """Work in order, each piece for as long as ``cost_us(label, result)`` says.

    Args:
        on_device: The work stands for a GPU's: the host's clock stands while it is computed, and
            goes on by a launch.
    """

    def __init__(
        self,
        name: str,
        clock: HostClock,
        cost_us: Callable[[str, Any], float],
        record: RecordSpan,
        on_device: bool,
    ) -> None:
        self.name, self._clock, self._cost_us = name, clock, cost_us
        self._record, self._on_device = record, on_device
        self.free_ns = self.busy_ns = 0

    def run(self, label: str, work: Callable[..., Any], *args: Any) -> Value[Any]:
        value: Value[Any] = Value()
        if self._on_device:
            value.set(self._clock.apart(lambda: work(*args)))
            self._clock.spend(int(LAUNCH_US.get(label, OTHER_US) * 1e3))
        else:
            value.set(work(*args))
        took = int(self._cost_us(label, value.get()) * 1e3)
        start = max(self.free_ns, self._clock.now())
        self.free_ns, self.busy_ns = start + took, self.busy_ns + took
        self._record(self.name, label, start, self.free_ns, self.step)
        return value

    def record(self, event: Event) -> None:
        assert isinstance(event, TableEvent)
        event.set(max(self.free_ns, self._clock.now()), self.busy_ns)

    def wait(self, event: Event) -> None:
        assert isinstance(event, TableEvent)
        self.free_ns = max(self.free_ns, event.captured()[0])


class Oracle:
    """What the target says, and how often the drafter guesses it.

    Args:
        texts: A request's prompt → its whole output; behind it nothing more is said.
        hit_rate: How often a draft is what the target says, given that those before it were.
    """

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], hit_rate: float) -> None:
        self._texts, self._hit_rate = dict(texts), hit_rate

    def tell(self, texts: Mapping[tuple[int, ...], Sequence[int]], keep: bool = False) -> None:
        """Add texts; ``keep``: those that are known stay as they are."""
        self._texts |= {**texts, **self._texts} if keep else texts

    def text(self, prompt_ids: tuple[int, ...]) -> Sequence[int]:
        """What is said behind a prompt."""
        return self._texts[prompt_ids]

    def of(self, request: Request) -> tuple[list[int], list[bool]]:
        """A request's output, and which of its tokens are guessed right."""
        said = list(self.text(tuple(request.prompt_ids)))
        coins = Random(repr(tuple(request.prompt_ids)))
        return said, [coins.random() < self._hit_rate for _ in said]


class TablePhases:
    """In the place of :class:`overlap_spec.worker.phases.Phases`: the same values for the host,
    from an oracle; and how long a GPU would take.

    Where a grammar forces a run, these tokens are drafted first, as the drafters do.

    Attributes:
        took_us: Of the last pass.
    """

    def __init__(self, streams: TableStreams, oracle: Oracle) -> None:
        self._streams, self.oracle, self.took_us = streams, oracle, 0.0
        self._said: dict[int, tuple[list[int], list[bool]]] = {}
        self._place: dict[int, int] = {}
        self._forced: dict[int, list[int]] = {}

    def write(self, row: int, request: Request, output_ids: Sequence[int]) -> None:
        """In the place of :meth:`overlap_spec.worker.tables.RowTables.write`."""
        self._said[row] = self.oracle.of(request)
        self._place[row], self._forced[row] = len(output_ids), []

    def enter_pages(self, step: StepTensors) -> None:
        """Nobody reads them."""

    def draft(self, step: StepTensors, *_: Any) -> None:
        """Chains: what is forced, then the drafter's guesses."""
        batch, plan, tier = step.batch, step.batch.plan, step.batch.plan.tier
        if not batch.trees:
            return
        links = np.full((3, len(batch.rows), tier.nodes), -1, np.int64)
        for number, row in enumerate(plan.decode_rows):
            said, hits = self._said[row]
            place, run = self._place[row], self._forced[row]
            wanted = min(max(len(run), tier.own.steps), tier.nodes - 1)
            links[0, number, 0] = said[place - 1]
            for depth in range(wanted):
                at_ = place + depth
                token = said[at_] if at_ < len(said) else 0
                if depth < len(run):
                    token = run[depth]
                elif at_ >= len(said) or not hits[at_]:
                    token += 1
                links[0, number, depth + 1] = token
                links[1, number, depth] = depth + 1
        device, told = self._streams.device, any(plan.grammar[: batch.trees])
        share = tier.own.steps / 5
        kernels = share * TOLD_KERNELS * told + WIDE_KERNELS * (tier.base is not None)
        self.took_us = at(device.draft_us, len(batch.rows)) * share + kernels * KERNEL_US
        self._drafted, self._rows = links, len(batch.rows)
        step.drafted = Drafted(None, None, torch.from_numpy(links), None, tier)  # type: ignore[arg-type]

    def verify(self, step: StepTensors) -> None:
        """As many rows as the GPU would verify; logits that nobody reads."""
        drafted = step.drafted
        if drafted is None:
            self.took_us = 0.0
            return
        nodes = drafted.tier.nodes
        rows = self._rows * nodes
        if drafted.tier.base is not None:
            rows = packed_size(self._rows, nodes, int((self._drafted[0] >= 0).sum()))
        self.took_us = at(self._streams.device.verify_us, rows)
        step.verified = Verified(torch.empty(rows, 0), None)

    def prefill(self, step: StepTensors) -> None:
        """Of the chunks' tokens."""
        assert step.batch.chunks is not None
        self.took_us = at(self._streams.device.prefill_us, len(step.batch.chunks.tokens))
        step.prefilled = Prefilled(None, None, {})

    def accept(self, step: StepTensors) -> None:
        """Drafts that are what the oracle says, and its next token."""
        batch, drafted, grammar = step.batch, step.drafted, step.grammar
        plan, trees, chunks = batch.plan, None, None
        runs = None if grammar is None else grammar.runs.numpy()[grammar.places.numpy() + 1]
        if drafted is not None:
            rows = plan.decode_rows
            found = [self._accept(row, n, drafted.tier.nodes, runs) for n, row in enumerate(rows)]
            trees = self._packed(found, drafted.tier.steps)
        if step.prefilled is not None and plan.final_chunks:
            first = 0 if drafted is None else len(batch.rows) * drafted.tier.nodes
            found = [
                self._entered(chunk.row, 0, 0, [], None if runs is None else runs[first + n])
                for n, chunk in enumerate(plan.final_chunks)
            ]
            chunks = self._packed(found, 0)
        self.took_us = at(self._streams.device.accept_us, max(len(plan.verified), 1))
        step.decided = trees, chunks

    def _accept(self, row: int, number: int, nodes: int, runs: Any) -> tuple[Any, ...]:
        """Accepted drafts, living ones, tokens and the run behind them, of one tree."""
        said, place = self._said[row][0], self._place[row]
        drafts = [int(token) for token in self._drafted[0, number, 1:] if token >= 0]
        length = 0
        for draft, wanted in zip(drafts, said[place:], strict=False):
            if draft != wanted:
                break
            length += 1
        behind = None if runs is None else runs[number * nodes + length]
        return self._entered(row, length, len(drafts), drafts[:length], behind)

    def _entered(
        self, row: int, length: int, living: int, drafts: list[int], behind: Any
    ) -> tuple[Any, ...]:
        said, place = self._said[row][0], self._place[row] + length
        bonus = said[place] if place < len(said) else 0
        run = [] if behind is None else behind[:RUN_TOKENS].tolist()
        run = [token for token in run[1:] if token >= 0] if run and run[0] == bonus else []
        # Nothing is said behind the end: a request is cut there.
        self._place[row] = min(place + 1, len(said))
        self._forced[row] = run
        return length, living, [*drafts, bonus], run

    def _packed(self, found: list[tuple[Any, ...]], steps: int) -> AcceptResult:
        lengths, living, tokens, runs = zip(*found, strict=True)
        scores = torch.full((len(found), steps + 2), -torch.inf)
        scores[:, : steps + 1] = 0.0
        packed = pack_rows(
            torch.tensor(lengths),
            torch.tensor(living),
            _table(tokens, steps + 1),
            scores,
            _table(runs, RUN_TOKENS - 1),
        )
        return AcceptResult(None, None, None, packed)  # type: ignore[arg-type]

    def extend(self, _: StepTensors) -> None:
        """Of the trees."""
        self.took_us = at(self._streams.device.extend_us, self._rows)

    def extend_chunks(self, step: StepTensors) -> None:
        """Of the chunks."""
        self.took_us = at(self._streams.device.extend_us, len(step.batch.plan.chunks))


def _table(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """int64 ``(R, width)``, -1 behind the end of each row."""
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])


class TableStreams(Streams):
    """The four streams of a GPU, as :class:`overlap_spec.worker.cuda.CudaStreams` has them.

    Attributes:
        device: Whose times are taken; may be changed between two runs.
        passes: What computes the passes' results, and tells their times.
    """

    def __init__(self, device: Device, record: RecordSpan, clock: HostClock | None = None) -> None:
        self.device, self.clock = device, clock or HostClock()
        self.passes: TablePhases | None = None
        self.compute, self.prefill, self.plan, self.copy = (
            TableStream(name, self.clock, self._cost_us, record, name in ("compute", "prefill"))
            for name in ("compute", "prefill", "plan", "copy")
        )

    def _cost_us(self, label: str, found: Any) -> float:
        device = self.device
        if label in LAUNCH_US and self.passes is not None:
            return self.passes.took_us
        if label == "masks":
            uploaded: Tensor = found.masks.rows
            return COPY_US + uploaded.nbytes / device.upload_gb_s / 1e3
        return COPY_US if label in ("tree", "results", "upload") else OTHER_US

    def event(self) -> Event:
        return TableEvent(self.clock)
