"""Where what is made once a machine is kept (compiled kernels); and what is kept of what was made
for the newest of many."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def cache_folder() -> Path:
    """The project's folder in the user's cache: of ``$XDG_CACHE_HOME``, or of ``~/.cache``; it may
    not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "overlap-spec"


def newest(known: OrderedDict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The value of a key, which is made where there is none; of more than ``most`` those go that
    were asked for longest ago."""
    if key not in known:
        known[key] = make()
    known.move_to_end(key)
    while len(known) > most:
        known.popitem(last=False)
    return known[key]
