"""Runs a batch's matcher calls, accepts and fills, on a few CPU threads.

An error in one request is that request's result; the others continue. Past the deadline a tree's
fill is abandoned where its root's row is ready: the request continues with that, and loses the
step's drafts. What a request cannot go on without is waited for, since a machine that does other
work is slow as well. A call that does not return at all is abandoned after a much longer time, and
its request ends with an error. A matcher is quarantined (not used) until its call returns. The
engine combines the spans into `grammar_ms`, their wall-clock union.

Calls that take a part of a millisecond are faster in one thread than in many: more than half of
each is Python's work, which never runs side by side, and threads that want the interpreter make
each other wait. So one thread makes them all, and others are woken once none returns for a while.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np

from overlap_spec.errors import RequestFailed
from overlap_spec.grammar.contract import Links, Matcher, Row
from overlap_spec.grammar.drafting.forced import NO_OPENINGS, ForcedRuns
from overlap_spec.grammar.drafting.guesses import Guesses

# What calls that are worth a thread of their own take, at least.
LONG_S = 0.0005


class MatcherCall(ABC):
    """A call of one request's matcher, and what came of it once :meth:`MatcherPool.run` returns.

    Attributes:
        accepted: Tokens accepted, in order, before the first rejected one; 0 of a fill.
        error: The exception raised, or None. After an error the matcher may not be used again,
            and a fill's rows are all zero.
        start_ns, end_ns: `time.perf_counter_ns` when the work started, and when it ended or was
            abandoned.
        after: The matcher's call before it, until this one has run: a call that kept it would keep
            all calls of the output.
    """

    # Of the class until they change: a call is made for each request twice a step.
    accepted, openings = 0, NO_OPENINGS
    started = root_ready = returned = abandoned = root_first = False
    error: Exception | None = None
    runner: threading.Thread | None = None
    start_ns = end_ns = 0
    # What the pool lends.
    after: MatcherCall | None = None
    forced: ForcedRuns | None = None
    guesses: Guesses

    def __init__(self, request_id: int, matcher: Matcher) -> None:
        self.request_id, self.matcher = request_id, matcher

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

    @property
    def root_only(self) -> bool:
        """Whether the deadline passed, and only the root's row is filled."""
        return self.abandoned and self.root_ready

    @property
    def refused(self) -> int:
        """Drafts of the tree that the grammar forbids, or whose path it does."""
        return 0 if self.abandoned else self.openings.refused

    def run(self) -> Exception | None:
        """Do the work; what it raised."""
        self.start_ns, error = time.perf_counter_ns(), None
        try:
            self.work()
        except Exception as caught:  # one request's error must not end the batch
            error = caught
        self.after = None
        return error


class AcceptItem(MatcherCall):
    """Feed a request's kept `tokens`, in order, to its matcher, until one is rejected.

    They follow the root of the request's last tree: where text was forced, that is learned.
    """

    def __init__(self, request_id: int, matcher: Matcher, tokens: Sequence[int]) -> None:
        super().__init__(request_id, matcher)
        self.tokens = tokens

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


class FillItem(MatcherCall):
    """Fill the mask rows of a request's tree, and the runs behind its nodes.

    It fills rows of the pool's first, since an abandoned call may write at any time.

    Args:
        tree, rows: The arrays of `Matcher.fill_tree`.
        runs: Of `ForcedRuns.fill`: all -1 where the pool has no :attr:`MatcherPool.forced`.

    Attributes:
        scratch: int32 ``(1 + nodes, words)``, the root's row by itself, then the tree's.
    """

    scratch: Row
    found: Row | None = None

    def __init__(
        self, request_id: int, matcher: Matcher, *tree: Links, rows: Row, runs: Row
    ) -> None:
        super().__init__(request_id, matcher)
        self.tree, self.rows, self.runs = tree, rows, runs

    def work(self) -> None:
        rows = self.scratch[1:]
        if self.root_first and len(rows) > 1:
            self.matcher.fill(self.scratch[0])
            self.root_ready = True
        tokens, child, sibling = self.tree
        self.matcher.fill_tree(tokens, child, sibling, rows)
        if self.forced is not None:
            found, tree = np.empty_like(self.runs), (tokens, child, sibling)
            self.openings = self.forced.fill(self.matcher, *tree, rows, found, self.guesses)
            self.found = found

    def publish(self) -> None:
        if self.found is not None and not self.abandoned:
            self.runs[:] = self.found
        else:
            self.runs.fill(-1)
        if self.error is not None:
            self.rows.fill(0)
        elif self.abandoned:
            self.rows[1:] = 0
            self.rows[0] = self.scratch[0]
        else:
            self.rows[:] = self.scratch[1:]


class MatcherPool:
    """Makes the calls of a batch; at most one call per matcher.

    Args:
        threads: Number of threads; 0 makes the calls in the caller's thread, without time limits.
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
        # Calls of the batch under way that have neither returned nor were abandoned; threads that
        # are woken for it.
        self._pending, self._awake = 0, 1
        self._queue: deque[MatcherCall] = deque()
        self._latest: dict[int, MatcherCall] = {}
        self._scratch: dict[int, Row] = {}
        self._guesses: dict[int, Guesses] = {}
        self._closed = False
        self._runners: set[threading.Thread] = set()
        self._stuck: set[threading.Thread] = set()
        for _ in range(threads):
            self._start_runner()

    def run(self, calls: Sequence[MatcherCall]) -> None:
        """Make a batch's calls; each has its result then."""
        # A separate root row is worth its time only under a deadline.
        root_first = self.threads > 0 and self._deadline_ns < self._timeout_ns
        now_ns = time.perf_counter_ns()
        for call in calls:
            number = call.request_id
            call.after, call.forced, call.start_ns = self._latest.get(number), self.forced, now_ns
            call.guesses = self._guesses.get(number) or self.guesses(number)
            if isinstance(call, FillItem):
                call.scratch, call.root_first = self._rows_for(call), root_first
            self._latest[number] = call
        if self.threads == 0:
            for call in calls:
                self._return(call, call.run())
            return
        with self._lock:
            self._pending = len(calls)
            self._queue.extend(calls)
            self._work.notify(self._awake)
            self._awake = max(1, self._awake - 1)
            self._wait(calls)

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

    def _wait(self, calls: Sequence[MatcherCall]) -> None:
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
            self._wait_for_a_call(rest / 1e9)

    def _wait_for_a_call(self, most_s: float) -> None:
        """Wait until all calls have returned, or for a time; where none returns for long, wake
        twice as many threads, and as many for the next batch, less one."""
        end = time.perf_counter() + most_s
        while self._pending and (left_s := end - time.perf_counter()) > 0:
            before = self._pending
            self._done.wait(min(left_s, LONG_S) if self._queue else left_s)
            if self._queue and self._pending == before:
                self._work.notify(self._awake)
                self._awake = min(2 * self._awake, self.threads)

    def _abandon(self, call: MatcherCall) -> None:
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

    def _return(self, call: MatcherCall, error: Exception | None) -> None:
        call.error, call.end_ns, call.returned = error, time.perf_counter_ns(), True
        call.publish()

    def _start_runner(self) -> None:
        thread = threading.Thread(target=self._loop, name="grammar-matcher", daemon=True)
        self._runners.add(thread)
        thread.start()

    def _loop(self) -> None:
        me = threading.current_thread()
        while (call := self._take(me)) is not None:
            error = call.run()
            with self._lock:
                if call.abandoned:
                    # Another thread has replaced this one.
                    call.returned = True
                    self._stuck.discard(me)
                    self._runners.discard(me)
                    self._work.notify_all()
                    return
                self._return(call, error)
                self._pending -= 1
                if not self._pending:
                    self._done.notify()

    def _take(self, me: threading.Thread) -> MatcherCall | None:
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
