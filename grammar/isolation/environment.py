"""The environment of child processes."""

from __future__ import annotations

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
