"""Memory of a process."""

from __future__ import annotations

import os
import resource
import sys


def rss_bytes() -> int:
    """Resident memory of this process, or its peak on systems that do not tell the present one."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
