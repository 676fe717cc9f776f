"""A folder of compiled kernels that works wherever it lies, on every machine with the same GPU.

The environment variable ``OVERLAP_SPEC_KERNEL_CACHE`` names it: kernels are taken from there, and
put there once compiled. Triton's own cache tells its files by their whole paths, so that a copy of
it elsewhere would be read as empty, and every kernel be compiled anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

VARIABLE = "OVERLAP_SPEC_KERNEL_CACHE"


class CarriedCache(FileCacheManager):  # type: ignore[misc]
    """Triton's cache of one kernel, whose files are told by their names."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Name → path of the files that were put together; None where one is missing."""
        listing = self.get_file(f"__grp__{filename}")
        if listing is None:
            return None
        names = json.loads(Path(listing).read_text(encoding="utf-8"))["child_paths"]
        found = {name: self.get_file(name) for name in names}
        return None if None in found.values() else found


def settle() -> None:
    """Have Triton keep its kernels where the environment says, if it says so."""
    if folder := os.environ.get(VARIABLE):
        knobs.cache.dir = folder
        knobs.cache.manager_class = CarriedCache
