"""The process that an engine was made in: a fork of it has the engine's memory, but no thread."""

from __future__ import annotations

import os

from overlap_spec.errors import EngineUnavailable


class OwnProcess:
    """The process that is running now, to tell it from later forks."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is not a fork."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise EngineUnavailable in a fork."""
        if not self.is_here:
            raise EngineUnavailable(
                "the engine's threads and processes did not come along with os.fork(): make a new "
                "one in this process, or start it by multiprocessing's `spawn`"
            )
