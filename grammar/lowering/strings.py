"""Regular expressions for JSON strings and for the keys of open objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.automaton import EMPTY, Node, Repeat, chain, either
from overlap_spec.grammar.lowering.charset import negate
from overlap_spec.grammar.lowering.regex import Pattern
from overlap_spec.grammar.lowering.spell import ANY_CHAR, ANY_TEXT, in_json

_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_ZONE = r"(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?{_ZONE}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]"
_LABEL = r"[A-Za-z0-9](\-*[A-Za-z0-9])*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?\^_`{|}~\-]+"
_URI_CHAR = rf"([A-Za-z0-9\-._~:/?@!$&'()*+,;=]|%{_HEX}{{2}})"
# `format` is an annotation. These are held to all the same, where nothing else constrains the
# string: whoever writes `"format": "date"` wants a date. Some valid spellings are left out
# (29 February, quoted mailbox names, IPv6 hosts).
_FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "time": _TIME,
    "uri": rf"[A-Za-z][A-Za-z0-9+.\-]*:{_URI_CHAR}+(#{_URI_CHAR}*)?",
    "uri-template": r"([^{}]|\{[+#./;?&]?[A-Za-z0-9_.,:*%]+\})*",
    "uuid": f"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
}


def string_node(schema: dict[str, Any], path: str) -> Node | None:
    """The strings of a schema, between the quotes; None if no string is valid.

    Raises:
        GrammarError: a pattern that is not read exactly, or one beside a length that is not.
    """
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    most = None if most is None else int(most)
    if most is not None and least > most:
        return None
    if "pattern" in schema:
        return _pattern(Pattern(schema["pattern"], "schema"), least, most, path)
    if least > 0 or most is not None:
        return Repeat(ANY_CHAR, least, most)
    source = _FORMATS.get(schema.get("format", ""))
    return Pattern(source, "format").whole(in_json) if source else ANY_TEXT


def key_node(taken: Iterable[str]) -> Node:
    """Any key but the taken ones, between the quotes.

    One spelling a character, so that a taken key cannot come back written with escapes.
    """
    trie: dict[str, Any] = {}
    for name in taken:
        node = trie
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return _outside(trie) if trie else ANY_TEXT


def _spelled(*points: int) -> Node | None:
    # Control characters are left out of free keys, which keeps the automaton small.
    return in_json(negate(((0, 0x1F), *((point, point) for point in points))))


def _outside(node: dict[str, Any]) -> Node:
    ways: list[Node] = []
    children = {char: child for char, child in node.items() if char}
    other, anything = _spelled(*map(ord, children)), _spelled()
    if other and anything:
        ways.append(chain(other, Repeat(anything, 0, None)))
    for char, child in children.items():
        spelled = in_json(((ord(char), ord(char)),))
        # A lone surrogate is no character, and no key can spell it.
        if spelled:
            ways.append(chain(spelled, _outside(child)))
    if "" not in node:
        ways.append(EMPTY)
    return either(*ways)


def _pattern(pattern: Pattern, least: int, most: int | None, path: str) -> Node:
    low, high = pattern.width()
    if least <= low and (most is None or (high is not None and high <= most)):
        return pattern.found(in_json)
    simple = pattern.as_repeat()
    if simple is None:
        raise keywords.refusal("pattern", path, "cannot be combined with minLength or maxLength")
    members, low, high = simple
    char = in_json(members)
    tops = [bound for bound in (high, most) if bound is not None]
    low, high = max(low, least), min(tops) if tops else None
    if char is None or (high is not None and low > high):
        raise keywords.refusal("pattern", path, "matches no string of the lengths allowed")
    return Repeat(char, low, high)
