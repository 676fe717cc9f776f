"""The process that forks workers, gives them jobs, enforces their limits and ends them.

It loads the grammar library and builds the backend once; a fork has both immediately, while a new
process would need seconds. It does no job and has no threads, so forking is safe. `main` runs in a
new interpreter with the arguments `SOCKET SETUP PARENT [full]`: file descriptors of its end of the
channel and of a pickled `Setup`, and the process id of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
from functools import partial
from io import BufferedReader
from typing import NamedTuple

import msgspec

from overlap_spec.children import OUTSIDE, can_take, end_with, is_stopped
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation import channel, worker
from overlap_spec.grammar.isolation.channel import Body, Order, Word
from overlap_spec.grammar.isolation.import_stubs import import_light
from overlap_spec.grammar.isolation.jobs import means_out_of_memory
from overlap_spec.grammar.isolation.limits import SIMPLIFY, CompileLimits, Failed, out_of_memory
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.shares import Lane

Answer = tuple[Word, Body | None]
LATER = "try again later"
STDERR_BYTES = 2000
# How late it may be told how things stand.
TELL_S = 0.02
# Libraries handle these to print a trace, which can take seconds.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


FIGURES = (
    "workers",
    "fast_running",
    "long_running",
    "fast_waiting",
    "long_waiting",
    "workers_forked",
    "workers_killed",
)


class Setup(NamedTuple):
    """What a server builds, and the limits of its workers; without a vocabulary no backend."""

    module: str
    name: str
    vocabulary: Vocabulary | None
    limits: CompileLimits


class _Lost(Exception):
    """A worker was ended or stopped by others, which is not its job's fault."""


class Worker:
    """A forked worker: its process, its socket, the file of its output, and its answer to come."""

    def __init__(self, pid: int, end: socket.socket, output: BufferedReader) -> None:
        self.pid, self.end, self.output = pid, end, output
        self.answer: asyncio.Future[Answer] | None = None


class Workers:
    """The forked workers, and those of them that wait for a job."""

    def __init__(self, backend: Backend | None, limits: CompileLimits) -> None:
        self._backend, self._limits = backend, limits
        self.every: set[Worker] = set()
        self.idle: list[Worker] = []
        self.forked = self.killed = 0

    def give(self, job: bytes) -> Worker:
        """A worker that has the job now."""
        while True:
            given = self.idle.pop() if self.idle else self._fork()
            # One that was ended has told it, and one that says what it was not asked for gets none.
            self._read(given)
            if given in self.every and given.answer is None:
                break
            self.kill(given)
        given.answer = asyncio.get_running_loop().create_future()
        channel.send(given.end, Order(), job)
        # So that the next one need not wait for a fork.
        self.fork_spare()
        return given

    def fork_spare(self) -> None:
        """Have one that waits for a job, if it can be had."""
        if not self.idle:
            # The next job is told.
            with contextlib.suppress(OSError):
                self.idle.append(self._fork())

    def _fork(self) -> Worker:
        (near, far), parent = channel.pair(), os.getpid()
        output = os.fdopen(os.memfd_create("output"), "rb")
        with far:
            pid = os.fork()
            if pid == 0:
                _become_worker(far, output.fileno(), parent, self._backend, self._limits)
        near.setblocking(False)
        forked = Worker(pid, near, output)
        self.every.add(forked)
        self.forked += 1
        asyncio.get_running_loop().add_reader(near, self._read, forked)
        return forked

    def _read(self, given: Worker) -> None:
        """Take what a worker has sent, or its end."""
        waiting = given.answer if given.answer and not given.answer.done() else None
        error: Exception = Failed("crash", "its worker process sent what none sends")
        try:
            message = channel.receive(given.end, Word)
        except BlockingIOError:
            return
        except ValueError:
            pass
        else:
            if message is None:
                error = self._end(given)
            elif waiting is not None and (message[1] is None) != (message[0].failed is None):
                waiting.set_result(message)
                return
            else:
                channel.drop(message[1])
        self.kill(given)
        if waiting is not None:
            waiting.set_exception(error)

    def kill(self, given: Worker) -> None:
        """Have a worker end; its end is read as its words are."""
        if given in self.every:
            self.every.remove(given)
            self.killed += 1
            given.answer = None
            os.kill(given.pid, signal.SIGKILL)
        if given in self.idle:
            self.idle.remove(given)

    def _end(self, given: Worker) -> Exception:
        """Let a worker go that can say no more; what its job has met by that."""
        asyncio.get_running_loop().remove_reader(given.end)
        given.end.close()
        # One in other hands may have closed its socket alone.
        os.kill(given.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(given.pid, 0)[1])
        self.every.discard(given)
        with given.output as file:
            file.seek(-min(STDERR_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            said = " ".join(file.read().decode(errors="replace").split())
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if -code in OUTSIDE:
            return _Lost(f"its worker process was ended by {how.removeprefix('signal ')}")
        if means_out_of_memory(said):
            return out_of_memory(self._limits, can_take(self._limits.memory_bytes))
        said = f": {said[:300]}" if said else ""
        return Failed("crash", f"its worker process ended with {how}{said}")


class Server:
    """Lanes and workers."""

    def __init__(self, end: socket.socket, backend: Backend | None, limits: CompileLimits) -> None:
        self.end, self.limits, self.workers = end, limits, Workers(backend, limits)
        self.quick = Lane(limits.fast_running, limits.fast_waiting)
        self.slow = Lane(limits.long_running, limits.long_waiting)
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.telling: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Serve until the engine closes the channel, then kill all workers."""
        over, self.loop = asyncio.Event(), asyncio.get_running_loop()
        self.loop.add_reader(self.end, self._hear, over)
        self.workers.fork_spare()
        self._tell()
        await over.wait()
        for each in self.workers.every:
            os.kill(each.pid, signal.SIGKILL)
        os._exit(0)  # Nothing has to be cleaned up, and the engine waits.

    def _hear(self, over: asyncio.Event) -> None:
        """Begin jobs, and stop those that are wanted no more, all that are told: what is stopped
        as it begins costs no worker."""
        while select.select([self.end], [], [], 0)[0]:
            message = channel.receive(self.end, Order)
            if message is None:
                over.set()
                return
            order, body = message
            if body is not None:
                task = self.tasks[order.number] = asyncio.create_task(
                    self._do(order, channel.read(body))
                )
                task.add_done_callback(partial(self._done, order.number))
            elif order.number in self.tasks:
                self.tasks[order.number].cancel()

    def _tell(self, word: Word | None = None, body: Body | None = None) -> None:
        """Tell what became of a job, and how things stand."""
        if self.telling is not None:
            self.telling.cancel()
            self.telling = None
        lanes = (self.quick.busy.total, self.slow.busy.total, len(self.quick), len(self.slow))
        workers = self.workers
        state = (len(workers.every), *lanes, workers.forked, workers.killed)
        # An engine that has gone is told nothing.
        with contextlib.suppress(ConnectionError):
            channel.send(self.end, msgspec.structs.replace(word or Word(), state=state), body)

    def _tell_soon(self) -> None:
        """Tell how things stand, unless something is told before."""
        if self.telling is None:
            self.telling = self.loop.call_later(TELL_S, self._tell)

    async def _do(self, order: Order, job: bytes) -> None:
        body: Body | None = None
        try:
            try:
                word, body = await self._attempt(order, job)
            except _Lost:
                word, body = await self._attempt(order, job)
        except _Lost as lost:
            word = Word(failed="unavailable", reason=f"{lost}, for the second time; {LATER}")
        except Failed as error:
            word = Word(failed=error.kind, reason=str(error))
        except OSError as error:
            word = Word(failed="unavailable", reason=f"{type(error).__name__}: {error}; {LATER}")
        self._tell(msgspec.structs.replace(word, number=order.number), body)
        channel.drop(body)

    def _done(self, number: int, _: asyncio.Task[None]) -> None:
        del self.tasks[number]
        self.workers.fork_spare()
        self._tell_soon()

    async def _attempt(self, order: Order, job: bytes) -> Answer:
        """A worker's answer to a job, within the limits of time."""
        limits = self.limits
        given: Worker | None = None
        lane: Lane | None = None
        least_s = min(limits.fast_s, limits.time_s)
        try:
            crowded = f"too many grammars are waiting; {LATER}"
            lane = await self._place(order, self.quick, crowded)
            given = self.workers.give(job)
            answer = await self._answer(given, least_s)
            left_s = limits.time_s - least_s
            if answer is None and left_s > 0:
                # It takes long: where there is no place among such, it starts again in its turn.
                if not self.slow.has_room(order.holder):
                    self.workers.kill(given)
                    given, left_s = None, limits.time_s
                lane.give(order.holder)
                lane, crowded = None, f"it takes long, and too many such wait; {LATER}"
                lane = await self._place(order, self.slow, crowded)
                given = given or self.workers.give(job)
                answer = await self._answer(given, left_s)
            if answer is None:
                if is_stopped(given.pid):
                    raise _Lost("its worker process was stopped")
                raise Failed("timeout", f"it took longer than {limits.time_s:g} s; {SIMPLIFY}")
            if answer[0].goes_on:
                given.answer = None
                self.workers.idle.append(given)
                given = None
            return answer
        finally:
            if lane is not None:
                lane.give(order.holder)
            if given is not None:
                self.workers.kill(given)

    async def _place(self, order: Order, lane: Lane, crowded: str) -> Lane:
        """Wait for a place."""
        self._tell_soon()
        if not await lane.take(order.holder, order.kind):
            raise Failed("busy", crowded)
        return lane

    async def _answer(self, given: Worker, most_s: float) -> Answer | None:
        """What a worker answers; None if it has not yet."""
        answer = given.answer
        assert answer is not None
        await asyncio.wait([answer], timeout=most_s)
        return answer.result() if answer.done() else None


def _become_worker(
    end: socket.socket, output: int, parent: int, backend: Backend | None, limits: CompileLimits
) -> None:
    """The child's side of a fork; does not return."""
    status = 1
    try:
        end_with(parent)
        for number in (signal.SIGINT, *CRASHES):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # What is others' is not for one that may be in other hands.
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd != end.fileno():
                with contextlib.suppress(OSError):
                    os.close(fd)
        worker.serve(end, backend, limits)
        status = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(status)


def build(setup: Setup, light: bool) -> Backend | None:
    """Import and build what workers are forked with.

    Args:
        light: Import with stubs in place of heavy modules.

    Raises:
        RuntimeError: the library started threads, so that forking is not safe.
    """
    if setup.vocabulary is None:
        # Imports what reading a source needs.
        Grammar.json_schema("{}")
        return None
    module = import_light(setup.module) if light else importlib.import_module(setup.module)
    backend = getattr(module, setup.name)(setup.vocabulary)
    assert isinstance(backend, Backend)
    backend.warm()
    # Computed before the fork, so that workers share them: what tables of states look tokens up in,
    # and rows.
    _ = backend.vocabulary.by_text, setup.vocabulary.text_row, setup.vocabulary.stop_row
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{setup.module}:{setup.name} started {threads - 1} threads")
    return backend


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    end_with(int(arguments[2]))
    end = socket.socket(fileno=int(arguments[0]))
    with os.fdopen(int(arguments[1]), "rb", closefd=False) as file:
        file.seek(0)
        setup: Setup = pickle.load(file)
    # Only the project's own backends are known to work with stubs.
    light = len(arguments) == 3 and setup.module.startswith("overlap_spec.")
    Backend.makes_masks = False
    try:
        backend = build(setup, light)
    except Exception as error:
        if light:
            os.execv(sys.executable, [*sys.orig_argv, "full"])
        reason = f"{type(error).__name__}: {error}"[: worker.MESSAGE_CHARACTERS]
        channel.send(end, Word(failed="unavailable", reason=reason))
        return
    gc.collect()
    gc.freeze()
    # Not earlier: a request waits for the first grammar.
    os.nice(setup.limits.nice)
    asyncio.run(Server(end, backend, setup.limits).run())
