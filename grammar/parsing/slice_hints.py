"""Spellings of lexemes in which a lexer of derivatives sees a loop wherever text goes on freely.

llguidance allows a whole slice of its vocabulary at once where what is left of a lexeme is seen to
begin with a loop that holds the slice, and walks all tokens where it is not, for milliseconds.
"""

from __future__ import annotations

from overlap_spec.grammar.automata.charset import Ranges, intersect, negate, union
from overlap_spec.grammar.parsing.expressions import Chain, Chars, Either, Expression, Ref, Repeat
from overlap_spec.grammar.parsing.regular import chain

_LETTERS: Ranges = ((0x41, 0x5A), (0x61, 0x7A))
_QUOTE: Ranges = ((0x22, 0x22),)
# What stands inside JSON strings as it is, but for the line ends that a dot leaves out.
_TEXT = negate(((0, 0x1F), *_QUOTE, (0x5C, 0x5C), (0x7F, 0x7F), (0x2028, 0x2029)))
_LATER = 200


def letters_first(expression: Expression) -> Expression:
    """The same language, with loops of letters where names begin.

    The library shows that a lexeme goes on with a slice only where it goes on with a loop. Names
    are often a letter and a loop of more, `ab*`, which is `a+([b-a]b*)?`, and labels of hosts are
    `a(-*a)*`, which is `a+(-+a+)*`.
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
    """Those texts of `.*x` and the like that have many characters before `x`.

    What is left of `.*x` in the middle of an `x` is one of two things, and no loop; what is left
    of `.{200,}x` is one for 200 characters. Beside it as a lexeme of its own, it changes nothing.

    Returns:
        An expression all of whose texts `expression` matches; None where there is no such loop.
    """
    if isinstance(expression, Ref):
        return later(rules[expression.name], rules)
    if isinstance(expression, Either):
        found = (later(way, rules) for way in expression.ways)
        return next((way for way in found if way), None)
    if not isinstance(expression, Chain):
        return None
    parts = expression.parts
    for i, part in enumerate(parts):
        rest = parts[i + 1 :]
        if isinstance(part, Repeat):
            ends = all(isinstance(after, Chars) and after.members == _QUOTE for after in rest)
            if part.most is not None or ends or intersect(_members(part.body), _TEXT) != _TEXT:
                continue
            many = Repeat(part.body, max(part.least, _LATER), None)
            return chain([*parts[:i], many, *rest])
        inner = later(part, rules)
        if inner is not None:
            return chain([*parts[:i], inner, *rest])
    return None


def _members(expression: Expression) -> Ranges:
    """The characters that an expression matches by themselves, as far as it is a choice."""
    if isinstance(expression, Chars):
        return expression.members
    if isinstance(expression, Either):
        return union(map(_members, expression.ways))
    return ()
