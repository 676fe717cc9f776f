"""Parts of a long run in a process of their own.

A part may hang, or leave the device in a state that no later call of its process survives. Then the
process is killed with all that it started, and the next part begins in a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from bench.gpu_setup import Context, Result, Setup

LONGEST_MESSAGE = 2000


class PartFailed(Exception):
    """A part raised an error, took too long, or ended its process.

    Args:
        so_far: What it had told by then; None: nothing.
    """

    def __init__(self, why: str, so_far: Result | None = None) -> None:
        super().__init__(why)
        self.so_far = so_far


class Child:
    """Runs parts in one process, which keeps a :class:`Context` for them until it is closed.

    Args:
        setup: What the context is made of.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def call(
        self,
        work: str,
        limit_s: float,
        before: Mapping[str, Any] | None = None,
        keep: Callable[[Result], object] = lambda _: None,
        tell: Callable[[], object] = lambda: None,
    ) -> Result:
        """What the function ``work`` (``module:name``) returns for the context.

        Args:
            before: What an earlier call found of the same part: :attr:`Context.before`.
            keep: Takes what the part has found so far, each time that it tells it.
            tell: Called about once a second meanwhile.

        Raises:
            PartFailed: it raised, or was not done within ``limit_s``; the process has ended.
        """
        try:
            return self._answer((work, limit_s, dict(before or {})), keep, tell)
        except BaseException:
            self.close()
            raise

    def _answer(
        self,
        asked: tuple[str, float, dict[str, Any]],
        keep: Callable[[Result], object],
        tell: Callable[[], object],
    ) -> Result:
        limit_s = asked[1]
        pipe, end = self._open(), time.monotonic() + limit_s
        so_far: Result | None = None
        try:
            pipe.send(asked)
            while True:
                while not pipe.poll(min(1.0, max(0.0, end - time.monotonic()))):
                    if time.monotonic() >= end:
                        raise PartFailed(f"not done within {limit_s:.0f} s", so_far)
                    tell()
                result, error, done = pipe.recv()
                so_far = result or so_far
                if done:
                    break
                keep(result)
        except (EOFError, ConnectionError):
            why = f"its process ended with exit status {self._status()}"
            raise PartFailed(why, so_far) from None
        if error is not None:
            raise PartFailed(error, so_far)
        assert isinstance(result, Result)
        return result

    def close(self) -> None:
        """End the process and all that it started."""
        process, self._process = self._process, None
        if process is None or self._pipe is None:
            return
        assert process.pid is not None
        self._pipe.close()
        # It leads a group of its own from its first line on; before that it has started nothing.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()

    def _open(self) -> Connection:
        if self._process is None or self._pipe is None:
            # A fork would share what is open on the device.
            spawn = multiprocessing.get_context("spawn")
            self._pipe, far = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(far, self.setup))
            self._process.start()
            far.close()
        return self._pipe

    def _status(self) -> int | None:
        assert self._process is not None
        self._process.join(5)
        return self._process.exitcode


def _serve(pipe: Connection, setup: Setup) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Standard output is the record's.
    os.dup2(2, 1)
    context = Context(setup, lambda so_far: pipe.send((so_far, None, False)))
    while True:
        try:
            work, limit_s, context.before = pipe.recv()
        except EOFError:
            return
        context.ends_s = time.monotonic() + limit_s
        module, _, name = work.partition(":")
        result, wrong = None, None
        try:
            result = getattr(import_module(module), name)(context)
        except BaseException as error:
            # ``fail`` of another benchmark ends in SystemExit.
            traceback.print_exc()
            wrong = describe(error)
        pipe.send((result, wrong, True))


def _end_with_parent() -> None:
    """End with all that was started once who asks is gone, even if it was killed: nothing else
    would give the device's memory back."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def describe(error: BaseException) -> str:
    """An error in one line or a few, for a record."""
    if isinstance(error, ImportError):
        text = f"not installed: {error}"
    elif isinstance(error, SystemExit):
        text = f"ended with exit status {error.code}"
    else:
        text = f"{type(error).__name__}: {error}"
    return text[:LONGEST_MESSAGE]
