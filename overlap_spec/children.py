"""Child processes: the environment that they get, the limits that they set themselves, their end,
and forks, which have their parent's memory but none of its threads."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from overlap_spec.errors import EngineUnavailable

# What marks a secret as a word of a variable's name, or as the end of one (``PGPASSWORD``); and
# what does as one word among others: ``PWD`` alone is a folder.
SECRET = re.compile(r"(password|passwd|passphrase|secret|token|apikey|credential)s?$")
SECRET_WORDS = frozenset(("key", "auth", "pass"))
SECRET_AMONG_OTHERS = frozenset(("pwd", "pat"))
# The same of a value: who asks in a URL, or a field of a connection's text.
USER = re.compile(r"://[^/?#\s]*@|://[^/?#\s:]*:[^\s@]*@")
FIELD = re.compile(r"(?i)(password|passwd|pwd|secret|token|key)\s*=\s*\S")
PR_SET_PDEATHSIG = 1
# Signals by which others end a process: a library's own faults are others.
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """All variables but those that hold a secret by their name, such as ``OVERLAP_SPEC_API_KEY``,
    or by their value, such as a URL with a password: children work on untrusted input and need
    none."""
    return {
        name: value
        for name, value in environment.items()
        if not _names_secret(name) and not USER.search(value) and not FIELD.search(value)
    }


def _names_secret(name: str) -> bool:
    words = re.split(r"[^a-z0-9]+", name.lower().strip("_"))
    marks = SECRET_WORDS | (SECRET_AMONG_OTHERS if len(words) > 1 else set())
    return any(word in marks or SECRET.search(word) for word in words)


def limit_self(kind: int, most: int) -> None:
    """Set a resource limit of this process, unless it was started under a lower one; ``kind``: of
    module `resource`, as `RLIMIT_FSIZE`; in its unit."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def can_take(size: int) -> bool:
    """Whether this process can have so many more bytes of memory; they are given back at once."""
    if size <= 0:
        return True
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError, OverflowError):
        return False
    return True


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; at once if the
    process ``parent`` is gone already. Nothing happens on systems other than Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_with_input(last: Callable[[], None] = lambda: None) -> None:
    """End this process when standard input closes, which is when its parent has gone, or has
    closed it; ``last`` is called before that."""

    def wait() -> None:
        # Not through sys.stdin: a dying interpreter would wait for its lock.
        while os.read(0, 4096):
            continue
        last()
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def is_stopped(pid: int | None) -> bool:
    """Whether a process exists and was stopped, by SIGSTOP or a debugger."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


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
