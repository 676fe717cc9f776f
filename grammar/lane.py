"""The grammar lane: accepts and fills of a whole batch on a few CPU threads.

A fault in one request is that request's result; the others go on. A call that does not return by
its deadline is left alone: its request goes on with its root's row if that was ready, or ends with
an error, and its matcher is quarantined, which means that nobody touches it, until the call
returns. The engine turns the spans into `grammar_ms`, their wall-clock union.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import numpy as np

from overlap_spec.errors import RequestFailed
from overlap_spec.grammar.contract import Links, Matcher, Row

STARVED_DEADLINES = 4


@dataclass(frozen=True, eq=False)
class AcceptItem:
    """Feed `tokens` (the kept ones, in order) to a request's matcher."""

    request_id: int
    matcher: Matcher
    tokens: Sequence[int]


@dataclass(frozen=True, eq=False)
class FillItem:
    """Fill the mask rows of a request's tree; arrays as in `Matcher.fill_tree`."""

    request_id: int
    matcher: Matcher
    tokens: Links
    first_child: Links
    next_sibling: Links
    rows: Row


@dataclass(frozen=True)
class LaneResult:
    """What became of one item.

    Args:
        request_id: The item's.
        accepted: Tokens accepted, in order, before the first rejected one; 0 for a fill.
        error: What was raised, or None. After an error the matcher may not be used again, and a
            fill's rows are all zero.
        start_ns: `time.perf_counter_ns` when the item's work began.
        end_ns: The same when it ended, or was left alone.
        root_only: The deadline passed, and of the rows the root's alone is there.
    """

    request_id: int
    accepted: int
    error: Exception | None
    start_ns: int
    end_ns: int
    root_only: bool = False


class _Job(ABC):
    """One item on its way through a runner."""

    def __init__(self, item: AcceptItem | FillItem, after: _Job | None) -> None:
        self.request_id, self.matcher, self.after = item.request_id, item.matcher, after
        self.accepted = 0
        self.started = self.root_ready = self.returned = self.left_alone = False
        self.error: Exception | None = None
        self.runner: threading.Thread | None = None
        self.start_ns = time.perf_counter_ns()
        self.start_cpu_ns = self.end_ns = 0

    @abstractmethod
    def work(self) -> None:
        """The calls into the matcher."""

    @abstractmethod
    def publish(self) -> None:
        """Hand over what was made, under the lane's lock."""

    @property
    def ready(self) -> bool:
        """Whether the matcher's last call has returned."""
        return self.after is None or self.after.returned

    def run(self) -> None:
        self.start_ns = time.perf_counter_ns()
        try:
            self.work()
        except Exception as caught:  # one request's fault must not end the batch
            self.error = caught

    def result(self) -> LaneResult:
        return LaneResult(
            self.request_id,
            self.accepted,
            self.error,
            self.start_ns,
            self.end_ns,
            self.left_alone and self.root_ready,
        )


class _Accept(_Job):
    def __init__(self, item: AcceptItem, after: _Job | None) -> None:
        super().__init__(item, after)
        self.tokens = item.tokens

    def work(self) -> None:
        for token in self.tokens:
            if not self.matcher.accept(int(token)):
                break
            self.accepted += 1

    def publish(self) -> None:
        """What was accepted is in the matcher."""


class _Fill(_Job):
    """Fills rows of its own first: a call that is left alone may write whenever it likes.

    ``scratch``: int32 ``(1 + nodes, words)``, the root's row by itself, then the tree's.
    """

    def __init__(self, item: FillItem, after: _Job | None, scratch: Row, root_first: bool) -> None:
        super().__init__(item, after)
        self.item, self.scratch, self.root_first = item, scratch, root_first

    def work(self) -> None:
        item = self.item
        if self.root_first and len(item.tokens) > 1:
            self.matcher.fill(self.scratch[0])
            self.root_ready = True
        self.matcher.fill_tree(item.tokens, item.first_child, item.next_sibling, self.scratch[1:])

    def publish(self) -> None:
        rows = self.item.rows
        if self.error is not None:
            rows.fill(0)
        elif self.left_alone:
            rows[1:] = 0
            rows[0] = self.scratch[0]
        else:
            rows[:] = self.scratch[1:]


class Lane:
    """Runs items over requests, at most one item a matcher in a batch.

    Args:
        threads: Runners; 0 runs inline, in the caller's thread, where no deadline can hold.
        deadline_ms: Time that one item's calls may take, or None for any. It is the thread's own
            time, or :data:`STARVED_DEADLINES` times as much by the clock.
    """

    def __init__(self, threads: int = 0, deadline_ms: float | None = None) -> None:
        if threads < 0:
            raise ValueError(f"threads must be 0 or more, got {threads}")
        self.threads = threads
        self._deadline_ns = None if deadline_ms is None else int(deadline_ms * 1e6)
        self._lock = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._latest: dict[int, _Job] = {}
        self._scratch: dict[int, Row] = {}
        self._closed = False
        self._runners: set[threading.Thread] = set()
        self._stuck: set[threading.Thread] = set()
        for _ in range(threads):
            self._start_runner()

    def accept_batch(self, items: Sequence[AcceptItem]) -> list[LaneResult]:
        """Accept each item's tokens until one is rejected; results in the items' order."""
        return self._run([_Accept(item, self._latest.get(item.request_id)) for item in items])

    def fill_batch(self, items: Sequence[FillItem]) -> list[LaneResult]:
        """Fill each item's rows; results in the items' order."""
        # Only under a deadline is a root's row of its own worth its time.
        root_first = self.threads > 0 and self._deadline_ns is not None
        jobs = [
            _Fill(item, self._latest.get(item.request_id), self._rows_for(item), root_first)
            for item in items
        ]
        return self._run(jobs)

    def forget(self, request_id: int) -> None:
        """Drop what is kept for a request that has ended."""
        self._latest.pop(request_id, None)
        self._scratch.pop(request_id, None)

    @property
    def quarantined(self) -> int:
        """Calls that were left alone and have not returned yet."""
        with self._lock:
            return len(self._stuck)

    def close(self) -> None:
        """End the threads; one inside a call that does not return ends with the process."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            idle = self._runners - self._stuck
        for thread in idle:
            thread.join()

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _rows_for(self, item: FillItem) -> Row:
        nodes, words = item.rows.shape
        rows = self._scratch.get(item.request_id)
        if rows is None or len(rows) <= nodes:
            rows = self._scratch[item.request_id] = np.zeros((nodes + 1, words), np.int32)
        return rows[: nodes + 1]

    def _run(self, jobs: Sequence[_Job]) -> list[LaneResult]:
        for job in jobs:
            self._latest[job.request_id] = job
        if self.threads == 0:
            for job in jobs:
                job.run()
                self._return(job)
        else:
            with self._lock:
                self._queue.extend(jobs)
                self._lock.notify_all()
                self._wait(set(jobs))
        return [job.result() for job in jobs]

    def _wait(self, pending: set[_Job]) -> None:
        """Until every job has returned or was left alone; the lock is held."""
        while pending := {job for job in pending if not (job.returned or job.left_alone)}:
            if self._deadline_ns is None:
                self._lock.wait()
                continue
            now, rest = time.perf_counter_ns(), self._deadline_ns
            for job in pending:
                # A job that waits for a runner is not late; one whose matcher is busy is.
                if job.started or not job.ready:
                    left = job.start_ns + self._deadline_ns - now
                    if left <= 0 and (job.root_ready or self._overdue(job, now)):
                        self._leave_alone(job)
                    rest = min(rest, left if left > 0 else self._deadline_ns // 4)
            self._lock.wait(rest / 1e9)

    def _overdue(self, job: _Job, now: int) -> bool:
        """Whether a job past its deadline used it: a thread that got no core is given longer."""
        assert self._deadline_ns is not None
        if job.runner is None or now - job.start_ns > STARVED_DEADLINES * self._deadline_ns:
            return True
        clock = time.pthread_getcpuclockid(cast(int, job.runner.ident))
        return time.clock_gettime_ns(clock) - job.start_cpu_ns > self._deadline_ns

    def _leave_alone(self, job: _Job) -> None:
        job.left_alone, job.end_ns = True, time.perf_counter_ns()
        if not job.root_ready:
            limit = (self._deadline_ns or 0) / 1e6
            job.error = RequestFailed(f"the grammar's matcher took longer than {limit:g} ms")
        job.publish()
        if job.runner is None:
            self._queue.remove(job)
            job.returned = True
        else:
            self._stuck.add(job.runner)
            self._start_runner()

    def _return(self, job: _Job) -> None:
        job.end_ns, job.returned = time.perf_counter_ns(), True
        job.publish()

    def _start_runner(self) -> None:
        thread = threading.Thread(target=self._loop, name="grammar-lane", daemon=True)
        self._runners.add(thread)
        thread.start()

    def _loop(self) -> None:
        me = threading.current_thread()
        while (job := self._take(me)) is not None:
            job.run()
            with self._lock:
                if job.left_alone:
                    # Another runner has taken this one's place.
                    job.returned = True
                    self._stuck.discard(me)
                    self._runners.discard(me)
                    self._lock.notify_all()
                    return
                self._return(job)
                self._lock.notify_all()

    def _take(self, me: threading.Thread) -> _Job | None:
        """The next job whose matcher is free; None when the lane closes."""
        with self._lock:
            while not self._closed:
                for job in self._queue:
                    if job.ready:
                        self._queue.remove(job)
                        job.started, job.runner = True, me
                        job.start_ns = time.perf_counter_ns()
                        job.start_cpu_ns = time.thread_time_ns()
                        return job
                self._lock.wait()
            return None
