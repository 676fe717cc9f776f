"""Does jobs in workers, a task each: waits for its turn, enforces its limits, and reads its answer.

One thread runs it. It sleeps until an event and holds the interpreter lock for microseconds;
answers are read on separate threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from overlap_spec.children import OUTSIDE, is_stopped
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation import channel
from overlap_spec.grammar.isolation.channel import Message
from overlap_spec.grammar.isolation.jobs import Job, means_out_of_memory
from overlap_spec.grammar.isolation.limits import CompileFailure, CompileLimits, FailureKind
from overlap_spec.grammar.isolation.link import ForkServerLink, Worker
from overlap_spec.grammar.isolation.worker import Answer, read_answer
from overlap_spec.shares import Lane

# After so long, a fork server that is not ready is given up, and, with a ready one, a worker that
# has not started on its job.
READY_S, START_S = 60.0, 5.0
# How often processes are looked at while there is work.
LOOK_S = 1.0
LOADERS = 2
SIMPLIFY = "simplify it (long repetitions are the usual cause)"


class Failed(Exception):
    """A job has failed: the kind and the reason of its `CompileFailure`."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class _Lost(Exception):
    """A worker of fork server ``by`` was lost, which is not its job's fault."""

    def __init__(self, reason: str, by: ForkServerLink, with_server: bool = False) -> None:
        super().__init__(reason)
        self.by, self.with_server = by, with_server


class _Outgrown(Exception):
    """A job turned out long, and starts again when it has a place among the long ones."""


@dataclass(eq=False)
class Ask:
    """A job, who asks for it, and the future of its result."""

    job: Job
    holder: str
    future: Future[Any]
    lane: Lane | None = None

    def fail(self, kind: FailureKind, reason: str) -> None:
        """Set a `CompileFailure`."""
        self.raises(CompileFailure(f"{self.job.failed}: {reason}", kind, self.job.param))

    def raises(self, error: BaseException) -> None:
        """Set an error, unless the future was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Supervisor:
    """Lanes and workers; only its loop's thread may touch them, except `snapshot`.

    Args:
        backend: What workers compile with; None for jobs that need none.
        limits: Of a job and of all.
    """

    def __init__(self, backend: Backend | None, limits: CompileLimits) -> None:
        self.backend, self.limits = backend, limits
        self.quick = Lane(limits.fast_running, limits.fast_waiting)
        self.slow = Lane(limits.long_running, limits.long_waiting)
        self.tasks: dict[Ask, asyncio.Task[None]] = {}
        self.idle: list[Worker] = []
        self.link: ForkServerLink | None = None
        self.numbers = itertools.count()
        self.forked = self.killed = 0

    def snapshot(self) -> dict[str, Any]:
        """Lanes and workers as plain data; from any thread, hence approximate."""
        link = self.link
        return {
            "isolated": True,
            "fork_server_pid": link.process.pid if link else None,
            "workers": len(link.workers) if link else 0,
            "fast_running": self.quick.busy.total,
            "long_running": self.slow.busy.total,
            "fast_waiting": len(self.quick),
            "long_waiting": len(self.slow),
            "workers_forked": self.forked,
            "workers_killed": self.killed,
        }

    async def run(self, is_over: asyncio.Event) -> None:
        """Start in advance what the first job needs, and serve until it is over."""
        self.loaders = ThreadPoolExecutor(LOADERS, "grammar-load")
        if self.backend is not None:
            # While the fork server does the same.
            self.loaders.submit(self.backend.warm)
        self._fork_spare()
        await is_over.wait()

    async def end(self) -> None:
        """End all jobs and processes."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        if self.link:
            self._lose(self.link, "the engine was closed")
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        self.loaders.shutdown(wait=True)

    def begin(self, ask: Ask) -> None:
        """Start to do a job."""
        task = self.tasks[ask] = asyncio.create_task(self._do(ask))
        task.add_done_callback(lambda _: self._done(ask))

    def leave(self, ask: Ask) -> None:
        """Stop a job whose future was cancelled."""
        if ask in self.tasks:
            self.tasks[ask].cancel()

    def _done(self, ask: Ask) -> None:
        task = self.tasks.pop(ask)
        if task.cancelled():
            ask.fail("closed", "the engine was closed")
        elif error := task.exception():
            ask.fail("crash", f"{type(error).__name__}: {error}")

    async def _do(self, ask: Ask) -> None:
        try:
            answer, message = await self._answer(ask)
            if answer.answer != "done":
                raise self._error(answer)
            try:
                self.loaders.submit(self._load, ask, message)
            except RuntimeError:
                channel.drop_body(message)
                raise Failed("closed", "the interpreter is ending") from None
        except GrammarError as error:
            ask.raises(error)
        except Failed as error:
            ask.fail(error.kind, str(error))
        except OSError as error:
            ask.fail("unavailable", f"{type(error).__name__}: {error}; try again later")

    def _load(self, ask: Ask, message: Message) -> None:
        """Read an answer, on a loader's thread."""
        try:
            body = channel.read_body(message, self.limits.result_bytes)
            result = ask.job.read(self.backend, body)
        except GrammarError as error:
            ask.raises(error)
        except MemoryError:
            ask.fail("no_memory", "this process has none left to read its result")
        except Exception as error:
            ask.fail("crash", f"its result cannot be read: {type(error).__name__}: {error}")
        else:
            if ask.future.set_running_or_notify_cancel():
                ask.future.set_result(result)

    def _error(self, answer: Answer) -> Exception:
        """The error of a job that its worker could not do."""
        match answer.answer:
            case "refused":
                return GrammarError(answer.message, answer.param)
            case "out_of_memory" | "no_memory":
                return self._lack(answer.answer == "out_of_memory")
            case "too_large":
                most = self.limits.result_bytes / 2**20
                return Failed("out_of_memory", f"its compiled form takes more than {most:g} MiB")
        return Failed("crash", answer.message)

    def _lack(self, is_its_own: bool) -> Failed:
        """The error of a job that met its own limit of memory, or the machine's."""
        most = f"{self.limits.memory_bytes / 2**20:g} MiB of memory"
        if is_its_own:
            return Failed("out_of_memory", f"it took more than {most}; {SIMPLIFY}")
        reason = f"the machine has less than the {most} that it may take; try again later"
        return Failed("no_memory", reason)

    # What befalls a job.

    async def _answer(self, ask: Ask) -> tuple[Answer, Message]:
        """A worker's answer to a job, which is given to another one if its worker is lost, once."""
        # The fork server under which a worker was lost with the job.
        lost_by: ForkServerLink | None = None
        try:
            await self._move(ask, self.quick, "too many grammars are waiting; try again later")
            while True:
                try:
                    return await self._attempt(ask)
                except _Outgrown:
                    crowded = "it takes long, and too many such wait; try again later"
                    await self._move(ask, self.slow, crowded)
                except _Lost as lost:
                    # What befell the one may have befallen them.
                    while self.idle:
                        self._kill(self.idle.pop())
                    # A worker and then its fork server are one event, not two.
                    if lost_by is not None and not (lost.with_server and lost.by is lost_by):
                        again = f"{lost}, for the second time; try again later"
                        raise Failed("unavailable", again) from None
                    lost_by = lost.by
        finally:
            if ask.lane is not None:
                ask.lane.give(ask.holder)

    async def _move(self, ask: Ask, lane: Lane, crowded: str) -> None:
        """Give an asker's place back, and wait for one in another lane."""
        if ask.lane is not None:
            ask.lane.give(ask.holder)
            ask.lane = None
        if not await lane.take(ask.holder, type(ask.job)):
            raise Failed("busy", crowded)
        ask.lane = lane

    async def _attempt(self, ask: Ask) -> tuple[Answer, Message]:
        worker = self._give(ask.job)
        try:
            heard = await self._hear_out(worker, ask)
        except BaseException:
            self._kill(worker)
            raise
        else:
            if heard[0].goes_on and not worker.is_slow:
                self.idle.append(worker)
            else:
                worker.close()
            return heard
        finally:
            if self.link is not None:
                self._fork_spare()

    async def _hear_out(self, worker: Worker, ask: Ask) -> tuple[Answer, Message]:
        """What a worker answers to the job that it was given, within the limits of time."""
        await worker.link.ready.wait()
        began = await self._hear(worker, time.monotonic() + START_S, starts=True)
        if began is None:
            raise _Lost(f"its worker did not start within {START_S:g} s", worker.link)
        worker.pid, worker.has_begun = began[0].pid, True
        limits, start_s = self.limits, time.monotonic()
        if ask.lane is self.quick:
            heard = await self._hear(worker, start_s + limits.first_s)
            if heard is not None:
                return heard
            if limits.time_s > limits.fast_s:
                if not self.slow.has_room(ask.holder):
                    raise _Outgrown
                await self._move(ask, self.slow, "")
        worker.is_slow = True
        worker.order("slow")
        heard = await self._hear(worker, start_s + limits.time_s)
        if heard is None:
            raise Failed("timeout", f"it took longer than {limits.time_s:g} s; {SIMPLIFY}")
        return heard

    async def _hear(
        self, worker: Worker, until_s: float, starts: bool = False
    ) -> tuple[Answer, Message] | None:
        """The next message of a worker; None if none has come by then.

        Raises:
            _Lost, Failed: no more comes of it, or what came is no answer.
        """
        while True:
            try:
                message = channel.receive(worker.end)
                if message is not None:
                    answer = read_answer(message, starts)
                    if answer.answer == "ended":
                        raise self._cause(worker, answer)
                    return answer, message
                # Its own end would have been told.
                self._lose(worker.link, "their fork server ended")
            except BlockingIOError:
                pass
            except ValueError as error:
                # No fault of a library looks so: whatever wrote this is not to go on.
                told = f"its worker process sent what none sends: {error}"
                raise Failed("crash", told) from None
            if worker.link.gone is not None:
                raise worker.link.gone
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            if await _can_read(worker.end, min(LOOK_S, left_s)):
                continue
            if is_stopped(worker.link.process.pid):
                self._lose(worker.link, "their fork server was stopped")
            elif is_stopped(worker.pid):
                raise _Lost("its worker process was stopped", worker.link)

    # Processes.

    def _give(self, job: Job) -> Worker:
        """A worker that has the job now."""
        body = pickle.dumps(job)
        while True:
            worker = self.idle.pop() if self.idle else self._fork()
            worker.has_begun = False
            try:
                # One that says what it was not asked for, or is dead, gets none.
                if _is_silent(worker.end):
                    channel.send_body(worker.end, body)
                    # So that the next one need not wait for a fork.
                    self._fork_spare()
                    return worker
            except ConnectionError:
                pass
            except OSError:
                self._kill(worker)
                raise
            self._kill(worker)

    def _fork_spare(self) -> None:
        if not self.idle:
            # The next job is told.
            with contextlib.suppress(Failed, _Lost, OSError):
                self.idle.append(self._fork())

    def _fork(self) -> Worker:
        link = self.link
        if link is None:
            try:
                link = self.link = ForkServerLink(self.backend, self.limits)
            except OSError as error:
                reason = f"compile workers cannot be started ({type(error).__name__}: {error})"
                raise Failed("unavailable", reason) from None
            link.attended = asyncio.create_task(self._attend(link))
        try:
            worker = link.fork(next(self.numbers))
        except OSError as error:
            # It may have told the reason itself.
            self._take_word(link)
            self._lose(link, f"{type(error).__name__}: {error}")
            assert link.gone is not None
            raise link.gone from None
        self.forked += 1
        return worker

    def _kill(self, worker: Worker) -> None:
        if not worker.has_ended and worker.link.gone is None:
            self.killed += 1
        # Also where its end was told: one in other hands may have told it itself.
        worker.order("kill")
        worker.close()

    async def _attend(self, link: ForkServerLink) -> None:
        """Hear what a fork server tells, until it is lost."""
        while link.gone is None:
            self._take_word(link)
            if link.gone or await _can_read(link.end, None if link.ready.is_set() else LOOK_S):
                continue
            if is_stopped(link.process.pid):
                self._lose(link, "their fork server was stopped")
            elif time.monotonic() >= link.since_s + READY_S:
                self._lose(link, f"not ready after {READY_S:g} s")

    def _take_word(self, link: ForkServerLink) -> None:
        """Read whether a fork server is ready, why it will not be, or that it has ended."""
        with contextlib.suppress(BlockingIOError):
            message = channel.receive(link.end)
            if message is None:
                self._lose(link, "their fork server ended")
            elif message.header["event"] == "ready":
                link.ready.set()
            else:
                self._lose(link, message.header["message"])

    def _cause(self, worker: Worker, end: Answer) -> Exception:
        """Why a worker answers no more; it has been heard to its end."""
        worker.has_ended = True
        how = f"exit status {end.code}"
        if -end.code in {*signal.Signals}:
            how = f"signal {signal.Signals(-end.code).name}"
        if not worker.has_begun or -end.code in OUTSIDE:
            name = how.removeprefix("signal ")
            return _Lost(f"its worker process was ended by {name}", worker.link)
        if means_out_of_memory(end.message):
            return self._lack(end.has_room)
        said = f": {' '.join(end.message.split())[:300]}" if end.message.strip() else ""
        return Failed("crash", f"its worker process ended with {how}{said}")

    def _lose(self, link: ForkServerLink, reason: str) -> None:
        """Drop a fork server that ended; its workers end with it."""
        if link.gone is not None:
            return
        if self.link is link:
            self.link = None
        asyncio.get_running_loop().remove_reader(link.end)
        if link.close() or link.ready.is_set():
            link.gone = _Lost(f"compile workers ended ({reason})", link, with_server=True)
        else:
            link.gone = Failed("unavailable", f"compile workers cannot be started ({reason})")
            # Another one would fail too; the next job tries again.
            for lane in (self.quick, self.slow):
                lane.refuse(link.gone)
        link.ready.set()
        if link.attended is not None and link.attended is not asyncio.current_task():
            link.attended.cancel()
        for worker in [one for one in self.idle if one.link is link]:
            self.idle.remove(worker)
            worker.close()


def _is_silent(end: socket.socket) -> bool:
    try:
        end.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    return False


async def _can_read(end: socket.socket, most_s: float | None) -> bool:
    """Wait until a socket can be read; False if the time is over."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(end, readable.set)
    try:
        await asyncio.wait_for(readable.wait(), most_s)
    except TimeoutError:
        return False
    finally:
        if end.fileno() >= 0:
            loop.remove_reader(end)
    return True
