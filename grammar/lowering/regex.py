"""User regular expressions, read exactly and spelled again in the backend's dialect.

Python's own parser reads them, so its syntax holds, with ECMAScript's `(?<name>…)`, `\\/` and
`\\uXXXX`. Where Python and ECMAScript classes differ (`\\d`, `\\w`, `.`), a set that satisfies
both is taken where there is one. What an automaton over the text cannot say is refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.lowering import charset
from overlap_spec.grammar.lowering.automaton import EMPTY, Node, Repeat, chain, either
from overlap_spec.grammar.lowering.charset import Ranges
from overlap_spec.grammar.lowering.spell import plain

Spell = Callable[[Ranges], Node | None]

_parser: Any = importlib.import_module("re._parser")

_CATEGORIES: dict[str, Ranges] = {
    "CATEGORY_DIGIT": charset.DIGIT,
    "CATEGORY_NOT_DIGIT": charset.negate(charset.DIGIT),
    "CATEGORY_SPACE": charset.SPACE,
    "CATEGORY_NOT_SPACE": charset.negate(charset.SPACE_WIDE),
    "CATEGORY_WORD": charset.WORD,
    "CATEGORY_NOT_WORD": charset.negate(charset.WORD),
}
_REFUSED = {
    "ASSERT": "a look-around",
    "ASSERT_NOT": "a look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}
_DOT = charset.negate(charset.LINE_END)


class Pattern:
    """A parsed regular expression.

    Raises:
        GrammarError: it does not parse; the message has the pattern and the position.
    """

    def __init__(self, source: str, param: str) -> None:
        self.source = source
        self.param = param
        try:
            self._parsed = _parser.parse(_python(source))
        except (re.error, OverflowError, RecursionError) as error:
            raise self.error(str(error)) from error
        if self._parsed.state.flags & ~re.UNICODE.value:
            raise self.error("inline flags are not supported")

    def error(self, reason: str) -> GrammarError:
        """An error about this pattern."""
        return GrammarError(f"regex {self.source!r}: {reason}", self.param)

    def whole(self, spell: Spell) -> Node:
        """Texts that match from end to end; anchors there say nothing."""
        return self._spelled(spell, EMPTY)

    def found(self, spell: Spell) -> Node:
        """Texts in which the pattern is found, as JSON Schema means it."""
        anything = spell(charset.ALL)
        return self._spelled(spell, Repeat(anything, 0, None) if anything else EMPTY)

    def matches(self, text: str) -> bool:
        """Whether the pattern is found in a text."""
        return re.search(_python(self.source), text) is not None

    def width(self) -> tuple[int, int | None]:
        """Least and most characters of a text in which the pattern is found; None: no bound."""
        least, most = self._parsed.getwidth()
        anchored = all(
            alternative and _is_start(alternative[0]) and _is_end(alternative[-1])
            for alternative in _alternatives(list(self._parsed))
        )
        return least, most if anchored and most < 2**31 else None

    def as_repeat(self) -> tuple[Ranges, int, int | None] | None:
        """Characters and bounds, where the pattern is `^[…]{m,n}$`; None elsewhere."""
        items = list(self._parsed)
        if len(items) != 3 or not _is_start(items[0]) or not _is_end(items[2]):
            return None
        if str(items[1][0]) not in ("MAX_REPEAT", "MIN_REPEAT"):
            return None
        low, high, body = items[1][1]
        if len(body) != 1 or str(body[0][0]) not in ("IN", "LITERAL", "NOT_LITERAL", "ANY"):
            return None
        return self._set(body[0]), int(low), _bound(high)

    def _spelled(self, spell: Spell, around: Node) -> Node:
        ways = []
        for items in _alternatives(list(self._parsed)):
            before = after = around
            if items and _is_start(items[0]):
                items, before = items[1:], EMPTY
            if items and _is_end(items[-1]):
                items, after = items[:-1], EMPTY
            ways.append(chain(before, self._sequence(items, spell), after))
        return either(*ways)

    def _sequence(self, items: Iterable[Any], spell: Spell) -> Node:
        return chain(*(self._item(item, spell) for item in items))

    def _item(self, item: Any, spell: Spell) -> Node:
        op, argument = str(item[0]), item[1]
        if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            node = spell(self._set(item))
            if node is None:
                raise self.error("a character class that no character can match")
            return node
        if op == "BRANCH":
            return either(*(self._sequence(part, spell) for part in argument[1]))
        if op == "SUBPATTERN":
            _, added, removed, body = argument
            if added or removed:
                raise self.error("inline flags are not supported")
            return self._sequence(body, spell)
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, body = argument
            return Repeat(self._sequence(body, spell), int(low), _bound(high))
        if op == "AT":
            raise self.error("anchors are supported at the two ends only")
        raise self.error(f"{_REFUSED.get(op, op)} is not supported")

    def _set(self, item: Any) -> Ranges:
        op, argument = str(item[0]), item[1]
        if op == "ANY":
            return _DOT
        if op == "LITERAL":
            return ((argument, argument),)
        if op == "NOT_LITERAL":
            return charset.negate(((argument, argument),))
        negated = False
        parts: list[Ranges] = []
        for kind, value in argument:
            if str(kind) == "NEGATE":
                negated = True
            elif str(kind) == "LITERAL":
                parts.append(((value, value),))
            elif str(kind) == "RANGE":
                parts.append(((value[0], value[1]),))
            else:
                parts.append(_CATEGORIES[str(value)])
        members = charset.union(parts)
        return charset.negate(members) if negated else members


def parse(source: str) -> Node:
    """An expression of our own, matched from end to end, with characters as they are."""
    return Pattern(source, "regex").whole(plain)


def _bound(high: Any) -> int | None:
    return None if high >= 2**31 else int(high)


def _python(source: str) -> str:
    """ECMAScript's named groups as Python writes them."""
    return re.sub(r"\(\?<(?![=!])", "(?P<", source)


def _is_start(item: Any) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in ("AT_BEGINNING", "AT_BEGINNING_STRING")


def _is_end(item: Any) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in ("AT_END", "AT_END_STRING")


def _alternatives(items: list[Any]) -> list[list[Any]]:
    """The sequence split where an anchor stands inside a group at one of its ends."""
    for at in (0, -1):
        if not items or not _holds_anchor(items[at]):
            continue
        op, argument = str(items[at][0]), items[at][1]
        if op == "AT":
            continue
        bodies = argument[1] if op == "BRANCH" else [argument[3]]
        rest_left, rest_right = ([], items[1:]) if at == 0 else (items[:-1], [])
        return [
            alternative
            for body in bodies
            for alternative in _alternatives([*rest_left, *body, *rest_right])
        ]
    return [items]


def _holds_anchor(item: Any) -> bool:
    op, argument = str(item[0]), item[1]
    if op == "AT":
        return True
    if op == "BRANCH":
        return any(_holds_anchor(inner) for body in argument[1] for inner in body)
    if op == "SUBPATTERN" and not argument[1] and not argument[2]:
        return any(_holds_anchor(inner) for inner in argument[3])
    return False
