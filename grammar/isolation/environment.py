"""The environment of child processes, and the limits that they set themselves."""

from __future__ import annotations

import resource
from collections.abc import Mapping

# Words of a variable's name that mark a secret.
SECRET = frozenset(
    ("key", "apikey", "token", "secret", "password", "passwd", "credentials", "auth")
)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """All variables but those whose names say that they hold a secret, such as
    ``OVERLAP_SPEC_API_KEY``: children work on untrusted input and need none."""
    return {
        name: value
        for name, value in environment.items()
        if not SECRET & set(name.lower().split("_"))
    }


def limit_self(kind: int, most: int) -> None:
    """Set a resource limit of this process, unless it was started under a lower one.

    Args:
        kind: Of module `resource`, as `RLIMIT_FSIZE`; in its unit.
    """
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))
