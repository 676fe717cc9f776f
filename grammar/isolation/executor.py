"""Where grammars are compiled and outputs checked: the interface, and the plain way."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.grammar.isolation.check import violation_elsewhere
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.grammar.spec import Grammar

Result = TypeVar("Result")


class Executor(ABC):
    """Compiles grammars and checks outputs somewhere; safe to call from any thread."""

    @abstractmethod
    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Begin to compile; the future raises GrammarError, and cancelling it stops the work."""

    @abstractmethod
    def check(self, grammar: Grammar, text: str) -> Future[str | None]:
        """Begin to check an output of a grammar, as `violation` does, in another process.

        The future raises `CompileFailure`; cancelling it stops the work.
        """

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

    For trusted grammars and for systems without the means of isolation. A check still has a
    process of its own, and `check_s` seconds.
    """

    def __init__(self, backend: Backend, check_s: float, threads: int = 2) -> None:
        self._backend, self._check_s = backend, check_s
        self._pool = ThreadPoolExecutor(threads, "grammar-compile")
        self._lock = threading.Lock()
        self._open = 0

    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        return self._run(self._backend.compile, grammar)

    def check(self, grammar: Grammar, text: str) -> Future[str | None]:
        return self._run(violation_elsewhere, grammar, text, self._check_s)

    def _run(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        try:
            future = self._pool.submit(work, *arguments)
        except RuntimeError:
            future = Future()
            future.set_exception(CompileFailure("the engine is closed", "closed"))
            return future
        with self._lock:
            self._open += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[Any]) -> None:
        with self._lock:
            self._open -= 1

    def warm(self) -> None:
        pass

    def close(self) -> None:
        # Idle threads end at once; a compile that hangs must not hang the caller too.
        self._pool.shutdown(wait=not self._open, cancel_futures=True)

    def snapshot(self) -> dict[str, Any]:
        return {"isolated": False, "open": self._open}
