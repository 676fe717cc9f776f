"""Streams and events: the contract, and CPU threads behind it (CUDA's: ``worker/cuda.py``).

A stream runs what it is given in order, beside the other streams and the host. The step's code is
one for all kinds, so that its races are there, and tested, without a GPU. On every kind:

- ``run`` hands work over and returns at once. What the work returns, or leaves, is read by later
  work that is ordered after it, or by the host when an event recorded after it has passed.
- A wait captures the latest record of its event. Waiting on an event that was never recorded
  raises; CUDA alone would silently not wait.
- After work that raised, a stream does nothing but pass its events; the error is raised to the
  host where it next waits for an event of that stream.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import torch

from overlap_spec.kernels import cpu
from overlap_spec.kernels.dispatch import has_native_products

T = TypeVar("T")
RecordSpan = Callable[[str, str, int, int, int], None]


class Value(Generic[T]):
    """What a piece of work will have returned."""

    def __init__(self) -> None:
        self._value: T | None = None

    def set(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        """The value; only where the work is known to be done (CUDA: to be queued)."""
        return cast(T, self._value)


class Event(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the latest record has passed; RuntimeError: never recorded."""

    @abstractmethod
    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from this event to ``later``, negative if it came first; both passed."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the latest record; what waits for it goes on waiting."""

    @abstractmethod
    def idle_ms(self, later: Event) -> float:
        """Milliseconds between this event and ``later``, of one stream, in which that had no work
        under way; both passed."""

    @property
    @abstractmethod
    def time_ns(self) -> int:
        """When it passed, on the host's clock."""


class Stream(ABC):
    """A queue of work. ``step``: of which the spans of what is queued from now on are."""

    name: str
    step: int = 0

    @abstractmethod
    def run(self, label: str, work: Callable[..., T], *args: Any) -> Value[T]:
        """Queue ``work(*args)``."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Queue the passing of ``event``."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let what is queued from now on wait for the latest record of ``event``; RuntimeError:
        never recorded."""

    def note(self) -> None:  # noqa: B027
        """Record the spans of what has passed by now, where that is not done as they end."""

    def close(self) -> None:  # noqa: B027
        """End its thread, if it has one, after what is queued."""


class Streams:
    """The streams of one worker, and its events, on the CPU if nothing else is said. ``prefill``
    may be ``compute``, where there is nothing to gain from two."""

    compute: Stream
    prefill: Stream
    plan: Stream
    copy: Stream

    def begin(self, step: int) -> None:
        """Count what is queued from now on towards ``step``."""
        for stream in (self.compute, self.prefill, self.plan, self.copy):
            stream.step = step

    def join_prefill(self) -> None:
        """Have compute do what prefill is given, in the order in which it comes."""
        if self.prefill is not self.compute:
            self.prefill.close()
            self.prefill = self.compute

    def event(self) -> Event:
        """A new event of this kind of streams."""
        return HostEvent()

    def note(self) -> None:
        """:meth:`Stream.note` of all."""
        for stream in (self.compute, self.prefill, self.plan, self.copy):
            stream.note()

    def close(self) -> None:
        """:meth:`Stream.close` of all."""
        for stream in dict.fromkeys((self.compute, self.prefill, self.plan, self.copy)):
            stream.close()


class _Passing:
    """One record of a CPU event: when it passed, the error that came before it, and how long its
    stream had worked by then."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.time_ns = self.busy_ns = 0
        self.error: BaseException | None = None


class HostEvent(Event):
    """An event of streams that run on the CPU."""

    def __init__(self) -> None:
        self.latest: _Passing | None = None

    def reset(self) -> None:
        self.latest = None

    def captured(self) -> _Passing:
        if self.latest is None:
            raise RuntimeError("waiting on an event that was never recorded")
        return self.latest

    def synchronize(self) -> None:
        passing = self.captured()
        passing.passed.wait()
        if passing.error is not None:
            raise passing.error

    def elapsed_ms(self, later: Event) -> float:
        assert isinstance(later, HostEvent)
        return (later.captured().time_ns - self.captured().time_ns) / 1e6

    def idle_ms(self, later: Event) -> float:
        assert isinstance(later, HostEvent)
        first, last = self.captured(), later.captured()
        return max(0, last.time_ns - first.time_ns - (last.busy_ns - first.busy_ns)) / 1e6

    @property
    def time_ns(self) -> int:
        return self.captured().time_ns


class InlineStream(Stream):
    """Does its work at once, in the caller's thread: nothing overlaps. ``threads``: of a pass;
    None: those of the caller."""

    def __init__(
        self, name: str, record: RecordSpan | None = None, threads: int | None = None
    ) -> None:
        self.name, self._record, self._threads, self._busy_ns = name, record, threads, 0

    def run(self, label: str, work: Callable[..., T], *args: Any) -> Value[T]:
        value: Value[T] = Value()
        start = time.perf_counter_ns()
        with pass_threads(self._threads):
            value.set(work(*args))
        end = time.perf_counter_ns()
        self._busy_ns += end - start
        if self._record is not None:
            self._record(self.name, label, start, end, self.step)
        return value

    def record(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        passing = event.latest = _Passing()
        passing.time_ns, passing.busy_ns = time.perf_counter_ns(), self._busy_ns
        passing.passed.set()

    def wait(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        event.captured()


class ThreadStream(Stream):
    """A thread that does its work in order. ``threads``: of a pass; None: those of the process."""

    def __init__(
        self, name: str, record: RecordSpan | None = None, threads: int | None = None
    ) -> None:
        self.name, self._record = name, record
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._busy_ns = 0
        self._thread = threading.Thread(target=self._loop, name=f"stream-{name}", daemon=True)
        self._thread.start()
        if threads is not None:
            self._set_threads(threads)

    def _set_threads(self, threads: int) -> None:
        """Set the number in the stream's own thread; the process and the caller keep theirs."""
        done, before = threading.Event(), torch.get_num_threads()

        def job() -> None:
            # Asked first: a thread that has not computed yet would forget what it is told.
            torch.get_num_threads()
            set_pass_threads(threads)
            done.set()

        self._queue.put(job)
        done.wait()
        # It also became the number of threads that have not computed yet.
        torch.set_num_threads(before)

    def run(self, label: str, work: Callable[..., T], *args: Any) -> Value[T]:
        return self.run_for(self, label, work, *args)

    def run_for(self, guest: Stream, label: str, work: Callable[..., T], *args: Any) -> Value[T]:
        """:meth:`Stream.run`; the span is ``guest``'s."""
        value: Value[T] = Value()
        name, step = guest.name, guest.step

        def job() -> None:
            if self._error is not None:
                return
            start = time.perf_counter_ns()
            try:
                value.set(work(*args))
            except BaseException as error:
                self._error = error
            end = time.perf_counter_ns()
            self._busy_ns += end - start
            if self._record is not None:
                self._record(name, label, start, end, step)

        self._put(job)
        return value

    def record(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        passing = event.latest = _Passing()

        def job() -> None:
            passing.time_ns, passing.busy_ns = time.perf_counter_ns(), self._busy_ns
            passing.error = self._error
            passing.passed.set()

        self._put(job)

    def wait(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        passing = event.captured()

        def job() -> None:
            passing.passed.wait()
            self._error = self._error or passing.error

        self._put(job)

    def _put(self, job: Callable[[], None]) -> None:
        self._queue.put(job)

    def _loop(self) -> None:
        with torch.inference_mode():
            while (job := self._queue.get()) is not None:
                job()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class GuestStream(Stream):
    """A stream of short work that a thread stream does in its own order: to wake a thread of its
    own, with the interpreter's lock, would cost more than that work."""

    def __init__(self, name: str, host: ThreadStream) -> None:
        self.name, self._host = name, host

    def run(self, label: str, work: Callable[..., T], *args: Any) -> Value[T]:
        return self._host.run_for(self, label, work, *args)

    def record(self, event: Event) -> None:
        self._host.record(event)

    def wait(self, event: Event) -> None:
        self._host.wait(event)


class InlineStreams(Streams):
    """For the serial mode on the CPU."""

    def __init__(self, record: RecordSpan | None = None, threads: int | None = None) -> None:
        self.compute = self.prefill = InlineStream("compute", record, threads)
        self.plan = InlineStream("plan", record, threads)
        self.copy = InlineStream("copy", record, threads)


class CpuStreams(Streams):
    """Threads where there is work for them: plans are packed in the host's own, and compute's
    copies what it has made. ``prefill``: whether a core is left for a thread of its own."""

    def __init__(
        self, record: RecordSpan | None = None, threads: int | None = None, prefill: bool = True
    ) -> None:
        self.compute = self.prefill = compute = ThreadStream("compute", record, threads)
        self.plan, self.copy = InlineStream("plan", record), GuestStream("copy", compute)
        if prefill:
            self.prefill = ThreadStream("prefill", record, threads)


def get_pass_threads() -> int:
    """Threads that passes compute with in this thread."""
    team = cpu.team() if has_native_products() else 0
    return team or torch.get_num_threads()


def set_pass_threads(count: int) -> int:
    """Let passes compute with ``count`` threads in this thread; the native products' team there
    was, 0: they are not native. Where they are, torch's operations run on one thread: their team
    would spin for milliseconds after each, on the other one's cores."""
    team = 0
    if has_native_products():
        team, count = cpu.set_team(count), 1
    torch.set_num_threads(count)
    return team


@contextmanager
def pass_threads(count: int | None) -> Iterator[None]:
    """:func:`set_pass_threads` for a while; None changes nothing."""
    if count is None:
        yield
        return
    threads, team = torch.get_num_threads(), set_pass_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if has_native_products():
            cpu.set_team(team)
