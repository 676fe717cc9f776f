"""The calls of one engine: one at a time, and none is cut short, for nobody can use an engine whose
step was cut in the middle."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from overlap_spec.children import OwnProcess
from overlap_spec.errors import EngineUnavailable

# What a block has to end after the first Ctrl-C, in seconds; a later one is raised in it.
PATIENCE_S = 10.0


class _PutOff:
    """A handler of SIGINT that keeps the calls of another one for later."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.first: tuple[int, FrameType | None] | None = None
        self._first_s = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self._first_s = (number, frame), time.monotonic()
        elif time.monotonic() - self._first_s >= PATIENCE_S:
            self.first = None
            self.handler(number, frame)


@contextmanager
def put_off_interrupts() -> Iterator[None]:
    """Let Ctrl-C, which Python raises in the main thread alone, wait for the end of the block.

    Where the block does not end, in :data:`PATIENCE_S`, the next one is raised in it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if not is_main or not callable(handler) or isinstance(handler, _PutOff):
        yield
        return
    put_off = _PutOff(handler)
    # From here on nothing is raised, and before nothing has changed.
    signal.signal(signal.SIGINT, put_off)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if put_off.first is not None:
            handler(*put_off.first)


class Calls:
    """Lets one call at a time in, while the engine, made in ``own_process``, is of use: it is not
    ``closed``, and no step was cut short, by a ``failure``."""

    def __init__(self) -> None:
        self.own_process, self._lock, self.closed = OwnProcess(), threading.RLock(), False
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
