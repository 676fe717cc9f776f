"""Where what is made once a machine is kept: cost profiles, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The project's folder in the user's cache: of ``$XDG_CACHE_HOME``, or of ``~/.cache``; it may
    not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "overlap-spec"
