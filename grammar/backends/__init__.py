"""Grammar backends, one file each; the file's name is the config value."""

from __future__ import annotations

import importlib
import pkgutil

from overlap_spec.errors import ConfigError
from overlap_spec.grammar.contract import Backend


def names() -> list[str]:
    """The backends that have a file here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> type[Backend]:
    """The backend class of a config value.

    Args:
        name: A file's name (hyphen and underscore are the same, case does not matter), or
            `"package.module:Class"` for one of the user's own.

    Raises:
        ConfigError: there is none of that name, or it is not a `Backend`.
        ImportError: the library of the backend is not installed.
    """
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        found = getattr(importlib.import_module(module_name), class_name, None)
    else:
        wanted = name.lower().replace("-", "_")
        if wanted not in names():
            raise ConfigError(f"unknown grammar backend {name!r}; there are: {', '.join(names())}")
        found = importlib.import_module(f"{__name__}.{wanted}").BACKEND
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigError(f"{name!r} is not a grammar backend: it must subclass {Backend.__name__}")
    return found
