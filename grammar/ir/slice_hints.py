"""Rewrites lexemes so that llguidance's lexer of derivatives sees a loop wherever text is free.

llguidance allows a whole slice of its vocabulary at once if the rest of a lexeme visibly begins
with a loop that contains the slice. If not, it walks all tokens, which takes milliseconds.
"""

from __future__ import annotations

from overlap_spec.grammar.automata.charset import Ranges, intersect, negate, union
from overlap_spec.grammar.automata.regex_ast import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Ref,
    Repetition,
    mapped,
    parts_of,
    references,
)
from overlap_spec.grammar.ir.rules import sequence

_LETTERS: Ranges = ((0x41, 0x5A), (0x61, 0x7A))
_QUOTE: Ranges = ((0x22, 0x22),)
# Unescaped characters of JSON strings, except the line ends that a dot does not match.
_TEXT = negate(((0, 0x1F), *_QUOTE, (0x5C, 0x5C), (0x7F, 0x7F), (0x2028, 0x2029)))
# Rules within rules that are looked into: each is some calls deep.
_DEEPEST = 60


def letters_first(node: Node) -> Node:
    """Rewrite an expression so that names start with a loop of letters; same language.

    Names are often a letter and a loop, `ab*`, which equals `a+([b-a]b*)?`; host labels are
    `a(-*a)*`, which equals `a+(-+a+)*`.
    """
    if not isinstance(node, Concat):
        return mapped(node, letters_first)
    found: list[Node] = []
    for part in node.parts:
        head = found[-1] if found else None
        if isinstance(part, CharClass):
            found.append(part)
        elif isinstance(head, CharClass) and isinstance(part, Repetition):
            made = _loop_first(head, part)
            found[-1:] = made or [head, part]
        else:
            found.append(letters_first(part))
    return sequence(*found)


def _loop_first(head: CharClass, rest: Repetition) -> list[Node] | None:
    if intersect(head.members, _LETTERS) != _LETTERS:
        return None
    if (rest.least, rest.most) != (0, None):
        return None
    heads, body = Repetition(head, 1, None), rest.body
    if isinstance(body, CharClass):
        others = intersect(body.members, negate(head.members))
        if intersect(body.members, head.members) != head.members:
            return None
        return [heads, Repetition(Concat((CharClass(others), rest)), 0, 1)] if others else [heads]
    if isinstance(body, Concat) and len(body.parts) == 2:
        between, again = body.parts
        if (
            isinstance(between, Repetition)
            and (between.least, between.most) == (0, None)
            and isinstance(again, CharClass)
            and again.members == head.members
        ):
            more = Concat((Repetition(between.body, 1, None), heads))
            return [heads, Repetition(more, 0, None)]
    return None


def later(node: Node, rules: dict[str, Node]) -> Node | None:
    """The texts of `.*x` and the like that have a rare character before `x`.

    Inside an `x`, the rest of `.*x` is a choice and no loop; the rest of `.*\U0010ffffx` is a loop
    until that character comes. As a lexeme of its own beside `.*x` it does not change the language.
    Likewise `a.*` begins with no loop, and `a+\U0010ffff.*` with one, if `a` is most characters.

    Args:
        rules: What it refers to; none is recursive.

    Returns:
        An expression for a subset of `expression`; None if there is no such loop, or none within
        :data:`_DEEPEST` rules.
    """
    return _Later(rules).of(node, 0)


class _Later:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        # By rule: an automaton's rules refer to each other by exponentially many ways.
        self._known: dict[str, Node | None] = {}

    def of(self, node: Node, depth: int) -> Node | None:
        if isinstance(node, Ref):
            name = node.name
            if name not in self._known:
                inside = self._rules[name]
                self._known[name] = self.of(inside, depth + 1) if depth < _DEEPEST else None
            return self._known[name]
        if isinstance(node, Alternation):
            found = (self.of(way, depth) for way in node.ways)
            return next((way for way in found if way), None)
        if isinstance(node, Repetition) and (node.least, node.most) == (0, 1):
            return self.of(node.body, depth)
        return self._of_chain(node.parts, depth) if isinstance(node, Concat) else None

    def _of_chain(self, parts: tuple[Node, ...], depth: int) -> Node | None:
        for i, part in enumerate(parts):
            rest = parts[i + 1 :]
            if rest and (found := _head_first(part, rest[0])):
                return sequence(*parts[:i], found, *rest)
            if isinstance(part, Repetition) and part.most != 1:
                ends = all(
                    isinstance(after, CharClass) and after.members == _QUOTE for after in rest
                )
                members = _members(part.body)
                if part.most is not None or ends or intersect(members, _TEXT) != _TEXT:
                    continue
                last = members[-1][1]
                rare = CharClass(((last, last),))
                if rest[0] == rare:
                    continue
                many = Repetition(part.body, max(part.least - 1, 0), None)
                return sequence(*parts[:i], many, rare, *rest)
            inner = self.of(part, depth)
            if inner is not None:
                return sequence(*parts[:i], inner, *rest)
        return None


def _head_first(head: Node, loop: Node) -> Node | None:
    """Some texts of `a.*`: those of `a+\U0010ffff` before the loop."""
    if not (isinstance(loop, Repetition) and (loop.least, loop.most) == (0, None)):
        return None
    inside = _members(loop.body)
    heads = intersect(_members(head), inside)
    if intersect(heads, _LETTERS) != _LETTERS or intersect(inside, _TEXT) != _TEXT:
        return None
    last = inside[-1][1]
    return Concat((Repetition(CharClass(heads), 1, None), CharClass(((last, last),))))


def straight(node: Node, rules: dict[str, Node]) -> Node | None:
    """Texts that take, of each choice of a loop of letters or something else, the first loop.

    Before such a choice the rest of `(.*|x)` is no loop, but that of `.*` is. As a lexeme of its
    own beside the other it does not change the language.

    Args:
        rules: What it refers to; those that refer to others are not looked into.

    Returns:
        An expression for a subset of the node's language; None if there is no such choice.
    """
    found = _straight(node, rules)
    return None if found is node else found


def _straight(node: Node, rules: dict[str, Node]) -> Node:
    if isinstance(node, Ref):
        body = rules[node.name]
        found = body if references(body) else _straight(body, rules)
        return node if found is body else found
    if isinstance(node, Concat):
        parts = [_straight(part, rules) for part in node.parts]
        same = all(new is old for new, old in zip(parts, node.parts, strict=True))
        return node if same else sequence(*parts)
    if isinstance(node, Alternation):
        ways = (_straight(way, rules) for way in node.ways)
        return next((way for way in ways if _begins_with_a_loop(way)), node)
    return node


def _begins_with_a_loop(node: Node) -> bool:
    """Whether all that stands before a loop of letters are fixed characters."""
    for part in node.parts if isinstance(node, Concat) else (node,):
        if isinstance(part, Repetition) and part.most is None:
            return intersect(_members(part.body), _LETTERS) == _LETTERS
        if not (isinstance(part, CharClass) and part.members[0] == (part.members[-1][1],) * 2):
            return False
    return False


def is_free(node: Node) -> bool:
    """Whether an expression has a loop of most characters."""
    if isinstance(node, Repetition) and node.most is None:
        return intersect(_members(node.body), _TEXT) == _TEXT
    return any(map(is_free, parts_of(node)))


def _members(node: Node) -> Ranges:
    """Single characters that an expression matches, as far as it is a choice of classes."""
    if isinstance(node, CharClass):
        return node.members
    if isinstance(node, Alternation):
        return union(map(_members, node.ways))
    return ()
