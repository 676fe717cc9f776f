"""Parses EBNF text into trees, for backends whose library has another input language.

The dialect is the lowering's output and xgrammar 0.2.8's GBNF: rules `name ::= …`, double-quoted
literals, character classes, groups, `* + ? {m} {m,} {m,n}`, `#` comments, and `Regex("…")`
terminals made of the same parts. Constructs that only xgrammar has (`TagDispatch`, look-ahead …)
are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.charset import ALL, Ranges, intersect, negate, union
from overlap_spec.grammar.parsing.expressions import (
    EMPTY,
    Chain,
    Chars,
    Either,
    Expression,
    Ref,
    Repeat,
    is_nullable,
    parts_of,
    references,
)


class ForeignConstruct(GrammarError):
    """A construct of xgrammar's EBNF that this parser does not support."""


@dataclass(frozen=True, eq=False)
class Syntax:
    """A grammar: rules by name, `root` first; unreachable rules are left out."""

    rules: dict[str, Expression]

    @cached_property
    def recursive(self) -> frozenset[str]:
        """Rules that reach a cycle of rules; their languages need not be regular."""
        calls = {name: references(body) for name, body in self.rules.items()}
        callers: dict[str, list[str]] = {name: [] for name in self.rules}
        for name, targets in calls.items():
            for target in targets:
                callers[target].append(name)
        left = {name: len(targets) for name, targets in calls.items()}
        ready = [name for name, count in left.items() if count == 0]
        while ready:
            for caller in callers[ready.pop()]:
                left[caller] -= 1
                if left[caller] == 0:
                    ready.append(caller)
        return frozenset(name for name, count in left.items() if count)

    @cached_property
    def nullable(self) -> frozenset[str]:
        """Rules that match the empty text."""
        found: set[str] = set()
        grown = True
        while grown:
            new = {n for n, e in self.rules.items() if n not in found and is_nullable(e, found)}
            found |= new
            grown = bool(new)
        return frozenset(found)


@lru_cache(maxsize=4)
def read(text: str) -> Syntax:
    """Parse an EBNF text.

    Raises:
        GrammarError: a syntax error, or a missing or duplicate rule.
        ForeignConstruct: a construct that only xgrammar has.
    """
    rules: dict[str, Expression] = {}
    reader = _Reader(text, list(_tokens(text)))
    while not reader.at_end():
        name = reader.take("name")
        reader.take("::=")
        if name in rules:
            raise GrammarError(f"EBNF rule {name} is defined more than once", "ebnf")
        rules[name] = reader.expression(_rule_atom, stop=("end", ")"))
    if "root" not in rules:
        raise GrammarError("the EBNF grammar has no rule named root", "ebnf")
    reached: dict[str, Expression] = {}
    pending = ["root"]
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        if name not in rules:
            raise GrammarError(f"EBNF rule {name} is not defined", "ebnf")
        reached[name] = rules[name]
        pending.extend(sorted(references(rules[name]), reverse=True))
    return _trimmed(reached)


def _trimmed(rules: dict[str, Expression]) -> Syntax:
    """Remove alternatives that no finite text can complete, so that no mask leads into one."""
    alive: dict[str, Expression] = {}
    grown = True
    while grown:
        grown = False
        # What is referred to stands behind: one pass does, except for circles.
        for name in [name for name in reversed(rules) if name not in alive]:
            if _alive(rules[name], alive) is not None:
                alive[name] = rules[name]
                grown = True
    if "root" not in alive:
        raise GrammarError("the grammar allows no finite text", "ebnf")
    if len(alive) == len(rules) and not any(map(_has_empty_class, rules.values())):
        return Syntax(rules)
    kept: dict[str, Expression] = {}
    pending = ["root"]
    while pending:
        name = pending.pop()
        if name not in kept:
            body = _alive(rules[name], alive)
            assert body is not None
            kept[name] = body
            pending.extend(sorted(references(body), reverse=True))
    return Syntax(kept)


def _alive(expression: Expression, rules: Container[str]) -> Expression | None:
    """An expression without dead alternatives, given the live rules; None if all are dead."""
    if isinstance(expression, Chars):
        return expression if expression.members else None
    if isinstance(expression, Ref):
        return expression if expression.name in rules else None
    found = [_alive(part, rules) for part in parts_of(expression)]
    left = [part for part in found if part is not None]
    if isinstance(expression, Chain):
        return Chain(tuple(left)) if len(left) == len(found) else None
    if isinstance(expression, Either):
        return _either(left) if left else None
    if left:
        return Repeat(left[0], expression.least, expression.most)
    return None if expression.least else EMPTY


def _has_empty_class(expression: Expression) -> bool:
    if isinstance(expression, Chars):
        return not expression.members
    return any(_has_empty_class(part) for part in parts_of(expression))


_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r\n]+|\#[^\n]*)
  | (?P<define>::=)
  | (?P<foreign>\(\s*=)
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
            raise ForeignConstruct("only xgrammar supports EBNF look-ahead (= …)", "ebnf")
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

    def expression(
        self, atom: Callable[[_Reader, Token], Expression], stop: tuple[str, str]
    ) -> Expression:
        """Alternatives up to and including `stop[0]`; groups inside end at `stop[1]`."""
        ways: list[list[Expression]] = [[]]
        while True:
            token = self.tokens[self.at]
            kind, value, place = token
            self.at += 1
            if kind == stop[0]:
                return _either([_chain(way) for way in ways])
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


def _rule_atom(reader: _Reader, token: Token) -> Expression:
    kind, value, place = token
    if kind == "string":
        points = [point for point, _ in _points(reader.text, value[1:-1], place)]
        return _chain([Chars(intersect(((point, point),), ALL)) for point in points])
    if kind == "class":
        return Chars(_members(reader.text, value, place))
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


def _regex(pattern: str) -> Expression:
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


def _regex_atom(reader: _Reader, token: Token) -> Expression:
    kind, value, place = token
    if kind == "class":
        return Chars(_members(reader.text, value, place))
    if kind != "plain":
        raise _error(reader.text, place, f"unexpected {value!r}")
    return Chars(((ord(value), ord(value)),))


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


def _repeated(body: Expression, mark: str) -> Repeat:
    if mark in "*+?":
        return Repeat(body, int(mark == "+"), 1 if mark == "?" else None)
    low, comma, high = mark.strip("{} \t").partition(",")
    least = int(low)
    most = (int(high) if high.strip() else None) if comma else least
    if most is not None and most < least:
        raise GrammarError(f"EBNF repetition {mark} is reversed", "ebnf")
    return Repeat(body, least, most)


def _chain(parts: list[Expression]) -> Expression:
    return parts[0] if len(parts) == 1 else Chain(tuple(parts))


def _either(ways: list[Expression]) -> Expression:
    return ways[0] if len(ways) == 1 else Either(tuple(ways))


def _error(text: str, at: int, reason: str) -> GrammarError:
    line, column = text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1
    return GrammarError(f"EBNF line {line}, column {column}: {reason}", "ebnf")
