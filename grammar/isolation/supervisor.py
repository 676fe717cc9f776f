"""Schedules grammars on workers, enforces their time limits and collects their results.

One thread does it all. It sleeps until an event and holds the interpreter lock for microseconds;
compiled grammars are deserialised on separate threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
import selectors
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from overlap_spec.children import OUTSIDE, is_stopped
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation import channel
from overlap_spec.grammar.isolation.answers import Answer, read_answer
from overlap_spec.grammar.isolation.channel import Message
from overlap_spec.grammar.isolation.fork_server_link import ForkServerLink
from overlap_spec.grammar.isolation.limits import CompileLimits
from overlap_spec.grammar.isolation.work_items import CompileWorker, WorkItem
from overlap_spec.grammar.isolation.worker import means_out_of_memory
from overlap_spec.grammar.state_table import StateTable
from overlap_spec.shares import FairQueue, has_room

# After so long, a fork server that is not ready is given up, and, with a ready one, a worker that
# has not started on its item.
READY_S, START_S = 60.0, 5.0
# How often processes are looked at while there is work.
LOOK_S = 1.0
LOADERS = 2


class Supervisor:
    """Queues and workers; only its thread may touch them, except the mailboxes and `snapshot`.

    Attributes:
        inbox, cancelled: Mailboxes of new and of cancelled work items; any thread appends.
        has_ended: The thread no longer reads the mailboxes.
        wakes: Sockets that wake the thread, reader and writer; set before it starts.
    """

    def __init__(self, backend: Backend, limits: CompileLimits) -> None:
        self.backend, self.limits = backend, limits
        self.inbox: deque[WorkItem] = deque()
        self.cancelled: deque[WorkItem] = deque()
        self.has_ended = False
        self.wakes: tuple[socket.socket, socket.socket] | None = None
        self.fast: FairQueue[WorkItem] = FairQueue(lambda item: item.holder)
        self.long: FairQueue[WorkItem] = FairQueue(lambda item: item.holder)
        self.workers: dict[int, CompileWorker] = {}
        self.link: ForkServerLink | None = None
        self.link_since_s = self.ready_s = 0.0
        self.numbers = itertools.count()
        self.forked = self.killed = 0

    def wake(self) -> None:
        """Make the thread read its mailboxes; from any thread."""
        # If the write fails, the thread is awake already or has ended.
        with contextlib.suppress(OSError):
            if self.wakes is not None:
                self.wakes[1].send(b"\0", socket.MSG_DONTWAIT)

    def snapshot(self) -> dict[str, Any]:
        """Queues and workers as plain data; from any thread, hence approximate."""
        busy = [worker for worker in list(self.workers.values()) if worker.item]
        link = self.link
        return {
            "isolated": True,
            "fork_server_pid": link.process.pid if link else None,
            "workers": len(self.workers),
            "fast_running": sum(not worker.is_long for worker in busy),
            "long_running": sum(worker.is_long for worker in busy),
            "fast_waiting": len(self.fast) + len(self.inbox),
            "long_waiting": len(self.long),
            "workers_forked": self.forked,
            "workers_killed": self.killed,
        }

    def refuse_all(self) -> None:
        """Fail all waiting items; from any thread, once `has_ended` is set."""
        for queue in (self.fast, self.long, self.inbox):
            with contextlib.suppress(IndexError):
                while True:
                    queue.popleft().fail("closed", "the engine was closed before its turn came")

    def run(self, is_wanted: Callable[[], bool]) -> None:
        """The thread's main loop; runs as long as `is_wanted`."""
        assert self.wakes is not None
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.wakes[0], selectors.EVENT_READ, None)
        self.loaders = ThreadPoolExecutor(LOADERS, "grammar-load")
        # While the fork server does the same.
        self.loaders.submit(self.backend.warm)
        try:
            while is_wanted():
                self._take_mail()
                self._schedule()
                for key, _ in self.selector.select(self._patience_s()):
                    self._handle(key.data)
                self._expire()
        finally:
            self._shut()

    def _shut(self) -> None:
        for worker in self.workers.values():
            worker.end.close()
            if worker.item:
                worker.item.fail("closed", "the engine was closed")
        self.workers.clear()
        if self.link:
            self.link.close()
            self.link = None
        self.loaders.shutdown(wait=True)
        self.selector.close()
        assert self.wakes is not None
        for wake in self.wakes:
            wake.close()
        self.has_ended = True
        self.refuse_all()

    def _take_mail(self) -> None:
        while self.inbox:
            item = self.inbox.popleft()
            # A table that waits takes no grammar's place.
            waiting = Counter(one.holder for one in self.fast if one.states == item.states)
            if has_room(waiting, item.holder, self.limits.fast_waiting):
                self.fast.append(item)
            else:
                item.fail("busy", "too many grammars are waiting; try again later")
        while self.cancelled:
            item = self.cancelled.popleft()
            for queue in (self.fast, self.long):
                if item in queue:
                    queue.remove(item)
            for worker in list(self.workers.values()):
                if worker.item is item:
                    self._kill(worker)

    # Scheduling.

    def _schedule(self) -> None:
        for queue, is_long in ((self.fast, False), (self.long, True)):
            while (item := self._next(queue, is_long)) and self._give(queue, item, is_long):
                continue
        # Fork a spare worker while the others are busy, so that no grammar waits for a fork.
        if all(worker.item for worker in self.workers.values()):
            self._fork()

    def _next(self, queue: FairQueue[WorkItem], is_long: bool) -> WorkItem | None:
        """The item whose turn it is, of the holders who may run one more."""
        line = queue.line(lambda holder: self._may_run(holder, is_long))
        return line[0] if line else None

    def _may_run(self, holder: str, is_long: bool) -> bool:
        limits, workers = self.limits, self.workers.values()
        busy = Counter(one.item.holder for one in workers if one.item and one.is_long == is_long)
        return has_room(busy, holder, limits.long_running if is_long else limits.fast_running)

    def _give(self, queue: FairQueue[WorkItem], item: WorkItem, is_long: bool) -> bool:
        for worker in [worker for worker in self.workers.values() if worker.item is None]:
            if self._send(worker, queue, item, is_long):
                return True
        new = self._fork()
        return new is not None and self._send(new, queue, item, is_long)

    def _send(
        self, worker: CompileWorker, queue: FairQueue[WorkItem], item: WorkItem, is_long: bool
    ) -> bool:
        grammar = dataclasses.replace(item.grammar, output=None)
        try:
            channel.send_body(worker.end, pickle.dumps((grammar, item.text, item.states)))
        except OSError:
            # The worker died while idle; the grammar goes to another one.
            self._kill(worker)
            return False
        queue.take(item)
        worker.item, worker.is_long = item, False
        worker.given_s, worker.started_s = time.monotonic(), None
        if is_long:
            self._make_long(worker)
        return True

    def _make_long(self, worker: CompileWorker) -> None:
        worker.is_long = worker.is_slow = True
        self._order(ForkServerLink.slow, worker)

    def _fork(self) -> CompileWorker | None:
        try:
            if self.link is None:
                self.link = ForkServerLink(self.backend, self.limits)
                self.link_since_s = time.monotonic()
                self.selector.register(self.link.end, selectors.EVENT_READ, self.link)
            number = next(self.numbers)
            worker = CompileWorker(number, self.link.fork(number))
        except OSError as error:
            self._blame_link(error)
            return None
        self.forked += 1
        self.workers[number] = worker
        self.selector.register(worker.end, selectors.EVENT_READ, worker)
        return worker

    # Ending workers.

    def _forget(self, worker: CompileWorker) -> None:
        if self.workers.pop(worker.number, None):
            self._hush(worker)
            worker.end.close()

    def _hush(self, worker: CompileWorker) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(worker.end)

    def _kill(self, worker: CompileWorker) -> None:
        self._forget(worker)
        self.killed += 1
        self._order(ForkServerLink.kill, worker)

    def _order(self, order: Callable[[ForkServerLink, int], None], worker: CompileWorker) -> None:
        try:
            if self.link:
                order(self.link, worker.number)
        except OSError as error:
            self._blame_link(error)

    def _blame_link(self, error: OSError) -> None:
        link = self.link
        if link:
            # The fork server may have reported the reason itself.
            self._take_events(link)
        if self.link is link:
            self._lose_link(f"{type(error).__name__}: {error}")

    def _lose_link(self, reason: str) -> None:
        """Drop a fork server that ended; its workers end with it."""
        link, self.link = self.link, None
        never_ready = link is None or not link.ready
        what = "cannot be started" if never_ready else "ended"
        text = f"compile workers {what} ({reason})"
        if link:
            with contextlib.suppress(KeyError):
                self.selector.unregister(link.end)
            link.close()
        for worker in list(self.workers.values()):
            self._forget(worker)
            if worker.item and never_ready:
                worker.item.fail("unavailable", text)
            elif worker.item:
                if link and worker.item.lost_by == link.process.pid:
                    # The worker before it was lost with the same fork server: one event, not two.
                    worker.item.lost_by = None
                self._again(worker, worker.item, text, link)
        if never_ready:
            # Another one would fail too; the next grammar tries again.
            for queue in (self.fast, self.long):
                while queue:
                    queue.popleft().fail("unavailable", text)

    def _again(
        self, worker: CompileWorker, item: WorkItem, reason: str, link: ForkServerLink | None
    ) -> None:
        """Give the item of a worker of `link` that was lost to a new one, once."""
        for idle in [one for one in self.workers.values() if one.item is None]:
            # What befell the one may have befallen them.
            self._kill(idle)
        if item.lost_by is not None:
            item.fail("unavailable", f"{reason}, for the second time; try again later")
        else:
            item.lost_by = link.process.pid if link else 0
            (self.long if worker.is_long else self.fast).put_back(item)

    # Receiving.

    def _handle(self, source: ForkServerLink | CompileWorker | None) -> None:
        if source is None:
            assert self.wakes is not None
            self.wakes[0].recv(4096)
        elif isinstance(source, CompileWorker):
            self._listen(source)
        elif source is self.link:
            self._take_events(source)

    def _take_events(self, link: ForkServerLink) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.link is link:
                event = link.event()
                if event is None:
                    self._lose_link("their fork server ended")
                elif event["event"] == "ready":
                    link.ready, self.ready_s = True, time.monotonic()
                elif event["event"] == "broken":
                    self._lose_link(event["message"])
                elif event["number"] in self.workers:
                    self._bury(
                        self.workers[event["number"]],
                        event["exit"],
                        event["output"],
                        event["room"],
                    )

    def _bury(self, worker: CompileWorker, code: int, output: str, room: bool) -> None:
        """Handle a worker that ended; its last message may still be in the channel.

        Args:
            room: Whether the machine has the memory that a compile may have.
        """
        self._listen(worker)
        self._forget(worker)
        item = worker.item
        if item is None:
            return
        if worker.started_s is None or -code in OUTSIDE:
            name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            self._again(worker, item, f"its worker process was ended by {name}", self.link)
            return
        if means_out_of_memory(output):
            self._fail_for_memory(item, "out_of_memory" if room else "no_memory")
            return
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        said = f": {' '.join(output.split())[:300]}" if output.strip() else ""
        item.fail("crash", f"its worker process ended with {how}{said}")

    def _listen(self, worker: CompileWorker) -> None:
        try:
            while worker.number in self.workers:
                message = channel.receive(worker.end)
                if message is None:
                    # The fork server will report how it ended.
                    self._hush(worker)
                    return
                self._take_answer(worker, message)
        except BlockingIOError:
            return
        except ValueError as error:
            # No fault of a library looks so: whatever wrote this is not to go on.
            self._kill(worker)
            if worker.item is not None:
                worker.item.fail("crash", f"its worker process sent what none sends: {error}")

    def _take_answer(self, worker: CompileWorker, message: Message) -> None:
        item = worker.item
        try:
            told = read_answer(message, item)
        except ValueError:
            channel.drop_body(message)
            raise
        assert item is not None
        answer = told.answer
        if answer == "started":
            worker.started_s, worker.pid = time.monotonic(), told.pid
            return
        worker.item = None
        if not told.goes_on or worker.is_slow:
            # Niceness cannot be lowered again: discard the worker, which ends with its channel.
            self._forget(worker)
        if answer in ("compiled", "rebuild", "states"):
            try:
                self.loaders.submit(self._load, item, message, told)
            except RuntimeError:
                channel.drop_body(message)
                item.fail("closed", "the interpreter is ending")
        elif answer == "checked":
            item.gives(told.violation)
        elif answer == "refused":
            item.raises(GrammarError(told.message, told.param))
        elif answer == "out_of_memory" or answer == "no_memory":
            self._fail_for_memory(item, answer)
        elif answer == "too_large":
            most = self.limits.result_bytes / 2**20
            item.fail("out_of_memory", f"its compiled form takes more than {most:g} MiB")
        else:
            item.fail("crash", told.message)

    def _fail_for_memory(self, item: WorkItem, kind: Literal["out_of_memory", "no_memory"]) -> None:
        """Fail an item that met its own limit, or the machine's."""
        most = f"{self.limits.memory_bytes / 2**20:g} MiB of memory"
        if kind == "out_of_memory":
            cause = "simplify it (long repetitions are the usual cause)"
            item.fail(kind, f"it took more than {most}; {cause}")
        else:
            item.fail(
                kind, f"the machine has less than the {most} that it may take; try again later"
            )

    def _load(self, item: WorkItem, message: Message, told: Answer) -> None:
        """Deserialise a worker's result; on a loader thread."""
        most = self.limits.result_bytes
        try:
            if told.answer == "states":
                body, size = channel.read_body(message, most), self.backend.vocabulary.size
                item.gives(StateTable.from_bytes(body, size))
                return
            if told.answer == "rebuild":
                compiled = self.backend.rebuild(item.grammar)
            else:
                compiled = self.backend.deserialize(item.grammar, channel.read_body(message, most))
            compiled.plan = told.plan.encode()
        except GrammarError as error:
            item.raises(error)
        except MemoryError:
            item.fail("no_memory", "this process has none left to read its compiled form")
        except Exception as error:
            item.fail("crash", f"it cannot be deserialised: {type(error).__name__}: {error}")
        else:
            item.gives(compiled)

    # Time limits.

    def _deadline_s(self, worker: CompileWorker) -> float:
        if worker.started_s is None:
            return max(worker.given_s, self.ready_s) + START_S
        limits = self.limits
        return worker.started_s + (limits.time_s if worker.is_long else limits.first_s)

    def _patience_s(self) -> float | None:
        """Seconds until the next deadline; None if nothing runs."""
        deadlines = [self._deadline_s(worker) for worker in self.workers.values() if worker.item]
        if not deadlines and (self.fast or self.long):
            # The workers are lost: start again at once.
            return 0.0
        if self.link and not self.link.ready:
            deadlines.append(self.link_since_s + READY_S)
        if not deadlines:
            return None
        return min(LOOK_S, max(0.0, min(deadlines) - time.monotonic()))

    def _expire(self) -> None:
        now_s = time.monotonic()
        link, busy = self.link, [worker for worker in self.workers.values() if worker.item]
        if link and not link.ready and now_s >= self.link_since_s + READY_S:
            self._lose_link(f"not ready after {READY_S:g} s")
        elif link and (busy or not link.ready) and is_stopped(link.process.pid):
            self._lose_link("their fork server was stopped")
        for worker in list(self.workers.values()):
            item = worker.item
            if item is None:
                continue
            if is_stopped(worker.pid):
                self._kill(worker)
                self._again(worker, item, "its worker process was stopped", link)
            elif now_s < self._deadline_s(worker):
                continue
            elif worker.started_s is None:
                if link and link.ready:
                    self._kill(worker)
                    reason = f"its worker did not start within {START_S:g} s"
                    self._again(worker, item, reason, link)
            elif worker.is_long or self.limits.time_s <= self.limits.fast_s:
                self._kill(worker)
                item.fail(
                    "timeout",
                    f"it took longer than {self.limits.time_s:g} s; simplify it "
                    "(long repetitions are the usual cause)",
                )
            else:
                self._outgrow(worker, item)

    def _outgrow(self, worker: CompileWorker, item: WorkItem) -> None:
        """Handle a compile that turns out long: continue it, queue it, or refuse it."""
        if self._may_run(item.holder, True):
            self._make_long(worker)
            return
        self._kill(worker)
        waiting = Counter(one.holder for one in self.long)
        if has_room(waiting, item.holder, self.limits.long_waiting):
            self.long.append(item)
        else:
            item.fail("busy", "it takes long, and too many such wait; try again later")
