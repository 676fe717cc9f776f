"""Where grammars are compiled: the interface, and the plain way, in this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.grammar.spec import Grammar


class Executor(ABC):
    """Compiles grammars somewhere; safe to call from any thread."""

    @abstractmethod
    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Begin to compile; the future raises GrammarError, and cancelling it stops the work."""

    @abstractmethod
    def warm(self) -> None:
        """Start what the first compile would have to wait for, and return at once."""

    @abstractmethod
    def close(self) -> None:
        """End threads and processes; what is under way fails with `CompileFailure`."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Lengths of queues and states of workers, as plain data."""


class InProcess(Executor):
    """Compiles on threads of this process: no limits, and a running compile cannot be stopped.

    For trusted grammars and for systems without the means of isolation.
    """

    def __init__(self, backend: Backend, threads: int = 2) -> None:
        self._backend = backend
        self._pool = ThreadPoolExecutor(threads, "grammar-compile")
        self._lock = threading.Lock()
        self._open = 0

    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        try:
            future = self._pool.submit(self._backend.compile, grammar)
        except RuntimeError:
            future = Future()
            future.set_exception(CompileFailure("the engine is closed", "closed"))
            return future
        with self._lock:
            self._open += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[CompiledGrammar]) -> None:
        with self._lock:
            self._open -= 1

    def warm(self) -> None:
        pass

    def close(self) -> None:
        # Idle threads end at once; a compile that hangs must not hang the caller too.
        self._pool.shutdown(wait=not self._open, cancel_futures=True)

    def snapshot(self) -> dict[str, Any]:
        return {"isolated": False, "open": self._open}
