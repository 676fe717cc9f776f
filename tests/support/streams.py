"""Streams with all the chances for races that a GPU has, on a machine without one."""

import random
import time
from collections.abc import Callable

from overlap_spec.worker.streams import Streams, ThreadStream


class ChaosStream(ThreadStream):
    """A random delay before and after every piece of work."""

    def __init__(self, name: str, seed: int, longest_s: float = 0.002) -> None:
        self._random, self._longest_s = random.Random(f"{name}-{seed}"), longest_s
        super().__init__(name)

    def _put(self, job: Callable[[], None]) -> None:
        before, after = (self._delay() for _ in range(2))

        def delayed() -> None:
            time.sleep(before)
            job()
            time.sleep(after)

        super()._put(delayed)

    def _delay(self) -> float:
        # Most are nothing: streams must also run ahead of each other.
        return self._longest_s * max(0.0, self._random.uniform(-1.0, 1.0))


class ThreadStreams(Streams):
    """One thread a stream: with all the chances for races that a GPU has.

    Args:
        make: Builds each, by name.
    """

    def __init__(self, make: Callable[[str], ThreadStream]) -> None:
        self.compute, self.plan, self.copy, self.prefill = (
            make(name) for name in ("compute", "plan", "copy", "prefill")
        )
