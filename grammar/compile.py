"""Compiles grammars behind a cache that is bounded in bytes."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from overlap_spec.caches import newest
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.grammar.distinct import matcher as distinct_matcher
from overlap_spec.grammar.drafting.state_table import StateTable
from overlap_spec.grammar.ir.reach import Reach
from overlap_spec.grammar.isolation.check import is_best_effort
from overlap_spec.grammar.isolation.jobs import (
    Check,
    Compile,
    MakeRoom,
    MakeStates,
    as_compiled,
    thinking_of,
)
from overlap_spec.grammar.isolation.limits import CompileFailure, CompileLimits
from overlap_spec.grammar.isolation.pool import make_pool
from overlap_spec.grammar.reasoning import matcher as reasoning_matcher
from overlap_spec.grammar.room.room import Room
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.memory import MemoryCeiling, trim

Waiter = Future[CompiledGrammar]

# How long failures are cached, in seconds: a refusal will not change, but a compile that was too
# slow or too large may have met a busy machine.
REFUSED_S = 60.0
FAILED_S = 5.0
FAILURES = 256
# Kinds of failures that tell nothing of the grammar: it may be asked for again at once.
PASSING = ("busy", "closed", "unavailable", "no_memory")
TIMINGS = 1024
# Grammars grow while they are used: their bytes are counted anew with each that is added, and
# where one is asked for, at most so often.
COUNT_EVERY_S = 1.0
# Grammars after thinking of which it is kept how long their texts are at least.
ROOMS = 64


@dataclass(eq=False)
class _PendingCompile:
    """A running compile and the futures that wait for it."""

    grammar: Grammar
    waiters: list[Waiter]
    start_ns: int = field(default_factory=time.perf_counter_ns)
    inner: Future[CompiledGrammar] | None = None
    states: Future[StateTable] | None = None

    def cancel(self) -> None:
        """Stop the work."""
        for future in (self.inner, self.states):
            if future is not None:
                future.cancel()


class Cache:
    """Compiled grammars, of which those that were used longest ago go first, and for seconds why
    others failed. Of one thread at a time.

    Args:
        most_bytes: Limit on what the grammars take together, which they do the more, the more they
            are used.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.used_bytes = most_bytes, 0
        self.counts = Counter[str]()
        self._done: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._failed: OrderedDict[Grammar, tuple[float, GrammarError]] = OrderedDict()
        self._counted_s = 0.0

    def __len__(self) -> int:
        return len(self._done)

    def find(self, grammar: Grammar) -> CompiledGrammar | GrammarError | None:
        """What is known of a grammar."""
        if grammar in self._done:
            self.counts["hits"] += 1
            self._done.move_to_end(grammar)
            found = self._done[grammar]
            if time.monotonic() >= self._counted_s + COUNT_EVERY_S:
                self._recount()
            return found
        until_s, error = self._failed.get(grammar, (0.0, None))
        if error is None:
            return None
        if time.monotonic() >= until_s:
            del self._failed[grammar]
            return None
        self.counts["remembered"] += 1
        return copy.copy(error)

    def keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        """Keep a grammar, if it fits."""
        if _size(compiled) <= self.most_bytes and grammar not in self._done:
            self._done[grammar] = compiled
            self._recount()

    def keep_failure(self, grammar: Grammar, error: GrammarError, kept_s: float) -> None:
        """Keep for some seconds why a grammar failed."""
        self._failed[grammar] = (time.monotonic() + kept_s, copy.copy(error))
        while len(self._failed) > FAILURES:
            self._failed.popitem(last=False)

    def make_way(self, ceiling: MemoryCeiling | None) -> bool:
        """Whether the process is under its ceiling, if need be with half of the grammars gone."""
        while ceiling is not None and ceiling.is_reached():
            if not self._done:
                return False
            for _ in range((len(self._done) + 1) // 2):
                self._evict()
            trim()
        return True

    def clear(self) -> None:
        """Forget all grammars."""
        self._done.clear()
        self.used_bytes = 0

    def _recount(self) -> None:
        """Count the bytes, and drop what was not used for longest until they fit."""
        self.used_bytes = sum(map(_size, self._done.values()))
        while self.used_bytes > self.most_bytes:
            self._evict()
        self._counted_s = time.monotonic()

    def _evict(self) -> None:
        _, oldest = self._done.popitem(last=False)
        self.used_bytes -= _size(oldest)
        self.counts["evicted"] += 1


class GrammarCompiler:
    """Compiles grammars behind a least-recently-used cache; safe to share between threads.

    Concurrent requests for the same grammar share one compile. Lowering and compiling happen in
    worker processes: a grammar that hangs, crashes or exhausts memory fails alone, with
    :class:`CompileFailure`. Failures are cached for seconds.

    What a compiled grammar takes grows with its use, which no count of its own tells: at the
    process's ceiling cached grammars go, the oldest first, and then new ones are refused.

    Args:
        backend: Compiles; each worker builds its own of the same class and vocabulary.
        cache_bytes: Limit on the sum of `memory_bytes` over the cache. A grammar that is larger
            than that is compiled and returned, but not cached, and one that grows with its use
            leaves it with those used before it.
        isolated: Whether to compile in worker processes; None means if the system can (Linux).
        limits: Resource limits of a compile, and how many run and wait.
        ceiling: Of this process's memory; None: it has none.

    Attributes:
        ceiling: As given; may be set when what the process holds besides is there.
        makes_states: Whether each grammar gets a table of its states, where it has one.

    Raises:
        ConfigError: isolation is requested but not available on this system.
    """

    def __init__(
        self,
        backend: Backend,
        cache_bytes: int = 128 * 2**20,
        *,
        isolated: bool | None = None,
        limits: CompileLimits | None = None,
        ceiling: MemoryCeiling | None = None,
    ) -> None:
        self.backend = backend
        self.ceiling = ceiling
        self.makes_states = False
        self._lock, self._cache = threading.RLock(), Cache(cache_bytes)
        self._pending: dict[Grammar, _PendingCompile] = {}
        # Beside the cache's own.
        self._counts, self._failures = Counter[str](), Counter[str]()
        self._compile_ms = deque[float](maxlen=TIMINGS)
        self._executor = make_pool(backend, limits or CompileLimits(), isolated)
        # Of grammars that are not in the cache themselves: those after thinking.
        self._rooms: OrderedDict[Grammar, Room] = OrderedDict()
        self._finalizer = weakref.finalize(self, self._executor.stop)

    @classmethod
    def for_vocabulary(
        cls, vocabulary: Vocabulary, backend: str = "auto", **settings: Any
    ) -> GrammarCompiler:
        """A compiler for a vocabulary (`Vocabulary.of(tokenizer)`).

        Args:
            backend: A backend's name, as `--grammar-backend` takes it.
            settings: As the class takes them, but `backend`.

        Raises:
            ConfigError: no backend has that name, or as the class.
            ImportError: the backend's library is not installed.
        """
        return cls(load(backend)(vocabulary), **settings)

    def compile(self, grammar: Grammar, most_tokens: int | None = None) -> CompiledGrammar:
        """The compiled grammar, from the cache if it is there; blocks until it is ready.

        Raises:
            CompileFailure: a limit was exceeded, the process crashed, or the queue is full.
            GrammarError: as raised by the backend.
        """
        future = self.submit(grammar, most_tokens=most_tokens)
        try:
            return future.result()
        except BaseException:
            # An interrupted caller no longer wants it.
            future.cancel()
            raise

    def submit(
        self, grammar: Grammar, holder: str = "", most_tokens: int | None = None
    ) -> Future[CompiledGrammar]:
        """As `compile`, but returns a future, which is done already if the grammar is cached.

        Cancelling the last future of a compile stops it.

        Args:
            holder: Who asks: where compiles wait, the holders take turns.
            most_tokens: That a text is to end within: where these are few, it waits until the
                grammar's rests are told, or cannot be.
        """
        after = grammar.inner if grammar.kind == "after_thinking" else None
        if after is None:
            compiled = self._compiled(grammar, holder)
        else:
            compiled = self._with_reasoning(grammar, after, holder)
        return compiled if most_tokens is None else _with_rests(compiled, most_tokens)

    def _compiled(self, grammar: Grammar, holder: str) -> Future[CompiledGrammar]:
        waiter = Waiter()
        with self._lock:
            known = self._cache.find(grammar)
            has_memory = self._cache.make_way(self.ceiling)
            if not has_memory and known is None and grammar not in self._pending:
                self._failures["no_memory"] += 1
                known = _refusal(grammar, self.ceiling)
            if known is None:
                self._board(grammar, waiter, holder)
        if isinstance(known, CompiledGrammar):
            waiter.set_result(known)
        elif known is not None:
            waiter.set_exception(known)
        return waiter

    def check(self, grammar: Grammar, text: str) -> Future[str | None] | None:
        """Validate a finished output of a best-effort grammar against its whole schema.

        Runs in a worker process under the limits of a compile, since Python's patterns and deep
        schemas may take for ever.

        Returns:
            A future of why the text is invalid, or of None; it raises :class:`CompileFailure` if
            the check fails. No future if the grammar enforces its whole schema.
        """
        return self._executor.submit(Check(grammar, text)) if is_best_effort(grammar) else None

    def warm(self) -> None:
        """Start the workers in advance, so that the first grammar does not wait for them."""
        self._executor.warm()

    def close(self) -> None:
        """End threads and processes; unfinished and later compiles fail."""
        self._finalizer.detach()
        self._executor.close()
        with self._lock:
            unfinished = list(self._pending.values())
        for pending in unfinished:
            closed: Future[CompiledGrammar] = Future()
            closed.set_exception(CompileFailure("the engine was closed", "closed"))
            pending.cancel()
            self._land(pending, closed)
        with self._lock:
            self._cache.clear()

    def __enter__(self) -> GrammarCompiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def snapshot(self) -> dict[str, Any]:
        """Figures as plain data.

        `compiles` were started, `hits` came from the cache, `joined` shared a running compile,
        `remembered` met a cached failure; `evicted` left the cache for others or at the memory's
        ceiling. `failures` are counted by kind: those of
        `CompileFailure`, and `refused`. `compile_ms` is the time from the first request for a
        grammar to its result, over the last 1,024 successes; None if there are none.
        """
        with self._lock:
            names = ("compiles", "hits", "joined", "remembered", "cancelled", "evicted")
            counts = self._counts + self._cache.counts
            return {
                **{name: counts[name] for name in names},
                "failures": dict(self._failures),
                "in_flight": len(self._pending),
                "compile_ms": _percentiles(self._compile_ms),
                "cache_bytes": self._cache.used_bytes,
                "cache_entries": len(self._cache),
                "executor": self._executor.snapshot(),
            }

    def _with_reasoning(
        self, grammar: Grammar, after: Grammar, holder: str
    ) -> Future[CompiledGrammar]:
        """Compile and cache the inner grammar by itself, then wrap it."""

        def wrap(inner: CompiledGrammar, waiter: Waiter) -> None:
            compiled = reasoning_matcher.wrap(inner, grammar)
            room = inner.room
            if room is not None:
                told, apart = room.reach.behind(thinking_of(grammar)), room.apart
                with self._lock:
                    compiled.room = newest(
                        self._rooms, grammar, lambda: self._room(grammar, told, apart), ROOMS
                    )
            waiter.set_result(compiled)

        return _then(self.submit(after, holder), wrap)

    def _room(self, grammar: Grammar, reach: Reach, apart: bool) -> Room:
        make = partial(self._executor.submit, MakeRoom(grammar))
        return Room(reach, self.backend.vocabulary, apart, make)

    def _board(self, grammar: Grammar, waiter: Waiter, holder: str) -> None:
        pending = self._pending.get(grammar)
        if pending is not None:
            self._counts["joined"] += 1
            pending.waiters.append(waiter)
        else:
            self._counts["compiles"] += 1
            pending = self._pending[grammar] = _PendingCompile(grammar, [waiter])
            apart = as_compiled(grammar)
            inner = pending.inner = self._executor.submit(Compile(apart), holder)
            if self.makes_states:
                pending.states = self._executor.submit(MakeStates(apart), holder)
            inner.add_done_callback(lambda done: self._land(pending, done))
        waiter.add_done_callback(lambda done: self._leave(pending, done))

    def _leave(self, pending: _PendingCompile, waiter: Waiter) -> None:
        if not waiter.cancelled():
            return
        with self._lock:
            if waiter in pending.waiters:
                pending.waiters.remove(waiter)
            if pending.waiters or self._pending.get(pending.grammar) is not pending:
                return
            del self._pending[pending.grammar]
            self._counts["cancelled"] += 1
        pending.cancel()

    def _land(self, pending: _PendingCompile, inner: Future[CompiledGrammar]) -> None:
        if inner.cancelled():
            return
        error = inner.exception()
        states = pending.states
        if error is None and states is not None and not states.done():
            # Drafts may not depend on which of them is ready first.
            states.add_done_callback(lambda _: self._land(pending, inner))
            return
        if error is None:
            compiled = inner.result()
            try:
                reach, is_apart = compiled.reach, bool(compiled.plan)
                compiled = distinct_matcher.wrap(compiled, compiled.plan)
                compiled.reach = reach
                if states is not None and not states.cancelled() and states.exception() is None:
                    # Else it has none, and is as good without.
                    compiled.states = states.result()
                if reach is not None:
                    compiled.room = self._room(as_compiled(pending.grammar), reach, is_apart)
            except GrammarError as refusal:
                error = refusal
            except Exception as fault:
                # The plan comes from a worker, as the rest does.
                said = f"{type(fault).__name__}: {fault}"
                error = CompileFailure(f"what was compiled cannot be read: {said}", "crash")
        with self._lock:
            if self._pending.get(pending.grammar) is pending:
                del self._pending[pending.grammar]
            waiters, pending.waiters = pending.waiters, []
            # They hold this pending compile, and it them: the grammar is to go when its last user
            # goes, not when cycles are looked for.
            pending.inner = pending.states = None
            if error is not None:
                kind = error.kind if isinstance(error, CompileFailure) else "refused"
                self._failures[kind if isinstance(error, GrammarError) else "crash"] += 1
                if isinstance(error, GrammarError) and kind not in PASSING:
                    kept_s = REFUSED_S if kind == "refused" else FAILED_S
                    self._cache.keep_failure(pending.grammar, error, kept_s)
            else:
                self._compile_ms.append((time.perf_counter_ns() - pending.start_ns) / 1e6)
                self._cache.keep(pending.grammar, compiled)
        # Outside the lock: callbacks of the waiters run now.
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                if error is not None:
                    waiter.set_exception(copy.copy(error))
                else:
                    waiter.set_result(compiled)


def _refusal(grammar: Grammar, ceiling: MemoryCeiling | None) -> CompileFailure:
    """Why nothing is compiled at the ceiling."""
    most_bytes = 0 if ceiling is None else ceiling.most_bytes
    return CompileFailure(
        f"the {grammar.kind} grammar was not compiled: the engine's process has reached its "
        f"ceiling of {most_bytes} bytes (memory_limit_bytes); try again later",
        "no_memory",
        grammar.kind,
    )


def _size(compiled: CompiledGrammar) -> int:
    table, room = compiled.states, compiled.room
    besides = 0 if room is None else room.nbytes
    return compiled.memory_bytes + besides + (sum(part.nbytes for part in table) if table else 0)


def _with_rests(compiled: Future[CompiledGrammar], most_tokens: int) -> Future[CompiledGrammar]:
    """A compiled grammar whose rests are told, or cannot be, where tokens are few."""

    def wait(compiled: CompiledGrammar, waiter: Waiter) -> None:
        room = compiled.room
        if room is None or room.is_early(most_tokens):
            waiter.set_result(compiled)
        else:
            room.ask(again=True).add_done_callback(lambda _: waiter.set_result(compiled))

    return _then(compiled, wait)


def _then(
    first: Future[CompiledGrammar], go_on: Callable[[CompiledGrammar, Waiter], None]
) -> Future[CompiledGrammar]:
    """A future that ``go_on`` sets when a grammar is compiled; cancelling it stops the compile."""
    # Emptied when it is there: a circle would keep the grammar.
    waiter, running = Waiter(), [first]

    def land(_: Future[Any]) -> None:
        done = running.pop()
        if done.cancelled() or not waiter.set_running_or_notify_cancel():
            return
        try:
            go_on(done.result(), waiter)
        except Exception as error:  # the waiter gets any error
            waiter.set_exception(error)

    def leave(outer: Future[CompiledGrammar]) -> None:
        if outer.cancelled():
            for future in tuple(running):
                future.cancel()

    waiter.add_done_callback(leave)
    first.add_done_callback(land)
    return waiter


def _percentiles(values: Iterable[float]) -> dict[str, float] | None:
    found = list(values)
    if not found:
        return None
    p50, p99 = np.percentile(found, (50, 99))
    return {"p50": float(p50), "p99": float(p99)}
