"""The engine's hold on a template process."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from typing import Any

from overlap_spec.errors import ConfigError
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.isolation.channel import pair, receive, send
from overlap_spec.grammar.isolation.fork_server import Setup
from overlap_spec.grammar.isolation.limits import CompileLimits

# The path goes first: by it the package is found. `-m` would load the module under two names.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from overlap_spec.grammar.isolation.fork_server import main; main(sys.argv[2:])"
)
# Numerical libraries start threads when they are loaded, and a template must have none.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
END_S = 5.0


def check_importable(backend: Backend) -> None:
    """ConfigError where a new process could not find the class of a backend by its name."""
    kind = type(backend)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "." in kind.__qualname__ or kind.__module__ == "__main__":
        raise ConfigError(
            f"grammar backend {name} cannot be imported by a compile "
            "worker: move it to the top of a module, or compile in this process (isolated=False)"
        )


class ForkServerLink:
    """Starts a template and gives it orders; belongs to the thread that made it.

    The system ends the template when that thread ends, however that happens.
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
            given = [str(far.fileno()), str(file)]
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), *given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(far.fileno(), file),
                start_new_session=True,
                env=os.environ | ONE_THREAD,
            )
        finally:
            os.close(file)
            far.close()

    def fork(self, number: int) -> socket.socket:
        """Order a worker; its end may be written to at once, also before the template is ready.

        Raises:
            OSError: the template is gone or does not obey.
        """
        near, far = pair()
        near.setblocking(False)
        with far:
            send(self.end, far.fileno(), order="fork", number=number)
        return near

    def kill(self, number: int) -> None:
        """Order the end of a worker.

        Raises:
            OSError: as for `fork`.
        """
        send(self.end, order="kill", number=number)

    def slow(self, number: int) -> None:
        """Order a worker to the niceness of long ones.

        Raises:
            OSError: as for `fork`.
        """
        send(self.end, order="slow", number=number)

    def event(self) -> dict[str, Any] | None:
        """The next report; None where the template has ended.

        Raises:
            BlockingIOError: there is none now.
        """
        message = receive(self.end)
        return None if message is None else message.header

    def close(self) -> None:
        """End the template and with it all workers, and wait for its end."""
        self.end.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
