"""Compiles grammars and checks outputs: the interface, and an executor in this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from overlap_spec.grammar.byte_states import byte_states
from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.grammar.isolation.check import violation_elsewhere
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.grammar.lowering import to_plan
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.state_table import StateTable

Result = TypeVar("Result")


def compile_whole(backend: Backend, grammar: Grammar) -> CompiledGrammar:
    """Compile a grammar, with the plan of what it leaves to a matcher.

    Raises:
        GrammarError: as `Backend.compile` and `lowering.to_plan`.
    """
    compiled = backend.compile(grammar)
    compiled.plan = to_plan(grammar)
    return compiled


class Executor(ABC):
    """Compiles grammars and checks outputs; safe to call from any thread."""

    @abstractmethod
    def submit(self, grammar: Grammar, holder: str = "") -> Future[CompiledGrammar]:
        """Start a compile; of those that wait, the holders take turns.

        The future raises GrammarError; cancelling it stops the work.
        """

    @abstractmethod
    def check(self, grammar: Grammar, text: str) -> Future[str | None]:
        """Start to check an output, as `check.violation` does, in another process.

        The future raises `CompileFailure`; cancelling it stops the work.
        """

    @abstractmethod
    def states(self, grammar: Grammar, holder: str = "") -> Future[StateTable]:
        """Start to make a grammar's table of states by bytes, for drafts.

        The future raises GrammarError, as that of :meth:`submit`.
        """

    @abstractmethod
    def warm(self) -> None:
        """Start in advance what the first compile needs; returns at once."""

    @abstractmethod
    def close(self) -> None:
        """End threads and processes; unfinished work fails with `CompileFailure`."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Queue lengths and worker states as plain data."""


class InProcess(Executor):
    """Compiles on threads of this process, without limits; a running compile cannot be stopped.

    For trusted grammars, and for systems that cannot isolate. A check still runs in a process of
    its own, for at most `check_s` seconds.
    """

    def __init__(self, backend: Backend, check_s: float, threads: int = 2) -> None:
        self._backend, self._check_s = backend, check_s
        self._pool = ThreadPoolExecutor(threads, "grammar-compile")
        self._lock = threading.Lock()
        self._open = 0

    # Grammars that are trusted wait in no turns.
    def submit(self, grammar: Grammar, holder: str = "") -> Future[CompiledGrammar]:  # noqa: ARG002
        return self._run(compile_whole, self._backend, grammar)

    def check(self, grammar: Grammar, text: str) -> Future[str | None]:
        return self._run(violation_elsewhere, grammar, text, self._check_s)

    def states(self, grammar: Grammar, holder: str = "") -> Future[StateTable]:  # noqa: ARG002
        return self._run(byte_states, grammar, self._backend.vocabulary)

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
        # Wait only for idle threads: a compile that hangs must not block the caller.
        self._pool.shutdown(wait=not self._open, cancel_futures=True)

    def snapshot(self) -> dict[str, Any]:
        return {"isolated": False, "open": self._open}
