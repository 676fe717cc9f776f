"""A process's connections to its fork server and its workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from overlap_spec.children import OUTSIDE, is_stopped, without_secrets
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation.channel import pair, send
from overlap_spec.grammar.isolation.fork_server import Setup
from overlap_spec.grammar.isolation.limits import CompileLimits

# The import path comes first, to find the package. `-m` would load the module under two names.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from overlap_spec.grammar.isolation.fork_server import main; main(sys.argv[2:])"
)
# Numerical libraries start threads on import; a fork server must have none.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
END_S = 5.0


class ForkServerLink:
    """Starts a fork server and sends it requests; belongs to the thread that created it.

    The kernel kills the fork server when that thread ends, however that happens.

    Attributes:
        gone: Why no more comes of it, once that is known.
        ready: Done once it forks workers, or is gone.
        attended: The task that hears what it tells.
        workers: Those that are in use.
    """

    def __init__(self, backend: Backend | None, limits: CompileLimits) -> None:
        self.gone: Exception | None = None
        self.ready = asyncio.Event()
        self.attended: asyncio.Task[None] | None = None
        self.since_s = time.monotonic()
        self.workers: set[Worker] = set()
        self.end, far = pair()
        self.end.setblocking(False)
        kind = type(backend)
        vocabulary = backend.vocabulary if backend else None
        setup = Setup(kind.__module__, kind.__qualname__, vocabulary, limits)
        with far, os.fdopen(os.memfd_create("setup"), "wb") as file:
            pickle.dump(setup, file)
            file.flush()
            given = (far.fileno(), file.fileno())
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    START,
                    json.dumps(sys.path),
                    *map(str, (*given, os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=given,
                # Ctrl-C reaches only the engine, which drains before it ends.
                start_new_session=True,
                env=without_secrets(os.environ) | ONE_THREAD,
            )

    def fork(self, number: int) -> Worker:
        """Request a worker, which takes jobs at once, before the fork server is ready.

        Raises:
            OSError: the fork server is gone or does not read.
        """
        near, far = pair()
        near.setblocking(False)
        with far:
            send(self.end, far.fileno(), order="fork", number=number)
        worker = Worker(self, number, near)
        self.workers.add(worker)
        return worker

    def close(self) -> bool:
        """End the fork server and with it all workers, and wait until it has ended.

        Returns:
            Whether others had killed or stopped it before.
        """
        self.end.close()
        was_stopped = is_stopped(self.process.pid)
        if was_stopped:
            # A worker that was stopped at its very start would not end with it.
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            return -self.process.wait(END_S) in OUTSIDE
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return was_stopped


@dataclass(eq=False)
class Worker:
    """A worker process. Its process id is known from its first job on.

    Attributes:
        has_begun: It has started on its job.
        has_ended: Its end was told.
        is_slow: It has the niceness of long jobs, which cannot be taken back.
    """

    link: ForkServerLink
    number: int
    end: socket.socket
    pid: int | None = None
    has_begun: bool = False
    has_ended: bool = False
    is_slow: bool = False

    def order(self, order: str) -> None:
        """``kill`` it, or ``slow`` it down."""
        # A fork server that is gone takes its workers with it.
        with contextlib.suppress(OSError):
            send(self.link.end, order=order, number=self.number)

    def close(self) -> None:
        """Take no more from it; it ends when it has done what it does."""
        self.link.workers.discard(self)
        self.end.close()
