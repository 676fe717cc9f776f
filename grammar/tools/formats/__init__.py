"""Formats of tool calls, one file each; the file name is the config value."""

from __future__ import annotations

import importlib
import pkgutil
import re

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.tools.format import ToolFormat


def names() -> list[str]:
    """Names of the formats in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_format(name: str) -> ToolFormat:
    """A format by its file name (hyphens count as underscores, case is ignored), or by
    `"package.module:NAME"`.

    Raises:
        GrammarError: the name is unknown, or is not a `ToolFormat`.
    """
    if not isinstance(name, str):
        raise GrammarError(f"{name!r} is not the name of a tool format", "tool_format")
    module_name, colon, attribute = name.partition(":")
    if colon:
        try:
            found = getattr(importlib.import_module(module_name), attribute, None)
        except ImportError as error:
            raise GrammarError(f"tool format {name!r}: {error}", "tool_format") from error
    else:
        wanted = name.lower().replace("-", "_")
        if wanted not in names():
            known = ", ".join(names())
            raise GrammarError(f"unknown tool format {name!r}; known are: {known}", "tool_format")
        found = importlib.import_module(f"{__name__}.{wanted}").FORMAT
    if not isinstance(found, ToolFormat):
        raise GrammarError(f"{name!r} is not a tool format: it must be a ToolFormat", "tool_format")
    return found


def guess_format(template: str) -> str | None:
    """Name of the format whose signs a chat template holds; of several the one with most signs,
    None where there is none, or no single one."""
    bare = re.sub(r"\\n|[\s\\]", "", template)
    found: dict[int, list[str]] = {}
    for name in names():
        signs = load_format(name).signs
        if signs and all(sign in bare for sign in signs):
            found.setdefault(len(signs), []).append(name)
    best = found[max(found)] if found else []
    return best[0] if len(best) == 1 else None
