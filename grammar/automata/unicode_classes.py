r"""Rewrites what ECMA-262 has and Python's parser has not: `\p{…}`, `\P{…}` and `\u{…}`.

A property is a general category of the Unicode database, short (`L`, `Nd`) or long (`Letter`,
`Decimal_Number`), with or without `General_Category=`; or `ASCII`, `Any`, `digit`, `punct`. It
becomes the ranges of its characters.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from overlap_spec.grammar.automata.charset import ALL, Ranges, negate, union

_LONG = {
    "Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll",
    "Titlecase_Letter": "Lt", "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M",
    "Combining_Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc", "Enclosing_Mark": "Me",
    "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl",
    "Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps", "Close_Punctuation": "Pe",
    "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf", "Other_Punctuation": "Po",
    "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk",
    "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp", "Other": "C", "Control": "Cc", "cntrl": "Cc", "Format": "Cf",
    "Private_Use": "Co", "Unassigned": "Cn",
}  # fmt: skip
_WHOLE: dict[str, Ranges] = {"ASCII": ((0, 0x7F),), "Any": ALL}
_PART = re.compile(
    r"\\(?P<sign>[pP])(?:\{(?P<name>[^{}]*)\})?|\\u\{(?P<point>[0-9A-Fa-f]{1,8})\}|\\.|[\[\]]",
    re.DOTALL,
)


def rewritten(source: str) -> str:
    """A pattern without these constructs.

    Raises:
        re.error: a property or code point that is not known.
    """
    if "\\p" not in source and "\\P" not in source and "\\u{" not in source:
        return source
    inside = False

    def one(match: re.Match[str]) -> str:
        nonlocal inside
        found = match[0]
        if found in ("[", "]"):
            inside = found == "["
            return found
        if match["point"] is not None:
            point = int(match["point"], 16)
            if point > 0x10FFFF:
                raise re.error(f"{found} is not a character", source, match.start())
            return f"\\U{point:08x}"
        if match["sign"] is None:
            return found
        members = _members(match["name"] or "")
        if members is None:
            raise re.error(
                f"the property {found} is not supported: only general categories are",
                source,
                match.start(),
            )
        spans = "".join(
            f"\\U{low:08x}-\\U{high:08x}"
            for low, high in (members if match["sign"] == "p" else negate(members))
        )
        return spans if inside else f"[{spans}]"

    return _PART.sub(one, source)


def _members(name: str) -> Ranges | None:
    name = re.sub(r"^(General_Category|gc)=", "", name)
    if name in _WHOLE:
        return _WHOLE[name]
    short = _LONG.get(name, name)
    if short == "LC":
        return union(_categories()[part] for part in ("Lu", "Ll", "Lt"))
    found = [ranges for category, ranges in _categories().items() if category.startswith(short)]
    return union(found) if found and 1 <= len(short) <= 2 else None


@cache
def _categories() -> dict[str, Ranges]:
    """The characters of each general category; takes some 200 ms."""
    found: dict[str, list[tuple[int, int]]] = {}
    for low, high in ALL:
        for point in range(low, high + 1):
            spans = found.setdefault(unicodedata.category(chr(point)), [])
            if spans and spans[-1][1] == point - 1:
                spans[-1] = spans[-1][0], point
            else:
                spans.append((point, point))
    return {category: tuple(spans) for category, spans in found.items()}
