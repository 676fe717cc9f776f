"""Grammar backends, one file each; the file name is the config value."""

from __future__ import annotations

import importlib
import pkgutil

from overlap_spec.errors import ConfigError
from overlap_spec.grammar.contract import Backend


def names() -> list[str]:
    """Names of the backends in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> type[Backend]:
    """The backend class of a config value.

    Args:
        name: A file name (hyphens count as underscores, case is ignored), or
            `"package.module:Class"` for a user's own backend.

    Raises:
        ConfigError: no backend has that name, or it is not a `Backend`.
        ImportError: the backend's library is not installed.
    """
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        found = getattr(importlib.import_module(module_name), class_name, None)
    else:
        wanted = name.lower().replace("-", "_")
        if wanted not in names():
            raise ConfigError(f"unknown grammar backend {name!r}; known are: {', '.join(names())}")
        found = importlib.import_module(f"{__name__}.{wanted}").BACKEND
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigError(f"{name!r} is not a grammar backend: it must subclass {Backend.__name__}")
    return found
