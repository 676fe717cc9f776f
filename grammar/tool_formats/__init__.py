"""Spellings of tool calls, one file each; the file's name is the config value."""

from __future__ import annotations

import pkgutil


def names() -> list[str]:
    """The formats that have a file here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
