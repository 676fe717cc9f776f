"""Compiling once: a byte-bounded cache in front of a backend."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future

from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.grammar.spec import Grammar

Key = tuple[Grammar, str, str]


class GrammarCompiler:
    """Compiles grammars behind a least-recently-used cache; safe to share between threads.

    Callers that ask for the same grammar at the same time wait for one compilation. A failure is
    raised to all who wait for it and then forgotten.

    Args:
        backend: What compiles.
        cache_bytes: Bound of `memory_bytes` summed over the cache. A grammar that is larger by
            itself is compiled and handed out, but not kept.
    """

    def __init__(self, backend: Backend, cache_bytes: int = 256 * 2**20) -> None:
        self.backend = backend
        self.cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._done: OrderedDict[Key, CompiledGrammar] = OrderedDict()
        self._running: dict[Key, Future[CompiledGrammar]] = {}
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that the cache holds now."""
        return self._used_bytes

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar, from the cache where it is there.

        Raises:
            GrammarError: as the backend raises it.
        """
        key = (grammar, self.backend.vocabulary.fingerprint, self.backend.name)
        with self._lock:
            if key in self._done:
                self._done.move_to_end(key)
                return self._done[key]
            flight = self._running.get(key)
            mine = flight is None
            if flight is None:
                flight = self._running[key] = Future()
        if mine:
            self._compile(key, flight)
        return flight.result()

    def _compile(self, key: Key, flight: Future[CompiledGrammar]) -> None:
        try:
            compiled = self.backend.compile(key[0])
        except BaseException as error:
            with self._lock:
                del self._running[key]
            flight.set_exception(error)
            return
        with self._lock:
            del self._running[key]
            self._keep(key, compiled)
        flight.set_result(compiled)

    def _keep(self, key: Key, compiled: CompiledGrammar) -> None:
        size = compiled.memory_bytes
        if size > self.cache_bytes:
            return
        while self._used_bytes + size > self.cache_bytes:
            _, oldest = self._done.popitem(last=False)
            self._used_bytes -= oldest.memory_bytes
        self._done[key] = compiled
        self._used_bytes += size
