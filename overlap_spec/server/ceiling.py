"""The memory that this process may take."""

from __future__ import annotations

import ctypes
import gc
import time

from overlap_spec.async_engine import rss_bytes

# At most so often, memory that was freed is given back to the system.
TRIM_EVERY_S = 1.0


class MemoryCeiling:
    """Tells when requests have to be refused for want of memory.

    Args:
        most_bytes: Resident memory of this process.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._trimmed_s = 0.0

    def is_reached(self) -> bool:
        """Whether this process has more, also after what is free was given back."""
        if rss_bytes() <= self.most_bytes:
            return False
        now_s = time.monotonic()
        if now_s - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = now_s
            gc.collect()
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
        return rss_bytes() > self.most_bytes
