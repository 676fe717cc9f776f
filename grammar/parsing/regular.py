"""Epsilon removal, and expressions in Rust's regex syntax, for outlines-core and llguidance."""

from __future__ import annotations

from collections.abc import Callable

from overlap_spec.grammar.automata.charset import Ranges
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
from overlap_spec.grammar.parsing.syntax import Syntax

_BARE = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ \"':;,=<>!@%")


class EpsilonFree:
    """A grammar with ε removed from every rule.

    Attributes:
        rules: The rules; those that matched the empty text only are gone.
        root_nullable: Whether the grammar matched the empty text.
        plain: The exceptions: rules `name*` that still match the empty text, each a repetition of
            characters, mapped to the rule `name` that does not.
    """

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._nullable = syntax.nullable
        self._blank = _blank(syntax)
        self.root_nullable = "root" in syntax.nullable
        self.rules: dict[str, Expression] = {}
        self.plain: dict[str, str] = {}
        for name, body in syntax.rules.items():
            found = self._of(body)
            if found is not None and name not in self._blank:
                self.rules[name] = found

    def _of(self, expression: Expression) -> Expression | None:
        """An expression with ε removed; None if nothing is left."""
        if isinstance(expression, Chars):
            return expression
        if isinstance(expression, Ref):
            return None if expression.name in self._blank else expression
        if isinstance(expression, Either):
            ways = [self._of(way) for way in expression.ways]
            return either([way for way in ways if way is not None])
        if isinstance(expression, Chain):
            return self._chain(expression.parts)
        body = self._of(expression.body)
        if body is None or expression.most == 0:
            return None
        if expression.least == 0 or is_nullable(expression.body, self._nullable):
            return Repeat(body, 1, expression.most)
        return Repeat(body, expression.least, expression.most)

    def _chain(self, parts: tuple[Expression, ...]) -> Expression | None:
        whole = [self._maybe(part) for part in parts]
        if not all(is_nullable(part, self._nullable) for part in parts):
            return chain(whole)
        # One alternative for each part that may be the first non-empty one.
        ways = []
        for i, part in enumerate(parts):
            first = self._of(part)
            if first is not None:
                ways.append(chain([first, *whole[i + 1 :]]))
        return either(ways)

    def _maybe(self, expression: Expression) -> Expression:
        """An unchanged language, over the new rules."""
        found = self._of(expression)
        if found is None:
            return EMPTY
        if not is_nullable(expression, self._nullable):
            return found
        return self._starred(found) or Repeat(found, 0, 1)

    def _starred(self, found: Expression) -> Expression | None:
        """`x*` for `(x+)?`; if `x+` is a rule, a rule of its own."""
        name = found.name if isinstance(found, Ref) else ""
        if name and references(self._syntax.rules[name]):
            return None
        loop = self._of(self._syntax.rules[name]) if name else found
        if not (isinstance(loop, Repeat) and loop.least == 1):
            return None
        loop = Repeat(loop.body, 0, loop.most)
        if not name:
            return loop
        self.rules[f"{name}*"] = loop
        self.plain[f"{name}*"] = name
        return Ref(f"{name}*")


def _blank(syntax: Syntax) -> frozenset[str]:
    """Rules that match the empty text only."""
    speaking: set[str] = set()
    grown = True
    while grown:
        new = {n for n, e in syntax.rules.items() if n not in speaking and _speaks(e, speaking)}
        speaking |= new
        grown = bool(new)
    return frozenset(set(syntax.rules) - speaking)


def _speaks(expression: Expression, rules: set[str]) -> bool:
    if isinstance(expression, Ref):
        return expression.name in rules
    if isinstance(expression, Repeat) and expression.most == 0:
        return False
    return isinstance(expression, Chars) or any(_speaks(p, rules) for p in parts_of(expression))


def chain(parts: list[Expression]) -> Expression:
    """A chain with nested chains flattened, so that empty ones vanish."""
    left: list[Expression] = []
    for part in parts:
        left += part.parts if isinstance(part, Chain) else (part,)
    return left[0] if len(left) == 1 else Chain(tuple(left))


def either(ways: list[Expression]) -> Expression | None:
    """A choice with nested choices flattened; None if there is no alternative."""
    left: list[Expression] = []
    for way in ways:
        left += way.ways if isinstance(way, Either) else (way,)
    if not left:
        return None
    return left[0] if len(left) == 1 else Either(tuple(left))


def to_regex(expression: Expression, rule: Callable[[str], str]) -> str:
    """An expression in Rust's regex syntax, safe to embed in a larger one.

    Args:
        expression: Its classes must not be empty.
        rule: Gives the regular expression of a rule, by name.
    """
    if isinstance(expression, Chars):
        return _class(expression.members)
    if isinstance(expression, Ref):
        return f"(?:{rule(expression.name)})"
    if isinstance(expression, Chain):
        return "".join(to_regex(part, rule) for part in expression.parts)
    if isinstance(expression, Either):
        return f"(?:{'|'.join(to_regex(way, rule) for way in expression.ways)})"
    body = f"(?:{to_regex(expression.body, rule)})"
    least, most = expression.least, expression.most
    if most is None:
        return body + ("*+"[least] if least < 2 else f"{{{least},}}")
    return body + ("?" if (least, most) == (0, 1) else f"{{{least},{most}}}")


def literal(text: str) -> str:
    """A regular expression for exactly one text."""
    return "".join(_point(ord(char)) for char in text)


def _class(members: Ranges) -> str:
    (low, high), *more = members
    if low == high and not more:
        return _point(low)
    spans = (_point(low) + (f"-{_point(high)}" if high > low else "") for low, high in members)
    return f"[{''.join(spans)}]"


def _point(point: int) -> str:
    return chr(point) if point in _BARE else f"\\x{{{point:x}}}"
