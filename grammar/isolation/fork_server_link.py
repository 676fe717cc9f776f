"""The engine's connection to a fork server."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

from overlap_spec.children import is_stopped, without_secrets
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation.channel import pair, receive, send
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


def check_importable(backend: Backend) -> None:
    """Check that a new process can import a backend's class by its name.

    Raises:
        ConfigError: it cannot.
    """
    kind = type(backend)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "." in kind.__qualname__ or kind.__module__ == "__main__":
        raise ConfigError(
            f"grammar backend {name} cannot be imported by a compile "
            "worker: move it to the top of a module, or compile in this process (isolated=False)"
        )


class ForkServerLink:
    """Starts a fork server and sends it requests; belongs to the thread that created it.

    The kernel kills the fork server when that thread ends, however that happens.
    """

    def __init__(self, backend: Backend, limits: CompileLimits) -> None:
        self.ready = False
        self.end, far = pair()
        self.end.setblocking(False)
        kind = type(backend)
        setup = Setup(kind.__module__, kind.__qualname__, backend.vocabulary, limits)
        file = os.memfd_create("setup")
        try:
            with os.fdopen(file, "wb", closefd=False) as body:
                pickle.dump(setup, body)
            given = [str(far.fileno()), str(file), str(os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), *given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(far.fileno(), file),
                start_new_session=True,
                env=without_secrets(os.environ) | ONE_THREAD,
            )
        finally:
            os.close(file)
            far.close()

    def fork(self, number: int) -> socket.socket:
        """Request a worker; its socket is writable at once, before the fork server is ready.

        Raises:
            OSError: the fork server is gone or does not read.
        """
        near, far = pair()
        near.setblocking(False)
        with far:
            send(self.end, far.fileno(), order="fork", number=number)
        return near

    def kill(self, number: int) -> None:
        """Request that a worker is killed.

        Raises:
            OSError: as for `fork`.
        """
        send(self.end, order="kill", number=number)

    def slow(self, number: int) -> None:
        """Request that a worker gets the niceness of long compiles.

        Raises:
            OSError: as for `fork`.
        """
        send(self.end, order="slow", number=number)

    def event(self) -> dict[str, Any] | None:
        """The next report; None if the fork server has ended.

        Raises:
            BlockingIOError: no report is waiting.
        """
        message = receive(self.end)
        return None if message is None else message.header

    def close(self) -> None:
        """End the fork server and with it all workers, and wait until it has ended."""
        self.end.close()
        if is_stopped(self.process.pid):
            # A worker that was stopped at its very start would not end with it.
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
