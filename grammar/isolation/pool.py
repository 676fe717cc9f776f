"""Does jobs for grammars in worker processes under limits or, where a system has none or the caller
trusts all grammars, on threads of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

from overlap_spec.errors import ConfigError
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation.jobs import Check, Compile, Job, compile_whole
from overlap_spec.grammar.isolation.limits import CompileFailure, CompileLimits
from overlap_spec.grammar.isolation.supervisor import Ask, Supervisor

CAN_ISOLATE = sys.platform == "linux"


class InProcess:
    """As `Pool`, on threads of this process and without limits; a running job cannot be stopped.

    For trusted grammars, and for systems that cannot isolate. Where processes can be had, a check
    runs in a worker all the same: a pattern may never return while it holds the interpreter lock.
    """

    def __init__(self, backend: Backend | None, limits: CompileLimits, threads: int = 2) -> None:
        self._backend = backend
        self._checks = Pool(None, limits) if CAN_ISOLATE else None
        self._pool = ThreadPoolExecutor(threads, "grammar-compile")
        self._open: set[Future[Any]] = set()

    def submit(self, job: Job, holder: str = "") -> Future[Any]:
        if isinstance(job, Check) and self._checks is not None:
            return self._checks.submit(job, holder)
        future: Future[Any]
        try:
            future = self._pool.submit(self._do, job)
        except RuntimeError:
            future = Future()
            future.set_exception(CompileFailure("the engine is closed", "closed"))
            return future
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def _do(self, job: Job) -> Any:
        if isinstance(job, Compile) and self._backend is not None:
            return compile_whole(self._backend, job.grammar)
        return job.read(self._backend, job.work(self._backend))

    def warm(self) -> None:
        pass

    def close(self) -> None:
        # Wait only for idle threads: a compile that hangs must not block the caller.
        self._pool.shutdown(wait=not self._open, cancel_futures=True)
        if self._checks is not None:
            self._checks.close()

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._checks is not None:
            self._checks.stop()

    def snapshot(self) -> dict[str, Any]:
        return {"isolated": False, "open": len(self._open)}


class Crew:
    """A supervisor and its thread, shared by all pools of a process with equal settings."""

    def __init__(self, backend: Backend | None, limits: CompileLimits) -> None:
        self.supervisor = Supervisor(backend, limits)
        self.users: set[Pool] = set()
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = self._has_ended = False
        self._over = asyncio.Event()
        self._lock = threading.Lock()

    def join(self, user: Pool) -> bool:
        """Add a user; False if the crew is about to end."""
        with self._lock:
            if not self._is_over:
                self.users.add(user)
            return not self._is_over

    def start(self) -> None:
        """Start the thread unless it runs."""
        with self._lock:
            if self.thread is None:
                self._loop = asyncio.new_event_loop()
                self.thread = threading.Thread(
                    target=self._run, name="grammar-compile", daemon=True
                )
                self.thread.start()

    def submit(self, ask: Ask) -> None:
        """Have a job done."""
        self.start()
        with self._lock:
            is_told = not self._has_ended
            if is_told:
                self._call(self.supervisor.begin, ask)
        if not is_told:
            ask.fail("closed", "the engine was closed")
            return
        # Else the future would hold itself, and its result, by what asks.
        weak = weakref.ref(ask)

        def left(future: Future[Any]) -> None:
            asks = weak()
            if asks is not None and future.cancelled():
                self._call(self.supervisor.leave, asks)

        ask.future.add_done_callback(left)

    def leave(self, user: Pool) -> threading.Thread | None:
        """Remove a user; the thread, which ends, if it was the last."""
        with self._lock:
            self.users.discard(user)
            self._is_over = self._is_over or not self.users
        self._call(self._look)
        return self.thread if self._is_over else None

    def forget(self, user: Pool) -> None:
        """Remove a user without locks or waiting."""
        self.users.discard(user)
        self._call(self._look)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        # A loop that has ended needs to hear of no end.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *arguments)

    def _look(self) -> None:
        with self._lock:
            self._is_over = self._is_over or not self.users
        if self._is_over:
            self._over.set()

    def _run(self) -> None:
        assert self._loop is not None
        with contextlib.closing(self._loop) as loop:
            loop.call_soon(self._look)
            try:
                loop.run_until_complete(self.supervisor.run(self._over))
            finally:
                with self._lock:
                    self._is_over = self._has_ended = True
                # What was asked meanwhile is told.
                loop.run_until_complete(self.supervisor.end())


# The key holds the process id, since a fork copies the table but no thread.
_CREWS: WeakValueDictionary[tuple[Any, ...], Crew] = WeakValueDictionary()


class Pool:
    """Does jobs in worker processes, for any thread; `CompileLimits` has the scheduling rules.

    Pools with the same backend class, vocabulary and limits share processes, queues and limits;
    the processes end with the last pool. Nothing starts before the first job. In a fork of
    the engine's process a pool is closed.

    Args:
        backend: What workers compile with; None for jobs that need none.
        limits: Of a job, and of all of them together.

    Raises:
        ConfigError: this system has no such workers, or they cannot import the backend's class.
    """

    def __init__(self, backend: Backend | None, limits: CompileLimits) -> None:
        _check_possible(backend)
        self._pid, self._closed = os.getpid(), False
        wanted = backend and backend.vocabulary.fingerprint
        key = (self._pid, type(backend), wanted, limits)
        crew = _CREWS.get(key)
        if crew is None or not crew.join(self):
            crew = _CREWS[key] = Crew(backend, limits)
            crew.join(self)
        self._crew = crew

    def submit(self, job: Job, holder: str = "") -> Future[Any]:
        """Start a job; of those that wait, the holders take turns.

        The future raises GrammarError; cancelling it stops the work.
        """
        ask = Ask(job, holder, Future())
        if self._is_open():
            self._crew.submit(ask)
        else:
            ask.fail("closed", "the engine is closed")
        return ask.future

    def warm(self) -> None:
        """Start in advance what the first job needs; returns at once."""
        if self._is_open():
            self._crew.start()

    def close(self) -> None:
        """End threads and processes; unfinished jobs fail with `CompileFailure`."""
        if not self._is_ours():
            return
        self._closed = True
        thread = self._crew.leave(self)
        if thread not in (None, threading.current_thread()):
            thread.join()

    def stop(self) -> None:
        """Begin to close, without locks or waiting, so that a finalizer may call it."""
        if self._is_ours():
            self._closed = True
            self._crew.forget(self)

    def snapshot(self) -> dict[str, Any]:
        """Lanes and workers as plain data."""
        return self._crew.supervisor.snapshot()

    def _is_open(self) -> bool:
        return self._is_ours() and not self._closed

    def _is_ours(self) -> bool:
        # A fork of the engine's process copies its memory, but neither its thread nor its workers.
        return os.getpid() == self._pid


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
