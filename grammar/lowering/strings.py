"""Regular expressions for JSON strings and for the keys of open objects."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from overlap_spec.grammar.automata import dfa
from overlap_spec.grammar.automata.charset import ALL, Ranges, intersect, negate, union
from overlap_spec.grammar.automata.dfa import Dfa, TooLargeError
from overlap_spec.grammar.automata.escape import ANY_CHAR, ANY_TEXT, in_json
from overlap_spec.grammar.automata.regex import Pattern
from overlap_spec.grammar.automata.regex_ast import EMPTY, Node, Repetition, alternate, concat
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.shapes import Strings

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
# `format` is an annotation. These are enforced nevertheless if nothing else constrains the string:
# a schema with `"format": "date"` wants a date. Some valid values are left out (29 February, quoted
# mailbox names, IPv6 hosts).
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

KEY_CHARS = negate(((0, 0x1F),))
"""Characters of free keys."""


def string_language(shape: Strings, path: str) -> Node | Dfa | None:
    """The strings of a shape: an expression for the text between the quotes, or an automaton over
    the characters if there is no expression; None if no string is valid.

    Raises:
        GrammarError: a pattern that is not supported, or that needs too large an automaton.
    """
    least, most = shape.least, shape.most
    if not shape.patterns and not shape.without:
        if least > 0 or most is not None:
            if not shape.outside:
                return Repetition(ANY_CHAR, least, most)
        elif shape.outside:
            return all_but(shape.outside, ALL)
        else:
            return _formatted(shape.formats)
    elif len(shape.patterns) == 1 and not shape.without and not shape.outside:
        found = _pattern(Pattern(shape.patterns[0], "schema"), least, most)
        if found is not None:
            return found
    try:
        made = automaton(shape)
    except TooLargeError as error:
        raise keywords.refusal(
            "pattern", path, "needs too large an automaton with the bounds beside it"
        ) from error
    return None if made.is_empty else made


def automaton(shape: Strings) -> Dfa:
    """The strings of a shape as an automaton over their characters; formats are ignored.

    Raises:
        GrammarError: a pattern that is not supported.
        TooLargeError: too many states.
    """
    found = dfa.EVERY
    for pattern in shape.patterns:
        found = dfa.both(found, found_in(pattern, False))
    for pattern in shape.without:
        found = dfa.both(found, dfa.neither(found_in(pattern, True)))
    if shape.outside:
        found = dfa.both(found, dfa.neither(dfa.from_texts(shape.outside)))
    if shape.least or shape.most is not None:
        found = dfa.both(found, dfa.lengths(shape.least, shape.most))
    return found


@lru_cache(512)
def found_in(pattern: str, wide: bool) -> Dfa:
    """Texts that contain a match of a pattern; `wide` as in `Pattern`."""
    return Pattern(pattern, "schema", wide).automaton()


def _formatted(formats: Iterable[str]) -> Node:
    known = [_FORMATS[name] for name in formats if name in _FORMATS]
    return Pattern(known[0], "format").whole(in_json) if known else ANY_TEXT


def key_node(taken: Iterable[str]) -> Node:
    """Any key except the taken ones, as the text between the quotes.

    Leaves out control characters if some keys are taken, to keep the automaton small.
    """
    return all_but(taken, KEY_CHARS)


def all_but(taken: Iterable[str], members: Ranges) -> Node:
    """Any text of a set of characters except the taken ones, between the quotes.

    Each character has one written form, so that a taken text cannot return in escaped form.
    """
    trie: dict[str, Any] = {}
    for name in taken:
        node = trie
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return _outside(trie, members) if trie else ANY_TEXT


def _outside(node: dict[str, Any], members: Ranges) -> Node:
    ways: list[Node] = []
    children = {char: child for char, child in node.items() if char}
    points = negate(union(((ord(char), ord(char)),) for char in children))
    other = in_json(intersect(members, points))
    if other:
        ways.append(concat(other, _any_of(members)))
    for char, child in children.items():
        written = in_json(((ord(char), ord(char)),))
        # A lone surrogate is not a character, and cannot be in a key.
        if written:
            ways.append(concat(written, _outside(child, members)))
    if "" not in node:
        ways.append(EMPTY)
    return alternate(*ways)


@lru_cache(8)
def _any_of(members: Ranges) -> Node:
    # One written form per character, even if the set is that of all.
    sets = (members[:1], members[1:]) if members == ALL else (members,)
    parts = [in_json(part) for part in sets]
    return Repetition(alternate(*(part for part in parts if part)), 0, None)


def _pattern(pattern: Pattern, least: int, most: int | None) -> Node | None:
    """An expression for a pattern with length bounds; None if that needs an automaton."""
    if pattern.looks_around:
        return None
    low, high = pattern.width()
    if least <= low and (most is None or (high is not None and high <= most)):
        return pattern.found(in_json)
    simple = pattern.as_repeat()
    if simple is None:
        return None
    members, low, high = simple
    char = in_json(members)
    tops = [bound for bound in (high, most) if bound is not None]
    low, high = max(low, least), min(tops) if tops else None
    if char is None or (high is not None and low > high):
        return None
    return Repetition(char, low, high)
