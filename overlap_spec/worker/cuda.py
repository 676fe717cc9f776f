"""CUDA's streams and events behind the contract of ``worker/streams.py``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from overlap_spec.worker.streams import Event, RecordSpan, Stream, Streams, Value

T = TypeVar("T")


class CudaClock:
    """Translates events into the host's clock, ``time.perf_counter_ns``: by single-precision
    milliseconds from an event of late. :meth:`hold` keeps the two clocks together."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))
        self._event.synchronize()
        self._ns = time.perf_counter_ns()

    def ns(self, event: torch.cuda.Event) -> int:
        """When ``event``, which has passed, did so."""
        return self._ns + int(self._event.elapsed_time(event) * 1e6)

    def hold(self, event: torch.cuda.Event, queued_ns: int, seen_ns: int) -> None:
        """Correct the translation by an event that was queued at ``queued_ns`` on the host's clock
        and seen to have passed at ``seen_ns``."""
        found = self.ns(event)
        self._ns += min(max(found, queued_ns), seen_ns) - found

    def rebase(self, event: torch.cuda.Event) -> torch.cuda.Event:
        """Measure from ``event`` from now on, which is not recorded again until this returns it:
        the event that was measured from before."""
        before = self._event
        self._event, self._ns = event, self.ns(event)
        return before


class CudaEvent(Event):
    """A CUDA event with a clock."""

    def __init__(self, clock: CudaClock) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.recorded_on: CudaStream | None = None
        self.spans_before = 0
        self._clock = clock

    def reset(self) -> None:
        self.recorded_on = None

    def captured(self) -> torch.cuda.Event:
        if self.recorded_on is None:
            raise RuntimeError("waiting on an event that was never recorded")
        return self.event

    def synchronize(self) -> None:
        self.captured().synchronize()

    def elapsed_ms(self, later: Event) -> float:
        assert isinstance(later, CudaEvent)
        milliseconds: float = self.captured().elapsed_time(later.captured())
        return milliseconds

    def idle_ms(self, later: Event) -> float:
        assert isinstance(later, CudaEvent)
        assert self.recorded_on is not None
        busy_ms = self.recorded_on.busy_ms(self.spans_before, later.spans_before)
        return max(0.0, self.elapsed_ms(later) - busy_ms)

    @property
    def time_ns(self) -> int:
        return self._clock.ns(self.captured())


# Spans whose length is remembered: those of more steps than are ever under way.
REMEMBERED_SPANS = 64


class _Span(NamedTuple):
    label: str
    step: int
    queued_ns: int
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaStream(Stream):
    """A CUDA stream: work is launched at once and runs in order on the device. Its timing events
    are pooled: a step makes none.

    Args:
        record: Takes the spans of the work, once :meth:`note` finds that it has passed.
        priority: As CUDA's: the lower number goes first.
    """

    def __init__(
        self, name: str, device: torch.device, clock: CudaClock, record: RecordSpan, priority: int
    ) -> None:
        self.name = name
        self._stream = torch.cuda.Stream(device, priority)
        self._clock, self._record = clock, record
        self._spans: deque[_Span] = deque()
        self._free: list[torch.cuda.Event] = []
        self._started = self._noted = 0
        self._lengths_ms: deque[float] = deque(maxlen=REMEMBERED_SPANS)

    def run(self, label: str, work: Callable[..., T], *args: Any) -> Value[T]:
        value: Value[T] = Value()
        with torch.cuda.stream(self._stream), torch.cuda.nvtx.range(label):
            start, end = self._event(), self._event()
            queued_ns = time.perf_counter_ns()
            start.record()
            value.set(work(*args))
            end.record()
        self._spans.append(_Span(label, self.step, queued_ns, start, end))
        self._started += 1
        return value

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def note(self) -> None:
        while self._spans and self._spans[0].end.query():
            label, step, queued_ns, start, end = self._spans.popleft()
            self._clock.hold(end, queued_ns, time.perf_counter_ns())
            self._clock.hold(start, queued_ns, time.perf_counter_ns())
            self._record(self.name, label, self._clock.ns(start), self._clock.ns(end), step)
            self._lengths_ms.append(start.elapsed_time(end))
            self._noted += 1
            self._free += (start, self._clock.rebase(end))

    def busy_ms(self, first: int, last: int) -> float:
        """Time that spans number ``first .. last - 1`` took, which have passed."""
        self.note()
        oldest = self._noted - len(self._lengths_ms)
        return sum(self._lengths_ms[i - oldest] for i in range(max(first, oldest), last))

    def close(self) -> None:
        """Block the host until all that is queued has run."""
        self._stream.synchronize()

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.event.record(self._stream)
        event.recorded_on, event.spans_before = self, self._started

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.captured())


class CudaStreams(Streams):
    """The streams of a GPU: what ``plan`` and ``copy`` do is short, and others wait for it; prompts
    take what the trees leave."""

    def __init__(self, device: torch.device, record: RecordSpan) -> None:
        self._clock = CudaClock(device)
        self.compute, self.prefill, self.plan, self.copy = (
            CudaStream(name, device, self._clock, record, priority)
            for name, priority in (("compute", -1), ("prefill", 0), ("plan", -2), ("copy", -2))
        )

    def event(self) -> Event:
        return CudaEvent(self._clock)
