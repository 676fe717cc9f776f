"""Does jobs for grammars in worker processes under limits or, where a system has none or the caller
trusts all grammars, on threads of this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from overlap_spec.children import OUTSIDE, OwnProcess, is_stopped, without_secrets
from overlap_spec.errors import ConfigError, GrammarError
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation import channel
from overlap_spec.grammar.isolation.channel import Order, Word
from overlap_spec.grammar.isolation.jobs import Check, Compile, Job, compile_whole
from overlap_spec.grammar.isolation.limits import CompileFailure, CompileLimits, Failed
from overlap_spec.grammar.isolation.server import FIGURES, Setup
from overlap_spec.grammar.room.trie import token_trie

CAN_ISOLATE = sys.platform == "linux"


class InProcess:
    """As `Pool`, on threads of this process and without limits; a running job cannot be stopped.

    For trusted grammars, and for systems that cannot isolate. Where processes can be had, a check
    runs in a worker all the same: a pattern may never return while it holds the interpreter lock.
    """

    def __init__(self, backend: Backend | None, limits: CompileLimits) -> None:
        self._backend = backend
        self._checks = Pool(None, limits) if CAN_ISOLATE else None
        self._pool = ThreadPoolExecutor(2, "grammar-compile")

    def submit(self, job: Job, holder: str = "") -> Future[Any]:
        if isinstance(job, Check) and self._checks is not None:
            return self._checks.submit(job, holder)
        try:
            return self._pool.submit(self._do, job)
        except RuntimeError:
            late = Future[Any]()
            late.set_exception(CompileFailure("the engine is closed", "closed"))
            return late

    def _do(self, job: Job) -> Any:
        if isinstance(job, Compile) and self._backend is not None:
            return compile_whole(self._backend, job.grammar)
        return job.read(self._backend, job.work(self._backend))

    def warm(self) -> None:
        pass

    def close(self) -> None:
        self.stop()
        if self._checks is not None:
            self._checks.close()

    def stop(self) -> None:
        # Without waiting: a compile that hangs must not block the caller.
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._checks is not None:
            self._checks.stop()

    def snapshot(self) -> dict[str, Any]:
        return {"isolated": False}


# The import path comes first, to find the package. `-m` would load the module under two names.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from overlap_spec.grammar.isolation.server import main; main(sys.argv[2:])"
)
# Numerical libraries start threads on import; the server must have none.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# How long a server may take to be ready, and to end, and how often it is looked at.
READY_S, END_S, LOOK_S = 60.0, 5.0, 1.0


class Ask:
    """A job, who asks for it, the future of its result, and how often it was given to a server."""

    def __init__(self, job: Job, holder: str) -> None:
        self.job, self.holder, self.tries = job, holder, 0
        self.body = pickle.dumps(job)
        self.future: Future[Any] = Future()

    def fail(self, error: Failed) -> None:
        """Set a `CompileFailure`."""
        reason = f"{self.job.failed}: {error}"
        self.land(error=CompileFailure(reason, error.kind, self.job.param))

    def land(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set a result or an error, unless the future was cancelled."""
        if self.future.set_running_or_notify_cancel():
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)


class Link:
    """A server that was started, and whether it was heard of. The kernel kills it when the thread
    that started it ends, however that happens."""

    def __init__(self, backend: Backend | None, limits: CompileLimits) -> None:
        self.is_ready, self.since_s = False, time.monotonic()
        self.outbox = deque[int]()
        self.end, far = channel.pair()
        self.end.setblocking(False)
        kind = type(backend)
        vocabulary = backend.vocabulary if backend else None
        setup = Setup(kind.__module__, kind.__qualname__, vocabulary, limits)
        with far, os.fdopen(os.memfd_create("setup"), "wb") as file:
            pickle.dump(setup, file)
            file.flush()
            given = (far.fileno(), file.fileno())
            numbers = map(str, (*given, os.getpid()))
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=given,
                # Ctrl-C reaches only the engine, which drains before it ends.
                start_new_session=True,
                env=without_secrets(os.environ) | ONE_THREAD,
            )

    def close(self) -> int:
        """End the server and with it all workers; its exit code."""
        self.end.close()
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Desk:
    """The jobs of a pool, and the server that does them; of the pool's thread alone."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, backend: Backend | None, limits: CompileLimits
    ) -> None:
        self.loop, self._backend, self._limits = loop, backend, limits
        self.is_closed, self.link = False, cast("Link | None", None)
        self.state = (0,) * len(FIGURES)
        self._asks: dict[int, Ask] = {}
        loop.call_soon(self._look)

    def close(self) -> None:
        """End the server; all jobs fail."""
        if self.link is not None:
            self._unlink(self.link)
        self._fail(Failed("closed", "the engine was closed"))

    def begin(self, number: int, ask: Ask, leave: Callable[[int], object]) -> None:
        """Start a job; ``leave`` is called from any thread where it is wanted no more."""
        if ask.future.cancelled():
            return
        self._asks[number] = ask

        # Holds no job: else the future would hold itself, and its result.
        def left(future: Future[Any]) -> None:
            if future.cancelled():
                leave(number)

        ask.future.add_done_callback(left)
        self.start()
        self._send(number)

    def leave(self, number: int) -> None:
        """A job is wanted no more."""
        if self._asks.pop(number, None) is not None:
            self._send(number)

    def start(self) -> None:
        """Start a server unless there is one."""
        if self.link is not None or self.is_closed:
            return
        try:
            link = self.link = Link(self._backend, self._limits)
        except OSError as error:
            reason = f"compile workers cannot be started ({type(error).__name__}: {error})"
            self._fail(Failed("unavailable", reason))
            return
        self.loop.add_reader(link.end, self._hear, link)
        if self._backend is not None:
            # While the server does the same; and what the first grammar's room waits for.
            self.loop.call_soon(self._backend.warm)
            self.loop.call_soon(token_trie, self._backend.vocabulary)

    def _look(self) -> None:
        """End a server that is not ready in time, or stopped: it would keep its jobs for ever."""
        link = self.link
        if link is not None and self._asks:
            is_late = not link.is_ready and time.monotonic() > link.since_s + READY_S
            if is_late or is_stopped(link.process.pid):
                os.killpg(link.process.pid, signal.SIGKILL)
        self.loop.call_later(LOOK_S, self._look)

    def _fail(self, error: Failed) -> None:
        """Fail all jobs."""
        while self._asks:
            self._asks.popitem()[1].fail(error)

    def _send(self, number: int) -> None:
        """Send a job to the server, or, where it is wanted no more, that."""
        if self.link is not None:
            self.link.outbox.append(number)
            self._flush(self.link)

    def _flush(self, link: Link) -> None:
        while link.outbox:
            ask = self._asks.get(number := link.outbox[0])
            order = Order(number, ask.holder, type(ask.job).__name__) if ask else Order(number)
            try:
                channel.send(link.end, order, ask.body if ask else None)
            except BlockingIOError:
                self.loop.add_writer(link.end, self._flush, link)
                return
            except ConnectionError:
                # It is gone, which is heard.
                break
            except OSError as error:
                if ask is not None:
                    reason = f"{type(error).__name__}: {error}; try again later"
                    self._asks.pop(number).fail(Failed("unavailable", reason))
            link.outbox.popleft()
        self.loop.remove_writer(link.end)

    def _hear(self, link: Link) -> None:
        """Read what the server tells."""
        message = channel.receive(link.end, Word)
        if message is None:
            self._lose(link, "their server ended")
            return
        word, body = message
        if word.number < 0 and word.failed is not None:
            self._lose(link, word.reason)
            return
        link.is_ready, self.state = True, word.state
        ask = self._asks.pop(word.number, None)
        if ask is None:
            channel.drop(body)
        elif word.failed == "refused":
            ask.land(error=GrammarError(word.reason, word.param))
        elif word.failed is not None:
            ask.fail(Failed(word.failed, word.reason))
        else:
            self._land(ask, body)

    def _land(self, ask: Ask, body: channel.Body | None) -> None:
        try:
            assert body is not None
            answer = channel.read(body, self._limits.result_bytes)
            result = ask.job.read(self._backend, answer)
        except GrammarError as error:
            ask.land(error=error)
        except MemoryError:
            ask.fail(Failed("no_memory", "this process has none left to read its result"))
        except Exception as error:
            reason = f"its result cannot be read: {type(error).__name__}: {error}"
            ask.fail(Failed("crash", reason))
        else:
            ask.land(result)

    def _unlink(self, link: Link) -> int:
        """Let a server go; its exit code."""
        self.link = None
        self.loop.remove_reader(link.end)
        self.loop.remove_writer(link.end)
        return link.close()

    def _lose(self, link: Link, reason: str) -> None:
        """Give the jobs of a server that has ended to another one, once."""
        code = self._unlink(link)
        if not link.is_ready and -code not in OUTSIDE:
            # Another one would fail too; the next job tries again.
            self._fail(Failed("unavailable", f"compile workers cannot be started ({reason})"))
            return
        for number, ask in tuple(self._asks.items()):
            ask.tries += 1
            if ask.tries > 1:
                again = f"compile workers ended ({reason}), for the second time; try again later"
                self._asks.pop(number).fail(Failed("unavailable", again))
        if self._asks:
            self.start()
            for number in self._asks:
                self._send(number)


class Pool:
    """Does jobs in worker processes, for any thread; `CompileLimits` has the scheduling rules.

    One thread of this process sends jobs to a server and reads answers. Nothing starts before the
    first job. In a fork of the engine's process a pool is closed.

    Args:
        backend: What workers compile with; None for jobs that need none.
        limits: Of a job, and of all of them together.

    Raises:
        ConfigError: this system has no such workers, or they cannot import the backend's class.
    """

    def __init__(self, backend: Backend | None, limits: CompileLimits) -> None:
        _check_possible(backend)
        self._backend, self._limits = backend, limits
        self._own_process, self._is_closed = OwnProcess(), False
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._thread: threading.Thread | None = None
        self._desk: Desk | None = None

    def submit(self, job: Job, holder: str = "") -> Future[Any]:
        """Start a job; of those that wait, the holders take turns.

        The future raises GrammarError; cancelling it stops the work.
        """
        ask, number = Ask(job, holder), next(self._numbers)
        if not self._call(Desk.begin, number, ask, partial(self._call, Desk.leave)):
            ask.fail(Failed("closed", "the engine is closed"))
        return ask.future

    def warm(self) -> None:
        """Start in advance what the first job needs; returns at once."""
        self._call(Desk.start)

    def close(self) -> None:
        """End threads and processes; unfinished jobs fail with `CompileFailure`."""
        with self._lock:
            self.stop()
        thread = self._thread
        if self._own_process.is_here and thread not in (None, threading.current_thread()):
            thread.join()

    def stop(self) -> None:
        """Begin to close, without locks or waiting, so that a finalizer may call it."""
        self._is_closed, desk = True, self._desk
        if self._own_process.is_here and desk is not None:
            desk.is_closed = True
            # It may have ended.
            with contextlib.suppress(RuntimeError):
                desk.loop.call_soon_threadsafe(desk.loop.stop)

    def snapshot(self) -> dict[str, Any]:
        """Lanes and workers as plain data, as the server last told them."""
        link = self._desk and self._desk.link
        state = self._desk.state if self._desk else (0,) * len(FIGURES)
        return {
            "isolated": True,
            "fork_server_pid": link.process.pid if link else None,
            **dict(zip(FIGURES, state, strict=True)),
        }

    def _call(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Have the thread call a method of its desk; False if it has ended, or is not ours: a fork
        of the engine's process copies its memory, but neither its thread nor its workers."""
        with self._lock:
            if self._is_closed or not self._own_process.is_here:
                return False
            if self._desk is None:
                self._desk = Desk(asyncio.new_event_loop(), self._backend, self._limits)
                self._thread = threading.Thread(
                    target=self._run, args=(self._desk,), name="grammar-compile", daemon=True
                )
                self._thread.start()
            self._desk.loop.call_soon_threadsafe(function, self._desk, *arguments)
        return True

    def _run(self, desk: Desk) -> None:
        with contextlib.closing(desk.loop) as loop:
            loop.run_forever()
            with self._lock:
                self._is_closed = desk.is_closed = True
            # What was asked meanwhile is told.
            loop.call_soon(loop.stop)
            loop.run_forever()
            desk.close()


def make_pool(
    backend: Backend | None, limits: CompileLimits, isolated: bool | None = None
) -> Pool | InProcess:
    """A pool; ``isolated`` None: in worker processes if the system can."""
    made = Pool if (CAN_ISOLATE if isolated is None else isolated) else InProcess
    return made(backend, limits)


def _check_possible(backend: Backend | None) -> None:
    if not CAN_ISOLATE:
        raise ConfigError(
            f"grammars cannot be compiled in worker processes on {sys.platform}: "
            "compile in this process (isolated=False)"
        )
    kind = type(backend)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "." in kind.__qualname__ or kind.__module__ == "__main__":
        raise ConfigError(
            f"grammar backend {name} cannot be imported by a compile "
            "worker: move it to the top of a module, or compile in this process (isolated=False)"
        )
