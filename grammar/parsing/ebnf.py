"""Reads EBNF text.

The dialect is xgrammar 0.2.8's GBNF: rules `name ::= …`, double-quoted literals, character classes,
groups, `* + ? {m} {m,} {m,n}`, `#` comments, and `Regex("…")` terminals made of the same parts.
Constructs that only xgrammar has (`TagDispatch`, look-ahead …) are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.charset import ALL, Ranges, intersect, negate, union
from overlap_spec.grammar.automata.regex_ast import (
    CharClass,
    Node,
    Ref,
    Repetition,
    alternate,
    concat,
)
from overlap_spec.grammar.ir.syntax import Syntax, whole


class ForeignConstruct(GrammarError):
    """A construct of xgrammar's EBNF that this parser does not support."""


def read(text: str) -> Syntax:
    """Parse an EBNF text.

    Raises:
        GrammarError: a syntax error, or a missing or duplicate rule, or no finite text.
        ForeignConstruct: a construct that only xgrammar has.
    """
    rules: dict[str, Node] = {}
    reader = _Reader(text, list(_tokens(text)))
    while not reader.at_end():
        name = reader.take("name")
        reader.take("::=")
        if name in rules:
            raise GrammarError(f"EBNF rule {name} is defined more than once", "ebnf")
        rules[name] = reader.expression(_rule_atom, stop=("end", ")"))
    if "root" not in rules:
        raise GrammarError("the EBNF grammar has no rule named root", "ebnf")
    return whole(rules, {})


_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r\n]+|\#[^\n]*)
  | (?P<define>::=)
  | (?P<foreign>\(\s*=|(?:TagDispatch|TokenTagDispatch|Token|ExcludeToken)\()
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<class>\[(?:[^\]\\\n]|\\.)*\])
  | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
  | (?P<name>[A-Za-z_][A-Za-z0-9_.\-]*)
  | (?P<mark>[()|*+?])
    """,
    re.VERBOSE | re.DOTALL,
)
_PLAIN = re.compile(r"[^\\\[\](){}|*+?.^$]")
_CLASS = re.compile(r"\[(?:[^\]\\]|\\u\{[0-9A-Fa-f]+\}|\\.)*\]", re.DOTALL)
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|u\{([0-9A-Fa-f]+)\}|(.))",
    re.DOTALL,
)
_NAMED = {
    "a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "e": 27, "0": 0,
}  # fmt: skip

Token = tuple[str, str, int]


def _tokens(text: str) -> Iterator[Token]:
    """Kind, text and position of each token; an `end` precedes each rule but the first."""
    found: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _error(text, at, f"unexpected {text[at]!r}")
        kind, value, start = str(match.lastgroup), match.group(), at
        at = match.end()
        if kind == "define":
            if not found or found[-1][0] != "name":
                raise _error(text, start, "::= must follow a rule name")
            found.insert(-1, ("end", "", found[-1][2]))
        if kind == "foreign":
            what = "look-ahead (= …)" if value.startswith("(") else f"the EBNF construct {value}…)"
            raise ForeignConstruct(f"only xgrammar supports {what}", "ebnf")
        if kind != "skip":
            found.append((value if kind in ("mark", "define") else kind, value, start))
    return iter([*found[1 if found and found[0][0] == "end" else 0 :], ("end", "", at)])


class _Reader:
    def __init__(self, text: str, tokens: list[Token]) -> None:
        self.text = text
        self.tokens = tokens
        self.at = 0

    def at_end(self) -> bool:
        return self.at == len(self.tokens)

    def take(self, kind: str) -> str:
        found, value, place = self.tokens[min(self.at, len(self.tokens) - 1)]
        if self.at_end() or found != kind:
            raise _error(self.text, place, f"expected {kind}, found {value or 'the end'!r}")
        self.at += 1
        return value

    def expression(self, atom: Callable[[_Reader, Token], Node], stop: tuple[str, str]) -> Node:
        """Alternatives up to and including `stop[0]`; groups inside end at `stop[1]`."""
        ways: list[list[Node]] = [[]]
        while True:
            token = self.tokens[self.at]
            kind, value, place = token
            self.at += 1
            if kind == stop[0]:
                return alternate(*(concat(*way) for way in ways))
            if kind == "end":
                raise _error(self.text, place, "the rule is incomplete")
            if kind == "|":
                ways.append([])
            elif kind == "(":
                ways[-1].append(self.expression(atom, (stop[1], stop[1])))
            elif kind in ("*", "+", "?", "count"):
                if not ways[-1]:
                    raise _error(self.text, place, f"{value} has nothing to repeat")
                ways[-1].append(_repeated(ways[-1].pop(), value))
            else:
                ways[-1].append(atom(self, token))


def _rule_atom(reader: _Reader, token: Token) -> Node:
    kind, value, place = token
    if kind == "string":
        points = [point for point, _ in _points(reader.text, value[1:-1], place)]
        return concat(*(CharClass(intersect(((point, point),), ALL)) for point in points))
    if kind == "class":
        return CharClass(_members(reader.text, value, place))
    if kind != "name":
        raise _error(reader.text, place, f"unexpected {value!r}")
    if reader.tokens[reader.at][0] != "(" or reader.tokens[reader.at][2] != place + len(value):
        return Ref(value)
    if value != "Regex":
        raise ForeignConstruct(f"only xgrammar supports the EBNF construct {value}(…)", "ebnf")
    reader.take("(")
    source = reader.take("string")
    reader.take(")")
    try:
        pattern = json.loads(source, strict=False)
    except json.JSONDecodeError as error:
        raise _error(reader.text, place, f"Regex(…): {error.msg}") from error
    return _regex(str(pattern))


def _regex(pattern: str) -> Node:
    tokens: list[Token] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        for kind, form in (("class", _CLASS), ("count", _COUNT), ("plain", _PLAIN)):
            match = form.match(pattern, at)
            if match:
                tokens.append((kind, match.group(), at))
                at = match.end()
                break
        else:
            if char not in "()|*+?":
                raise ForeignConstruct(f"only xgrammar supports Regex(…) with {char!r}", "ebnf")
            tokens.append((char, char, at))
            at += 1
            if pattern.startswith("(?", at - 1) or (char in "*+?" and pattern.startswith("?", at)):
                reason = "only xgrammar supports Regex(…) with (? or a lazy quantifier"
                raise ForeignConstruct(reason, "ebnf")
    reader = _Reader(pattern, [*tokens, ("end", "", at)])
    return reader.expression(_regex_atom, stop=("end", ")"))


def _regex_atom(reader: _Reader, token: Token) -> Node:
    kind, value, place = token
    if kind == "class":
        return CharClass(_members(reader.text, value, place))
    if kind != "plain":
        raise _error(reader.text, place, f"unexpected {value!r}")
    return CharClass(((ord(value), ord(value)),))


def _points(text: str, source: str, place: int) -> Iterator[tuple[int, bool]]:
    """Code points between a literal's quotes, and whether each was escaped."""
    at = 0
    while at < len(source):
        if source[at] != "\\":
            yield ord(source[at]), False
            at += 1
            continue
        match = _ESCAPE.match(source, at)
        assert match is not None
        *digits, char = match.groups()
        number = next((d for d in digits if d), None)
        if number is None and char.isalnum() and char not in _NAMED:
            raise _error(text, place, f"unknown escape \\{char}")
        yield (int(number, 16) if number else _NAMED.get(char, ord(char))), True
        at = match.end()


def _members(text: str, source: str, place: int) -> Ranges:
    negated = source.startswith("[^")
    points = list(_points(text, source[1 + negated : -1], place))
    spans: list[tuple[int, int]] = []
    at = 0
    while at < len(points):
        low = high = points[at][0]
        if at + 2 < len(points) and points[at + 1] == (ord("-"), False):
            high = points[at + 2][0]
            at += 2
        if high < low:
            raise _error(text, place, f"{source}: a range is reversed")
        spans.append((low, high))
        at += 1
    members = union([tuple(spans)])
    return negate(members) if negated else intersect(members, ALL)


def _repeated(body: Node, mark: str) -> Repetition:
    if mark in "*+?":
        return Repetition(body, int(mark == "+"), 1 if mark == "?" else None)
    low, comma, high = mark.strip("{} \t").partition(",")
    least = int(low)
    most = (int(high) if high.strip() else None) if comma else least
    if most is not None and most < least:
        raise GrammarError(f"EBNF repetition {mark} is reversed", "ebnf")
    return Repetition(body, least, most)


def _error(text: str, at: int, reason: str) -> GrammarError:
    line, column = text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1
    return GrammarError(f"EBNF line {line}, column {column}: {reason}", "ebnf")
