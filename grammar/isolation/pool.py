"""Compiling in worker processes, under limits: the side that the engine's threads call."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future
from typing import Any

from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.grammar.isolation.executor import Executor
from overlap_spec.grammar.isolation.jobs import Job
from overlap_spec.grammar.isolation.limits import CompileLimits
from overlap_spec.grammar.isolation.supervisor import Supervisor
from overlap_spec.grammar.isolation.template_link import check_importable
from overlap_spec.grammar.spec import Grammar


class Pool(Executor):
    """Compiles in worker processes; see `CompileLimits` for the rules.

    Nothing is started before the first grammar. In a fork of the engine's process it is closed.

    Raises:
        ConfigError: the backend's class cannot be imported by its name.
    """

    def __init__(self, backend: Backend, limits: CompileLimits) -> None:
        check_importable(backend)
        self._supervisor = Supervisor(backend, limits)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        job = Job(grammar, Future())
        if not self._start():
            job.fail("closed", "the engine is closed")
            return job.future
        job.future.add_done_callback(lambda future: self._left(job) if future.cancelled() else None)
        self._supervisor.inbox.append(job)
        self._supervisor.wake()
        # The thread may have ended between the two.
        if self._supervisor.has_ended:
            self._supervisor.refuse_all()
        return job.future

    def warm(self) -> None:
        if self._start():
            self._supervisor.wake()

    def close(self) -> None:
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self._is_ours():
            thread.join()

    def stop(self) -> None:
        """Begin to close; takes no lock and waits for nothing, so that a finaliser may call it."""
        if self._is_ours():
            self._supervisor.closing = True
            self._supervisor.wake()

    def snapshot(self) -> dict[str, Any]:
        return self._supervisor.snapshot()

    def _left(self, job: Job) -> None:
        self._supervisor.cancelled.append(job)
        self._supervisor.wake()

    def _is_ours(self) -> bool:
        # A fork of the engine's process has its memory, but neither its thread nor its workers.
        return os.getpid() == self._pid

    def _start(self) -> bool:
        with self._lock:
            if self._supervisor.closing or not self._is_ours():
                return False
            if self._thread is None:
                self._supervisor.wakes = socket.socketpair()
                self._thread = threading.Thread(
                    target=self._supervisor.run, name="grammar-compile", daemon=True
                )
                self._thread.start()
            return True
