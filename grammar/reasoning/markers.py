"""The markers that tool formats and reasoning parsers treat as text."""

from __future__ import annotations

from functools import cache

from overlap_spec.grammar.reasoning.reply import FORMATS
from overlap_spec.grammar.tools import formats as tool_formats
from overlap_spec.grammar.tools.formats import load_format


@cache
def known_markers() -> frozenset[str]:
    """All markers of the known tool and reasoning formats."""
    calls = {marker for name in tool_formats.names() for marker in load_format(name).markers}
    return frozenset(calls.union(*((form.begin, form.end) for form in FORMATS.values())))
