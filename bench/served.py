"""A server of our own for benchmarks over HTTP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType

from overlap_spec.errors import ConfigError

START_S = 180.0
LISTENS = re.compile(r"serving on (http://\S+)")


class Served:
    """``overlap-spec serve`` with some flags; a context manager.

    Raises:
        ConfigError: it ended before it listened; has what it said.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115, closed on exit
        command = [sys.executable, "-m", "overlap_spec", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        try:
            self.url = self._wait()
        except BaseException:
            self.process.kill()
            raise

    def _wait(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := LISTENS.search(self.log()):
                return found[1]
            time.sleep(0.05)
        raise ConfigError(f"the server did not start: {self.log()[-2000:]}")

    def log(self) -> str:
        """What it has written so far."""
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end(self.process)
        self._log.close()


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and end it if it does not within a minute."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def rss_mib(pid: int) -> float:
    """Resident memory of a process in MiB; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0
