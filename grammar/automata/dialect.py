r"""Patterns with all that dialects disagree on spelt out, in the syntax of Python's parser.

A schema's patterns are ECMA-262's, with its flag `u`: `\d` and `\w` are ASCII, `\s` is Unicode's
white space, `.` excludes four line ends, `$` is the end of the text, `[^]` is any character, `\cX`
a control character, and `\p{…}`, `\u{…}` and `(?<name>…)` are known. A regular expression that is a
grammar of its own has no dialect that its author names: it matches what both ECMA-262 and Python
match. Every class becomes ranges of code points, so that one parser reads either.

Beyond ECMA-262, `\A` and `\Z` anchor, `{,n}` counts, and `-` beside a class is a character.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

from overlap_spec.grammar.automata import charset
from overlap_spec.grammar.automata.charset import Ranges
from overlap_spec.grammar.automata.unicode_classes import members

Dialect = Literal["ecma", "both"]

_NARROW = {"d": charset.DIGIT, "w": charset.WORD, "s": charset.SPACE}
_ECMA = {**_NARROW, "s": (*charset.SPACE, (0xFEFF, 0xFEFF))}
_CONTROLS = {"b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_HEX = {"x": 2, "u": 4, "U": 8}
_PAIR = re.compile(r"\\u([Dd][89ABab][0-9A-Fa-f]{2})\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_GROUP_NAME = re.compile(r"<(\w+)>")
_NAME = re.compile(r"\{([^{}]*)\}")
_POINT = re.compile(r"\{([0-9A-Fa-f]{1,8})\}")
_OCTAL = re.compile(r"[0-7]{1,3}")


def explicit(source: str, dialect: Dialect) -> str:
    """The pattern without what dialects read in different ways.

    Raises:
        re.error: a class, property or escape that is broken or not known.
    """
    return _Reader(source, dialect).read()


class _Reader:
    def __init__(self, source: str, dialect: Dialect) -> None:
        self.source, self.dialect, self.at = source, dialect, 0
        # Whether each open group, the pattern first, is to be excluded.
        self.excluded = [False]

    def read(self) -> str:
        written = []
        while self.at < len(self.source):
            written.append(self._one())
        return "".join(written)

    def _one(self) -> str:
        char = self.source[self.at]
        if char == "\\":
            return self._escape()
        if char == "[":
            return self._class()
        self.at += 1
        if char == "(":
            return self._group()
        if char == ")" and len(self.excluded) > 1:
            self.excluded.pop()
        elif char == ".":
            python = self.dialect == "both" and self.excluded[-1]
            return _written(charset.negate(((10, 10),) if python else charset.LINE_END))
        elif char == "$":
            return r"(?:\n?\Z)" if self.dialect == "both" and self.excluded[-1] else r"\Z"
        return char

    def _group(self) -> str:
        rest = self.source[self.at : self.at + 3]
        negative = rest.startswith(("?!", "?<!"))
        self.excluded.append(self.excluded[-1] != negative)
        if rest.startswith("?<") and rest[2:] not in ("=", "!", ""):
            self.at += 2
            return "(?P<"
        return "("

    def _escape(self) -> str:
        start = self.at
        following = self.source[start + 1 : start + 2]
        if following == "k":
            name = _GROUP_NAME.match(self.source, start + 2)
            if name is None:
                raise self._error("bad escape \\k", start)
            self.at = name.end()
            return f"(?P={name[1]})"
        if following and following in "bBAZ123456789":
            self.at += 2
            return f"\\{following}"
        return _written(self._atom(False)[0])

    def _class(self) -> str:
        start = self.at
        self.at += 1
        negated = self._take("^")
        parts: list[Ranges] = []
        # To Python a bracket that comes first is a member; to ECMA-262 it ends the class.
        first = self.dialect == "both"
        while first or not self._take("]"):
            if self.at >= len(self.source):
                raise self._error("unterminated character set", start)
            parts.append(self._span(negated))
            first = False
        found = charset.union(parts)
        return _written(charset.negate(found) if negated else found)

    def _span(self, negated: bool) -> Ranges:
        """A member of a class, or a range of them."""
        start = self.at
        low, whole = self._member(negated)
        rest = self.source[self.at : self.at + 2]
        if whole or len(rest) < 2 or rest[0] != "-" or rest[1] == "]":
            return low
        self.at += 1
        high, whole = self._member(negated)
        if whole:
            return charset.union([low, ((0x2D, 0x2D),), high])
        if low[0][0] > high[0][0]:
            raise self._error(f"bad character range {self.source[start : self.at]}", start)
        return ((low[0][0], high[0][0]),)

    def _member(self, negated: bool) -> tuple[Ranges, bool]:
        """Characters, and whether they are a class of their own."""
        if self.source[self.at] == "\\":
            return self._atom(negated, True)
        point = ord(self.source[self.at])
        self.at += 1
        return ((point, point),), False

    def _atom(self, negated: bool, inside: bool = False) -> tuple[Ranges, bool]:
        start = self.at
        kind = self.source[start + 1 : start + 2]
        self.at += 2
        if kind and kind in "dDwWsS":
            return self._shorthand(kind, self.excluded[-1] != negated), True
        if kind and kind in "pP":
            return self._property(kind, start), True
        point = self._point(kind, start, inside)
        return ((point, point),), False

    def _shorthand(self, kind: str, excluded: bool) -> Ranges:
        if kind.isupper():
            return charset.negate(self._shorthand(kind.lower(), not excluded))
        if self.dialect == "ecma":
            return _ECMA[kind]
        return _python_or_ecma(kind) if excluded else _NARROW[kind]

    def _property(self, kind: str, start: int) -> Ranges:
        name = _NAME.match(self.source, self.at)
        found = None
        if name is not None:
            self.at = name.end()
            found = members(name[1])
        if found is None:
            text = self.source[start : self.at]
            reason = f"the property {text} is not supported: only general categories are"
            raise self._error(reason, start)
        return found if kind == "p" else charset.negate(found)

    def _point(self, kind: str, start: int, inside: bool) -> int:
        """The code point of an escape, behind which the reader then stands."""
        if kind in _HEX:
            return self._hex(kind, start)
        if kind == "c" and self.source[self.at : self.at + 1].isalpha():
            self.at += 1
            return ord(self.source[self.at - 1]) % 32
        octal = _OCTAL.match(self.source, start + 1)
        if octal is not None:
            self.at = octal.end()
            return int(octal[0], 8)
        if kind in _CONTROLS and (inside or kind != "b"):
            return _CONTROLS[kind]
        if kind == "a" and self.dialect == "both":
            return 7
        if not kind or (kind.isascii() and kind.isalnum()):
            raise self._error(f"bad escape \\{kind}", start)
        return ord(kind)

    def _hex(self, kind: str, start: int) -> int:
        braced = _POINT.match(self.source, self.at) if kind == "u" else None
        pair = _PAIR.match(self.source, start)
        if pair is not None:
            self.at = pair.end()
            return 0x10000 + (int(pair[1], 16) - 0xD800) * 0x400 + int(pair[2], 16) - 0xDC00
        digits = self.source[self.at : self.at + _HEX[kind]]
        if braced is not None:
            digits, self.at = braced[1], braced.end()
        else:
            self.at += len(digits)
            if len(digits) < _HEX[kind] or re.fullmatch("[0-9A-Fa-f]+", digits) is None:
                raise self._error(f"incomplete escape \\{kind}{digits}", start)
        point = int(digits, 16)
        if point > 0x10FFFF:
            text = self.source[start : self.at]
            raise self._error(f"{text} is not a character", start)
        return point

    def _take(self, char: str) -> bool:
        found = self.source[self.at : self.at + 1] == char
        self.at += found
        return found

    def _error(self, reason: str, at: int) -> re.error:
        return re.error(reason, self.source, at)


@cache
def _python_or_ecma(kind: str) -> Ranges:
    """What either dialect has in a class."""
    if kind == "s":
        return charset.SPACE_WIDE
    python = re.compile(rf"\{kind}")
    points = (point for low, high in charset.ALL for point in range(low, high + 1))
    return charset.union([tuple((p, p) for p in points if python.match(chr(p)))])


def _written(ranges: Ranges) -> str:
    if not ranges:
        return r"[^\U00000000-\U0010ffff]"
    spans = (f"\\U{low:08x}" + (f"-\\U{high:08x}" if high > low else "") for low, high in ranges)
    return f"[{''.join(spans)}]"
