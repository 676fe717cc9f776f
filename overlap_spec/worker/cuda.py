"""CUDA's streams and events behind the contract of ``worker/streams.py``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from overlap_spec.worker.streams import Event, Record, Stream, Streams, Value, call

T = TypeVar("T")


class CudaClock:
    """Translates events into the host's clock, ``time.perf_counter_ns``.

    Distances are single-precision milliseconds, so they are taken from an event of late.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))
        self._event.synchronize()
        self._ns = time.perf_counter_ns()

    def ns(self, event: torch.cuda.Event) -> int:
        """When ``event``, which has passed, did so."""
        return self._ns + int(self._event.elapsed_time(event) * 1e6)

    def rebase(self, event: torch.cuda.Event) -> None:
        """Measure from ``event`` from now on; it is never recorded again."""
        self._event, self._ns = event, self.ns(event)


class CudaEvent(Event):
    """A CUDA event with a clock."""

    def __init__(self, clock: CudaClock) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.recorded = False
        self._clock = clock

    def captured(self) -> torch.cuda.Event:
        if not self.recorded:
            raise RuntimeError("waiting on an event that was never recorded")
        return self.event

    def synchronize(self) -> None:
        self.captured().synchronize()

    def elapsed_ms(self, later: Event) -> float:
        assert isinstance(later, CudaEvent)
        milliseconds: float = self.captured().elapsed_time(later.captured())
        return milliseconds

    @property
    def time_ns(self) -> int:
        return self._clock.ns(self.captured())


class _Span(NamedTuple):
    label: str
    step: int
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaStream(Stream):
    """A CUDA stream: work is launched at once and runs in order on the device.

    Args:
        record: Takes the spans of the work, once :meth:`note` finds that it has passed.
    """

    def __init__(
        self, name: str, device: torch.device, clock: CudaClock, record: Record | None
    ) -> None:
        self.name = name
        self._stream = torch.cuda.Stream(device)
        self._clock, self._record = clock, record
        self._spans: deque[_Span] = deque()

    def run(self, label: str, work: Callable[..., T], *args: Any) -> Value[T]:
        value: Value[T] = Value()
        with torch.cuda.stream(self._stream), torch.cuda.nvtx.range(label):
            if self._record is None:
                value.set(call(work, args))
                return value
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            value.set(call(work, args))
            end.record()
        self._spans.append(_Span(label, self.step, start, end))
        return value

    def note(self) -> None:
        """Record the spans of work that has passed."""
        assert self._record is not None
        while self._spans and self._spans[0].end.query():
            label, step, start, end = self._spans.popleft()
            self._record(self.name, label, self._clock.ns(start), self._clock.ns(end), step)
            self._clock.rebase(end)

    def synchronize(self) -> None:
        """Block the host until all that is queued has run."""
        self._stream.synchronize()

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.event.record(self._stream)
        event.recorded = True

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.captured())


class CudaStreams(Streams):
    """The streams of a GPU."""

    def __init__(self, device: torch.device, record: Record | None = None) -> None:
        self._clock, self._record = CudaClock(device), record
        self._all = [
            CudaStream(name, device, self._clock, record) for name in ("compute", "plan", "copy")
        ]
        self.compute, self.plan, self.copy = self._all

    def event(self) -> Event:
        return CudaEvent(self._clock)

    def note(self) -> None:
        if self._record is not None:
            for stream in self._all:
                stream.note()

    def close(self) -> None:
        for stream in self._all:
            stream.synchronize()
