"""The few threads in which requests are prepared that take long."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from overlap_spec.ipc.open_requests import OpenRequests
from overlap_spec.shares import HOLDER, Lane

THREADS = 2
Result = TypeVar("Result")


class Preparation:
    """Does work in threads, in which the holders of requests take turns; ``requests``: those that
    are open, among which one counts that is being prepared."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests, self._threads = requests, ThreadPoolExecutor(THREADS, "tokenise")
        # As many may wait for a thread as requests may be open.
        self._lane = Lane(THREADS, sys.maxsize)

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of ``work``. QueueFull: too many requests are open or are being prepared."""
        holder, held, loop = HOLDER.get(), self._requests.held, asyncio.get_running_loop()
        self._requests.check_room(holder)
        held.add(holder)
        try:
            await self._lane.take(holder)
        except BaseException:
            held.add(holder, -1)
            raise
        future = self._threads.submit(work)

        def over() -> None:
            self._lane.give(holder)
            held.add(holder, -1)

        def call_over(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # The loop has been closed.
                loop.call_soon_threadsafe(over)

        # Work that has begun goes on if its caller has gone, and counts until its end.
        future.add_done_callback(call_over)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads, without waiting."""
        self._threads.shutdown(wait=False, cancel_futures=True)
