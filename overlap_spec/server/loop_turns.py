"""The event loop's turns: what is done in one of them holds up everybody else."""

from __future__ import annotations

import asyncio
import errno
import logging
import selectors
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

log = logging.getLogger("overlap_spec")

# What a system is out of when it refuses a connection.
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOG_EVERY_S = 1.0
# Upper ends of the buckets of all turns, in seconds.
ENDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Turnstile:
    """Gives each of those who call it a turn of the loop that they share with no other of them.

    For pieces of work that are short alone and long together, such as reading large bodies.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def __call__(self) -> None:
        """Wait for a turn; the caller then does its piece of work before it waits again."""
        async with self._lock:
            await asyncio.sleep(0)


class Buckets:
    """Counts values in buckets; many at once in a time that hardly depends on how many.

    Args:
        ends: Largest value of each bucket, ascending; one more bucket has what is beyond.

    Attributes:
        counts: Values in each bucket.
        sum: Of all values.
    """

    def __init__(self, ends: Sequence[float]) -> None:
        self.ends, self.counts = tuple(ends), [0] * (len(ends) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count one value, ``count`` times."""
        self.counts[bisect_left(self.ends, value)] += count
        self.sum += value * count

    def add_all(self, values: Sequence[float]) -> None:
        """Count many values."""
        array = np.asarray(values, dtype=np.float64)
        places = np.searchsorted(self.ends, array)
        found = np.bincount(places, minlength=len(self.counts)).tolist()
        self.counts = [old + new for old, new in zip(self.counts, found, strict=True)]
        self.sum += float(array.sum())


class TurnTimes:
    """How long the loop's turns took: everything between two waits for events.

    A turn's processor time is that of the loop's own thread, so that a busy machine, which slows
    everything, does not count as a loop that is held.

    Attributes:
        worst_s: Processor time of the longest turn so far.
        worst_wall_s: Wall-clock time of the longest turn so far.
        took: Turns by their processor time.
    """

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what was, such as the server's start, and the turn under way."""
        self.worst_s = self.worst_wall_s = 0.0
        self.took, self._began = Buckets(ENDS_S), None

    def begin(self) -> None:
        """The loop has events to handle."""
        self._began = time.thread_time(), time.perf_counter()

    def end(self) -> None:
        """The loop waits for events again."""
        if self._began is None:
            return
        cpu_s, wall_s = self._began
        took_s = time.thread_time() - cpu_s
        self.took.add(took_s)
        self.worst_s = max(self.worst_s, took_s)
        self.worst_wall_s = max(self.worst_wall_s, time.perf_counter() - wall_s)


class TimedSelector(selectors.DefaultSelector):
    """A selector that tells when a wait for events begins and ends."""

    def __init__(self, turns: TurnTimes) -> None:
        super().__init__()
        self._turns = turns

    def select(self, timeout: float | None = None) -> Any:
        self._turns.end()
        try:
            return super().select(timeout)
        finally:
            self._turns.begin()


def timed_loop(turns: TurnTimes) -> Callable[[], asyncio.AbstractEventLoop]:
    """A factory of event loops whose turns are entered in ``turns``."""
    return lambda: asyncio.SelectorEventLoop(TimedSelector(turns))


class FaultLog:
    """Logs a loop's faults; the lack of descriptors or memory for a new connection, which a loop
    meets again and again, once a second."""

    def __init__(self) -> None:
        self._logged_s = -LOG_EVERY_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """See :meth:`asyncio.loop.set_exception_handler`."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in SCARCE:
            loop.default_exception_handler(context)
            return
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log.error("no new connections for now: %s", error.strerror)
