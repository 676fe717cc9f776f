"""Compiles and checks in worker processes, under limits: the engine's side."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from concurrent.futures import Future
from typing import Any
from weakref import WeakValueDictionary

from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.grammar.isolation.executor import Executor
from overlap_spec.grammar.isolation.fork_server_link import check_importable
from overlap_spec.grammar.isolation.limits import CompileLimits
from overlap_spec.grammar.isolation.supervisor import Supervisor
from overlap_spec.grammar.isolation.work_items import WorkItem
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.state_table import StateTable


class Crew:
    """A supervisor and its thread, shared by all pools of a process with equal settings."""

    def __init__(self, backend: Backend, limits: CompileLimits) -> None:
        self.supervisor = Supervisor(backend, limits)
        self.users: set[Pool] = set()
        self.thread: threading.Thread | None = None
        self._is_over = False
        self._lock = threading.Lock()

    def join(self, user: Pool) -> bool:
        """Add a user; False if the crew is about to end."""
        with self._lock:
            self._is_over = self._is_over or self.supervisor.has_ended
            if not self._is_over:
                self.users.add(user)
            return not self._is_over

    def leave(self, user: Pool) -> bool:
        """Remove a user; True if it was the last, so that the thread ends."""
        self.users.discard(user)
        is_over = not self._is_wanted()
        self.supervisor.wake()
        return is_over

    def start(self) -> None:
        """Start the thread unless it runs."""
        with self._lock:
            if self.thread is None:
                self.supervisor.wakes = socket.socketpair()
                self.thread = threading.Thread(
                    target=self.supervisor.run,
                    args=(self._is_wanted,),
                    name="grammar-compile",
                    daemon=True,
                )
                self.thread.start()

    def _is_wanted(self) -> bool:
        with self._lock:
            self._is_over = self._is_over or not self.users
            return not self._is_over


# The key holds the process id, since a fork copies the table but no thread.
_CREWS: WeakValueDictionary[tuple[Any, ...], Crew] = WeakValueDictionary()


class Pool(Executor):
    """Compiles in worker processes; `CompileLimits` has the scheduling rules.

    Pools with the same backend class, vocabulary and limits share processes, queues and limits;
    the processes end with the last pool. Nothing starts before the first grammar. In a fork of
    the engine's process a pool is closed.

    Raises:
        ConfigError: the backend's class cannot be imported by its name.
    """

    def __init__(self, backend: Backend, limits: CompileLimits) -> None:
        check_importable(backend)
        self._pid, self._closed = os.getpid(), False
        key = (self._pid, type(backend), backend.vocabulary.fingerprint, limits)
        crew = _CREWS.get(key)
        if crew is None or not crew.join(self):
            crew = _CREWS[key] = Crew(backend, limits)
            crew.join(self)
        self._crew, self._supervisor = crew, crew.supervisor

    def submit(self, grammar: Grammar, holder: str = "") -> Future[CompiledGrammar]:
        return self._enqueue(WorkItem(grammar, Future(), holder=holder))

    def check(self, grammar: Grammar, text: str) -> Future[str | None]:
        return self._enqueue(WorkItem(grammar, Future(), text))

    def states(self, grammar: Grammar, holder: str = "") -> Future[StateTable]:
        return self._enqueue(WorkItem(grammar, Future(), states=True, holder=holder))

    def _enqueue(self, item: WorkItem) -> Future[Any]:
        if not self._start():
            item.fail("closed", "the engine is closed")
            return item.future
        # Else the future would hold itself, and its result, by the item.
        weak = weakref.ref(item)

        def left(future: Future[Any]) -> None:
            queued = weak()
            if queued is not None and future.cancelled():
                self._left(queued)

        item.future.add_done_callback(left)
        self._supervisor.inbox.append(item)
        self._supervisor.wake()
        # The thread may have ended in between.
        if self._supervisor.has_ended:
            self._supervisor.refuse_all()
        return item.future

    def warm(self) -> None:
        if self._start():
            self._supervisor.wake()

    def close(self) -> None:
        if not self._is_ours():
            return
        self._closed = True
        thread = self._crew.thread
        if self._crew.leave(self) and thread not in (None, threading.current_thread()):
            thread.join()

    def stop(self) -> None:
        """Begin to close, without locks or waiting, so that a finalizer may call it."""
        if self._is_ours():
            self._closed = True
            self._crew.users.discard(self)
            self._supervisor.wake()

    def snapshot(self) -> dict[str, Any]:
        return self._supervisor.snapshot()

    def _left(self, item: WorkItem) -> None:
        self._supervisor.cancelled.append(item)
        self._supervisor.wake()

    def _is_ours(self) -> bool:
        # A fork of the engine's process copies its memory, but neither its thread nor its workers.
        return os.getpid() == self._pid

    def _start(self) -> bool:
        if self._closed or not self._is_ours():
            return False
        self._crew.start()
        return True
