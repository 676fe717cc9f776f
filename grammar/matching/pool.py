"""Runs a batch's matcher calls, accepts and fills, on a few CPU threads.

An error in one request is that request's result; the others continue. Past the deadline a tree's
fill is abandoned where its root's row is ready: the request continues with that, and loses the
step's drafts. What a request cannot go on without is waited for, since a machine that does other
work is slow as well. A call that does not return at all is abandoned after a much longer time, and
its request ends with an error. A matcher is quarantined (not used) until its call returns. The
engine combines the spans into `grammar_ms`, their wall-clock union.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from overlap_spec.errors import RequestFailed
from overlap_spec.grammar.contract import Links, Matcher, Row
from overlap_spec.grammar.drafting.forced import NO_OPENINGS, ForcedRuns
from overlap_spec.grammar.drafting.guesses import Guesses


class AcceptItem(NamedTuple):
    """Feed a request's kept `tokens`, in order, to its matcher."""

    request_id: int
    matcher: Matcher
    tokens: Sequence[int]


class FillItem(NamedTuple):
    """Fill the mask rows of a request's tree, and the runs behind its nodes.

    Arrays are those of `Matcher.fill_tree`, and of `ForcedRuns.fill`: all -1 where the pool has no
    :attr:`MatcherPool.forced`.
    """

    request_id: int
    matcher: Matcher
    tokens: Links
    first_child: Links
    next_sibling: Links
    rows: Row
    runs: Row


class PoolResult(NamedTuple):
    """The result of one item.

    Args:
        request_id: Of the item.
        accepted: Tokens accepted, in order, before the first rejected one; 0 for a fill.
        error: The exception raised, or None. After an error the matcher may not be used again,
            and a fill's rows are all zero.
        start_ns: `time.perf_counter_ns` when the item's work started.
        end_ns: The same when it ended or was abandoned.
        root_only: The deadline passed, and only the root's row is filled.
        refused: Drafts of the tree that the grammar forbids, or whose path it does.
    """

    request_id: int
    accepted: int
    error: Exception | None
    start_ns: int
    end_ns: int
    root_only: bool = False
    refused: int = 0


class _Around(NamedTuple):
    """What a request's call needs beside its item; ``after``: the matcher's call before it."""

    after: _MatcherCall | None
    forced: ForcedRuns | None
    guesses: Guesses
    now_ns: int


class _MatcherCall(ABC):
    """The matcher calls of one item.

    ``after``: as in `_Around`, until this one has run: a call that kept it would keep all calls of
    the output.
    """

    # Of the class until they change: a call is made for each request twice a step.
    accepted, openings = 0, NO_OPENINGS
    started = root_ready = returned = abandoned = False
    error: Exception | None = None
    runner: threading.Thread | None = None
    end_ns = 0

    def __init__(self, item: AcceptItem | FillItem, around: _Around) -> None:
        self.request_id, self.matcher = item.request_id, item.matcher
        self.after: _MatcherCall | None
        self.after, self.forced, self.guesses, self.start_ns = around

    @abstractmethod
    def work(self) -> None:
        """Call the matcher."""

    @abstractmethod
    def publish(self) -> None:
        """Hand over the result, under the pool's lock."""

    @property
    def ready(self) -> bool:
        """Whether the matcher's last call has returned."""
        after = self.after  # Its own thread may let go of it meanwhile.
        return after is None or after.returned

    def run(self) -> None:
        self.start_ns = time.perf_counter_ns()
        try:
            self.work()
        except Exception as caught:  # one request's error must not end the batch
            self.error = caught
        self.after = None

    def result(self) -> PoolResult:
        return PoolResult(
            self.request_id,
            self.accepted,
            self.error,
            self.start_ns,
            self.end_ns,
            self.abandoned and self.root_ready,
            0 if self.abandoned else self.openings.refused,
        )


class _AcceptCall(_MatcherCall):
    def __init__(self, item: AcceptItem, around: _Around) -> None:
        super().__init__(item, around)
        self.tokens = item.tokens

    def work(self) -> None:
        forced, filled = self.forced, self.after
        if forced is not None:
            if filled is not None and not filled.abandoned:
                forced.learn(filled.openings, self.tokens, self.guesses)
            forced.read(self.tokens, self.guesses)
        accept = self.matcher.accept
        for token in self.tokens:
            if not accept(int(token)):
                break
            self.accepted += 1

    def publish(self) -> None:
        """Nothing to do: the matcher holds the result."""


class _FillCall(_MatcherCall):
    """Fills rows of its own first, since an abandoned call may write at any time.

    ``scratch``: int32 ``(1 + nodes, words)``, the root's row by itself, then the tree's. ``runs``:
    likewise, its runs.
    """

    runs: Row | None = None

    def __init__(self, item: FillItem, around: _Around, scratch: Row, root_first: bool) -> None:
        super().__init__(item, around)
        self.item, self.scratch, self.root_first = item, scratch, root_first

    def work(self) -> None:
        item = self.item
        if self.root_first and len(item.tokens) > 1:
            self.matcher.fill(self.scratch[0])
            self.root_ready = True
        tree = item.tokens, item.first_child, item.next_sibling, self.scratch[1:]
        self.matcher.fill_tree(*tree)
        if self.forced is not None:
            runs = np.empty_like(item.runs)
            self.openings = self.forced.fill(self.matcher, *tree, runs, self.guesses)
            self.runs = runs

    def publish(self) -> None:
        rows, runs = self.item.rows, self.item.runs
        if self.runs is not None and not self.abandoned:
            runs[:] = self.runs
        else:
            runs.fill(-1)
        if self.error is not None:
            rows.fill(0)
        elif self.abandoned:
            rows[1:] = 0
            rows[0] = self.scratch[0]
        else:
            rows[:] = self.scratch[1:]


class MatcherPool:
    """Runs items of a batch; at most one item per matcher.

    Args:
        threads: Number of threads; 0 runs items in the caller's thread, without time limits.
        deadline_ms: What a tree's fill may take before its drafts are given up, or None.
        timeout_s: What any call may take before its request is.
        forced: Tells the runs behind the nodes of trees; None where nobody asks for them.
    """

    def __init__(
        self,
        threads: int = 0,
        deadline_ms: float | None = None,
        timeout_s: float = 10.0,
        forced: ForcedRuns | None = None,
    ) -> None:
        if threads < 0:
            raise ValueError(f"threads must be 0 or more, got {threads}")
        self.threads, self.forced = threads, forced
        self._timeout_ns = int(timeout_s * 1e9)
        self._deadline_ns = self._timeout_ns if deadline_ms is None else int(deadline_ms * 1e6)
        self._lock = threading.Lock()
        # A call to take; a batch to return.
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        # Calls of the batch under way that have neither returned nor were abandoned.
        self._pending = 0
        self._queue: deque[_MatcherCall] = deque()
        self._latest: dict[int, _MatcherCall] = {}
        self._scratch: dict[int, Row] = {}
        self._guesses: dict[int, Guesses] = {}
        self._closed = False
        self._runners: set[threading.Thread] = set()
        self._stuck: set[threading.Thread] = set()
        for _ in range(threads):
            self._start_runner()

    def accept_batch(self, items: Sequence[AcceptItem]) -> list[PoolResult]:
        """Accept each item's tokens until one is rejected; results in the items' order.

        They follow the root of the request's last tree: where text was forced, that is learned.
        """
        return self._run([_AcceptCall(item, self._around(item.request_id)) for item in items])

    def fill_batch(self, items: Sequence[FillItem]) -> list[PoolResult]:
        """Fill each item's rows; results in the items' order."""
        # A separate root row is worth its time only under a deadline.
        root_first = self.threads > 0 and self._deadline_ns < self._timeout_ns
        calls = [
            _FillCall(item, self._around(item.request_id), self._rows_for(item), root_first)
            for item in items
        ]
        return self._run(calls)

    def _around(self, request_id: int) -> _Around:
        guesses = self._guesses.get(request_id) or self.guesses(request_id)
        return _Around(self._latest.get(request_id), self.forced, guesses, time.perf_counter_ns())

    def guesses(self, request_id: int) -> Guesses:
        """How well a request's forced text is guessed."""
        found = self._guesses.get(request_id)
        if found is None:
            weighed = self.forced is not None and self.forced.weighed
            found = self._guesses[request_id] = Guesses(weighed)
        return found

    def forget(self, request_id: int) -> None:
        """Drop the state of a request that has ended."""
        self._guesses.pop(request_id, None)
        self._latest.pop(request_id, None)
        self._scratch.pop(request_id, None)

    def close(self) -> None:
        """End the threads; one whose call does not return ends with the process."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            idle = self._runners - self._stuck
        for thread in idle:
            thread.join()

    def __enter__(self) -> MatcherPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows_for(self, item: FillItem) -> Row:
        nodes, words = item.rows.shape
        rows = self._scratch.get(item.request_id)
        if rows is None or len(rows) <= nodes:
            rows = self._scratch[item.request_id] = np.zeros((nodes + 1, words), np.int32)
        return rows[: nodes + 1]

    def _run(self, calls: Sequence[_MatcherCall]) -> list[PoolResult]:
        for call in calls:
            self._latest[call.request_id] = call
        if self.threads == 0:
            for call in calls:
                call.run()
                self._return(call)
        else:
            with self._lock:
                self._pending = len(calls)
                self._queue.extend(calls)
                self._work.notify(len(calls))
                self._wait(calls)
        return [call.result() for call in calls]

    def _wait(self, calls: Sequence[_MatcherCall]) -> None:
        """Wait until every call has returned or was abandoned; holds the lock."""
        while self._pending:
            now, rest = time.perf_counter_ns(), self._deadline_ns
            for call in calls:
                # A call that waits for a thread is not late; one whose matcher is busy is.
                waits = call.ready and not call.started
                if call.returned or call.abandoned or waits:
                    continue
                took = now - call.start_ns
                if took >= (self._deadline_ns if call.root_ready else self._timeout_ns):
                    self._abandon(call)
                # Past the deadline the root's row may be ready at any time.
                left = self._deadline_ns - took
                rest = min(rest, left if left > 0 else self._deadline_ns // 4)
            if self._pending:
                self._done.wait(rest / 1e9)

    def _abandon(self, call: _MatcherCall) -> None:
        call.abandoned, call.end_ns = True, time.perf_counter_ns()
        self._pending -= 1
        if not call.root_ready:
            limit = self._timeout_ns / 1e9
            call.error = RequestFailed(f"the grammar's matcher did not return within {limit:g} s")
        call.publish()
        if call.runner is None:
            self._queue.remove(call)
            call.returned = True
        else:
            self._stuck.add(call.runner)
            self._start_runner()

    def _return(self, call: _MatcherCall) -> None:
        call.end_ns, call.returned = time.perf_counter_ns(), True
        call.publish()

    def _start_runner(self) -> None:
        thread = threading.Thread(target=self._loop, name="grammar-matcher", daemon=True)
        self._runners.add(thread)
        thread.start()

    def _loop(self) -> None:
        me = threading.current_thread()
        while (call := self._take(me)) is not None:
            call.run()
            with self._lock:
                if call.abandoned:
                    # Another thread has replaced this one.
                    call.returned = True
                    self._stuck.discard(me)
                    self._runners.discard(me)
                    self._work.notify_all()
                    return
                self._return(call)
                self._pending -= 1
                if not self._pending:
                    self._done.notify()

    def _take(self, me: threading.Thread) -> _MatcherCall | None:
        """The next call whose matcher is free; None when the pool closes."""
        with self._lock:
            while not self._closed:
                for call in self._queue:
                    if call.ready:
                        self._queue.remove(call)
                        call.started, call.runner = True, me
                        call.start_ns = time.perf_counter_ns()
                        return call
                self._work.wait()
            return None
