"""Rewrites lexemes so that llguidance's lexer of derivatives sees a loop wherever text is free.

llguidance allows a whole slice of its vocabulary at once if the rest of a lexeme visibly begins
with a loop that contains the slice. If not, it walks all tokens, which takes milliseconds.
"""

from __future__ import annotations

from overlap_spec.grammar.automata.charset import Ranges, intersect, negate, union
from overlap_spec.grammar.parsing.expressions import Chain, Chars, Either, Expression, Ref, Repeat
from overlap_spec.grammar.parsing.regular import chain

_LETTERS: Ranges = ((0x41, 0x5A), (0x61, 0x7A))
_QUOTE: Ranges = ((0x22, 0x22),)
# Unescaped characters of JSON strings, except the line ends that a dot does not match.
_TEXT = negate(((0, 0x1F), *_QUOTE, (0x5C, 0x5C), (0x7F, 0x7F), (0x2028, 0x2029)))
_LATER = 200
# Rules within rules that are looked into: each is some calls deep.
_DEEPEST = 60


def letters_first(expression: Expression) -> Expression:
    """Rewrite an expression so that names start with a loop of letters; same language.

    Names are often a letter and a loop, `ab*`, which equals `a+([b-a]b*)?`; host labels are
    `a(-*a)*`, which equals `a+(-+a+)*`.
    """
    if isinstance(expression, Either):
        return Either(tuple(map(letters_first, expression.ways)))
    if isinstance(expression, Repeat):
        return Repeat(letters_first(expression.body), expression.least, expression.most)
    if not isinstance(expression, Chain):
        return expression
    found: list[Expression] = []
    for part in expression.parts:
        head = found[-1] if found else None
        if isinstance(head, Chars) and isinstance(part, Repeat):
            made = _loop_first(head, part)
            found[-1:] = made or [head, part]
        else:
            found.append(letters_first(part))
    return chain(found)


def _loop_first(head: Chars, rest: Repeat) -> list[Expression] | None:
    if intersect(head.members, _LETTERS) != _LETTERS:
        return None
    if (rest.least, rest.most) != (0, None):
        return None
    heads, body = Repeat(head, 1, None), rest.body
    if isinstance(body, Chars):
        others = intersect(body.members, negate(head.members))
        if intersect(body.members, head.members) != head.members:
            return None
        return [heads, Repeat(Chain((Chars(others), rest)), 0, 1)] if others else [heads]
    if isinstance(body, Chain) and len(body.parts) == 2:
        between, again = body.parts
        if (
            isinstance(between, Repeat)
            and (between.least, between.most) == (0, None)
            and isinstance(again, Chars)
            and again.members == head.members
        ):
            more = Chain((Repeat(between.body, 1, None), heads))
            return [heads, Repeat(more, 0, None)]
    return None


def later(expression: Expression, rules: dict[str, Expression]) -> Expression | None:
    """The texts of `.*x` and the like that have many characters before `x`.

    Inside an `x`, the rest of `.*x` is a choice and no loop; the rest of `.{200,}x` is a loop for
    200 characters. As a lexeme of its own beside `.*x` it does not change the language.

    Args:
        expression: The expression.
        rules: What it refers to; none is recursive.

    Returns:
        An expression for a subset of `expression`; None if there is no such loop, or none within
        :data:`_DEEPEST` rules.
    """
    return _Later(rules).of(expression, 0)


class _Later:
    def __init__(self, rules: dict[str, Expression]) -> None:
        self._rules = rules
        # By rule: an automaton's rules refer to each other by exponentially many ways.
        self._known: dict[str, Expression | None] = {}

    def of(self, expression: Expression, depth: int) -> Expression | None:
        if isinstance(expression, Ref):
            name = expression.name
            if name not in self._known:
                inside = self._rules[name]
                self._known[name] = self.of(inside, depth + 1) if depth < _DEEPEST else None
            return self._known[name]
        if isinstance(expression, Either):
            found = (self.of(way, depth) for way in expression.ways)
            return next((way for way in found if way), None)
        return self._of_chain(expression.parts, depth) if isinstance(expression, Chain) else None

    def _of_chain(self, parts: tuple[Expression, ...], depth: int) -> Expression | None:
        for i, part in enumerate(parts):
            rest = parts[i + 1 :]
            if isinstance(part, Repeat):
                ends = all(isinstance(after, Chars) and after.members == _QUOTE for after in rest)
                free = intersect(_members(part.body), _TEXT) == _TEXT
                if part.most is not None or ends or not free:
                    continue
                many = Repeat(part.body, max(part.least, _LATER), None)
                return chain([*parts[:i], many, *rest])
            inner = self.of(part, depth)
            if inner is not None:
                return chain([*parts[:i], inner, *rest])
        return None


def _members(expression: Expression) -> Ranges:
    """Single characters that an expression matches, as far as it is a choice of classes."""
    if isinstance(expression, Chars):
        return expression.members
    if isinstance(expression, Either):
        return union(map(_members, expression.ways))
    return ()
