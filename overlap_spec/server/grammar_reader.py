"""Reads long constraints in worker processes, so that a slow one holds up nobody else.

A schema of some hundred kilobytes can take a minute to check against its metaschema, in pure
Python, which a thread could neither stop nor do beside the loop.
"""

from __future__ import annotations

import asyncio

from overlap_spec.errors import EngineUnavailable, GrammarError, QueueFull
from overlap_spec.grammar.isolation.jobs import Read
from overlap_spec.grammar.isolation.limits import CompileFailure, CompileLimits
from overlap_spec.grammar.isolation.pool import make_pool
from overlap_spec.grammar.spec import Grammar
from overlap_spec.shares import HOLDER

# One that takes longer than a second leaves its place to the next one, and goes on if one of the
# few slow places is free. Workers stand behind the engine and the loop.
LIMITS = CompileLimits(
    time_s=10.0,
    memory_bytes=2**30,
    result_bytes=2**26,
    fast_s=1.0,
    fast_running=2,
    long_running=2,
    fast_waiting=64,
    long_waiting=0,
    nice=5,
)


class GrammarReader:
    """Runs calls that make grammars in workers, which are kept for the next call."""

    def __init__(self) -> None:
        self._pool = make_pool(None, LIMITS)

    def warm(self) -> None:
        """Start a worker for the first call, which would wait for it."""
        self._pool.warm()

    async def read(self, call: bytes) -> Grammar:
        """The grammar that a call makes; cancelling it ends its worker.

        Args:
            call: Pickled; takes no arguments and returns a grammar.

        Raises:
            GrammarError: as the call, or it took too long or too much memory.
            QueueFull: too many are being read.
            EngineUnavailable: two workers in turn were killed or stopped by others, or the
                machine has no memory.
        """
        try:
            grammar: Grammar = await asyncio.wrap_future(
                self._pool.submit(Read(call), HOLDER.get())
            )
            return grammar
        except CompileFailure as failure:
            text = str(failure)
            if failure.kind == "busy":
                raise QueueFull(text) from None
            if failure.kind in ("unavailable", "no_memory", "closed"):
                raise EngineUnavailable(text) from None
            raise GrammarError(text) from None

    async def close(self) -> None:
        """End all workers."""
        await asyncio.to_thread(self._pool.close)
