"""The memory of this process and of its machine, and a ceiling under which the process stays."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from overlap_spec.errors import ConfigError

# At most so often, memory that was freed is given back to the system unasked.
TRIM_EVERY_S = 1.0
# Where version 1 and version 2 of control groups have a group's limit.
LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Do the block's work, which makes no cycles, without the collector of reference cycles, which
    would go over its many new objects again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def rss_bytes() -> int:
    """Resident memory of this process, or its peak on systems that do not tell the present one."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def machine_bytes(root: Path = Path("/")) -> int:
    """Memory of the machine, or of the least of the control groups that hold this process;
    ``root``: where ``proc`` and ``sys`` are."""
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in control_groups("memory", root):
        for name in LIMIT_FILES:
            try:
                # A group without a limit says "max", or a number over any machine's.
                least = min(least, int((folder / name).read_text()))
            except (OSError, ValueError):
                continue
    return least


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """The folders of the groups that limit what ``controller`` (``memory``, ``cpu``) gives this
    process, with those around them; of either version of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = top / path.lstrip("/")
        # In a container the path may be the host's: its own group is then the top.
        found += [own, *(parent for parent in own.parents if parent.is_relative_to(top))]
    return found


def trim() -> None:
    """Give memory that was freed back to the system."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


class MemoryCeiling:
    """Tells when a process has to do without more memory than ``most_bytes``, resident; with
    ``collects`` it looks for garbage in cycles too, which in a process with torch stops all threads
    for 0.1 s."""

    def __init__(self, most_bytes: int, collects: bool = False) -> None:
        self.most_bytes, self._collects = most_bytes, collects
        self._trimmed_s = 0.0

    @classmethod
    def beside(cls, most_bytes: int | None, untouched_bytes: int) -> MemoryCeiling:
        """The ceiling of a process that has all it needs by itself, but ``untouched_bytes``, which
        it takes as its caches are first written; ``most_bytes``: None leaves most of the rest to
        the machine's other processes. ConfigError: it takes more than that by itself."""
        rest = rss_bytes() + untouched_bytes
        if most_bytes is None:
            most_bytes = rest + max(0, machine_bytes() - rest) // 4
        elif most_bytes < rest:
            raise ConfigError(
                f"memory_limit_bytes is {most_bytes}, and the engine takes {rest} by itself, its "
                "whole KV cache included: set more, or lower max_total_tokens"
            )
        return cls(most_bytes)

    def is_reached(self) -> bool:
        """Whether this process has more, also after what is free was given back."""
        if rss_bytes() <= self.most_bytes:
            return False
        now_s = time.monotonic()
        if now_s - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = now_s
            if self._collects:
                gc.collect()
            trim()
        return rss_bytes() > self.most_bytes
