"""A server that is short of memory says so."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

from overlap_spec.config import EMBEDDED

pytestmark = pytest.mark.skipif(
    not (EMBEDDED / "target" / "model.safetensors").exists(), reason="no embedded weights"
)


def limited(kind: int, value: int) -> Callable[[], None]:
    """Sets a limit in a child before it starts."""
    return lambda: resource.setrlimit(kind, (value, value))


def test_too_little_address_space_ends_in_a_message() -> None:
    command = [sys.executable, "-m", "overlap_spec", "serve", "--port", "0"]
    done = subprocess.run(
        command,
        capture_output=True,
        timeout=120,
        check=False,
        preexec_fn=limited(resource.RLIMIT_AS, 700 * 2**20),
    )
    # The engine cannot load: the front does not wait for it, nor try for ever.
    assert done.returncode not in (0, None)
    assert b"serving on" not in done.stderr
    assert done.stderr
