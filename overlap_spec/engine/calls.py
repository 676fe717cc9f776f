"""The calls of one engine: one at a time, and none is cut short."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from overlap_spec.engine.interrupts import put_off_interrupts
from overlap_spec.engine.own_process import OwnProcess
from overlap_spec.errors import EngineUnavailable


class Calls:
    """Lets one call at a time in, while the engine is of use.

    Attributes:
        own_process: Where the engine was made.
        closed: Whether it was closed.
        failure: What cut a step short.
    """

    def __init__(self) -> None:
        self.own_process, self._lock = OwnProcess(), threading.RLock()
        self.closed = False
        self.failure: BaseException | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock: Ctrl-C waits until it is free again. What fails meanwhile is a step, or
        the reading of one: nothing can be computed after it."""
        self.own_process.check()
        with put_off_interrupts(), self._lock:
            try:
                yield
            except EngineUnavailable:
                raise
            except BaseException as error:
                self.failure = error
                raise

    def check_open(self) -> None:
        """Raise EngineUnavailable where no request is taken any more."""
        self.own_process.check()
        if self.closed:
            raise EngineUnavailable("the engine is closed: make a new one")
        self.check_whole()

    def check_whole(self) -> None:
        """Raise EngineUnavailable where no step can be run any more."""
        if (error := self.failure) is not None:
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise EngineUnavailable(
                f"a step of the engine was cut short, and the engine with it ({text}): "
                "make a new one"
            ) from error
