"""The processes of the other ranks: started by rank 0, watched, and ended with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from overlap_spec.children import without_secrets
from overlap_spec.errors import EngineUnavailable

# What a rank that was told to end has for it, in seconds.
GRACE_S = 10.0
PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent.parent)


class Processes:
    """Ranks 1 to ``size`` - 1, each ``python -m MODULE PARENT ARGUMENTS RANK``. The first that ends
    before :meth:`close` ends all others, and calls ``on_loss``: what waits for them fails at once.
    ``folder`` is removed at the end."""

    def __init__(self, module: str, arguments: Sequence[str], size: int, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self.on_loss: Callable[[], None] = lambda: None
        self._closing, self._lost, self._gone = False, "", threading.Event()
        self._all: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []
        try:
            for rank in range(1, size):
                self._all[rank] = self._start(rank, module, [*arguments, str(rank)])
        except BaseException:
            self._closing = True
            self._kill()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, of rank 1 first."""
        return tuple(process.pid for process in self._all.values())

    def check(self) -> None:
        """Raise EngineUnavailable if a rank is gone."""
        if self._lost:
            raise EngineUnavailable(self._lost)

    def wait_for_loss(self, timeout_s: float) -> None:
        """Give a rank that broke its connection the time to be seen to have ended."""
        self._gone.wait(timeout_s)

    def give_up(self, reason: str) -> None:
        """End all at once, for ``reason``."""
        with self._lock:
            self._lost = self._lost or reason
        self._gone.set()
        self._kill()
        self.on_loss()

    def close(self, farewell: Callable[[], None]) -> None:
        """Tell all to end by ``farewell``, unless they are gone; wait for them, and kill those that
        do not end in :data:`GRACE_S`."""
        self._closing = True
        if not self._lost:
            farewell()
        for process in self._all.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0 if self._lost else GRACE_S)
        self._kill()
        for watcher in self._watchers:
            watcher.join()
        for process in self._all.values():
            assert process.stdin is not None
            process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a rank from the thread that watches it: it ends with that thread."""
        started: Future[subprocess.Popen[bytes]] = Future()

        def run() -> None:
            try:
                process = _start(module, arguments)
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(process)
            self._watch(rank, process)

        watcher = threading.Thread(target=run, name=f"rank-{rank}", daemon=True)
        watcher.start()
        self._watchers.append(watcher)
        return started.result()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._closing:
            return
        ended = f"ended with exit status {status}"
        if status < 0:
            ended = f"was killed by {signal.Signals(-status).name}"
        told = f"rank {rank} {ended}, and the engine with it: make a new one"
        self.give_up(f"tensor_parallel_size: {told}")

    def _kill(self) -> None:
        for process in list(self._all.values()):
            if process.poll() is None:
                process.kill()


def _start(module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    # As here: a drafter of one's own may be found nowhere else.
    paths = [PACKAGE_PARENT, *(path or str(Path.cwd()) for path in sys.path)]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments],
        stdin=subprocess.PIPE,
        # What a library prints must not mix with this process's own output.
        stdout=2,
        env={**without_secrets(os.environ), "PYTHONPATH": os.pathsep.join(paths)},
        # Ctrl-C reaches only this process, which ends the others.
        start_new_session=True,
    )
