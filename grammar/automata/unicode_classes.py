r"""The properties of `\p{…}` and `\P{…}`.

A property is a general category of the Unicode database, short (`L`, `Nd`) or long (`Letter`,
`Decimal_Number`), with or without `General_Category=`; or `ASCII`, `Any`, `digit`, `punct`.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from overlap_spec.grammar.automata.charset import ALL, Ranges, union

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


def members(name: str) -> Ranges | None:
    """The characters of a property, by its name; None if it is not known."""
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
