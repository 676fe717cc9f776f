"""User regular expressions, parsed exactly.

Python's own parser reads them, after `dialect` has spelt out all that ECMA-262 reads otherwise.
Constructs that are not regular are refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata import charset
from overlap_spec.grammar.automata.charset import Ranges
from overlap_spec.grammar.automata.dfa import EMPTY_TEXT, EVERY, Dfa, any_of, before, both, neither
from overlap_spec.grammar.automata.dialect import Dialect, explicit
from overlap_spec.grammar.automata.escape import Escape, plain
from overlap_spec.grammar.automata.regex_ast import (
    EMPTY,
    CharClass,
    Node,
    Repetition,
    alternate,
    concat,
    is_nullable,
)

_parser: Any = importlib.import_module("re._parser")

_REFUSED = {
    "ASSERT": "a look-around",
    "ASSERT_NOT": "a look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}
_LOOKS = ("ASSERT", "ASSERT_NOT")
T = TypeVar("T")

# Longer patterns are not kept, in characters.
SHORT_PATTERN = 512
# Longer ones are read under the limits of a compile alone: these take some 50 ms.
MOST_CHECKED = 8192


def _kept_if_short(make: Callable[[str, Dialect], T]) -> Callable[[str, Dialect], T]:
    # What is parsed takes some fifty times its source's bytes: the cache stays under 30 MB.
    kept = lru_cache(1024)(make)
    return lambda source, dialect: (kept if len(source) <= SHORT_PATTERN else make)(source, dialect)


@_kept_if_short
def _parse(source: str, dialect: Dialect) -> Any:
    text = explicit(source, dialect)
    try:
        return _parser.parse(text)
    except re.error as error:
        # A position in the text would be none in the source.
        raise error if text == source else re.error(error.msg) from None


class Pattern:
    """A parsed regular expression.

    Args:
        most: No more than so many turns of a repeat that may have more; texts are lost.

    Raises:
        GrammarError: it does not parse; names the pattern and the position.
    """

    def __init__(
        self, source: str, param: str, dialect: Dialect = "ecma", most: int | None = None
    ) -> None:
        self.source = source
        self.param = param
        self.dialect = dialect
        self.most = most
        try:
            self._parsed = _parse(source, dialect)
        except (re.error, OverflowError, RecursionError) as error:
            raise self.error(str(error)) from error
        if self._parsed.state.flags & ~re.UNICODE.value:
            raise self.error("inline flags are not supported")

    def error(self, reason: str) -> GrammarError:
        """An error that names this pattern."""
        return GrammarError(f"regex {self.source!r}: {reason}", self.param)

    def whole(self, escape: Escape) -> Node:
        """Texts that match in full; anchors at the ends have no effect."""
        return self._around(escape, EMPTY, EMPTY)

    def found(self, escape: Escape) -> Node:
        """Texts that contain a match, as JSON Schema defines `pattern`."""
        anything = escape(charset.ALL)
        around = Repetition(anything, 0, None) if anything else EMPTY
        return self._around(escape, around, around)

    def ending(self) -> Node:
        """Texts that end in a match; an anchor at the pattern's end has no effect."""
        return self._around(plain, Repetition(CharClass(charset.ALL), 0, None), EMPTY)

    def automaton(self) -> Dfa:
        """Texts that contain a match; look-aheads are supported.

        Raises:
            GrammarError: a construct that is not regular.
            TooLargeError: too many states.
        """
        found = [self._from_start(items, EVERY) for items in _alternatives(list(self._parsed))]
        return any_of(found)

    def _from_start(self, items: list[Any], after: Dfa) -> Dfa:
        if items and _is_start(items[0]):
            return self._ahead(items[1:], after, True)
        return before(Repetition(CharClass(charset.ALL), 0, None), self._ahead(items, after, False))

    def _ahead(self, items: list[Any], after: Dfa, at_start: bool) -> Dfa:
        """Texts that match the items, followed by a text of `after`."""
        if items and _is_end(items[-1]):
            items, after = items[:-1], EMPTY_TEXT
        for i, item in enumerate(items):
            if _holds_look(item) and str(item[0]) not in _LOOKS:
                ways = [[*items[:i], *body, *items[i + 1 :]] for body in self._bodies(item)]
                return any_of(self._ahead(way, after, at_start) for way in ways)
            if str(item[0]) in _LOOKS:
                look = self._look(item, at_start and i == 0)
                rest = both(look, self._ahead(items[i + 1 :], after, at_start and i == 0))
                return before(self._sequence(items[:i], plain), rest) if i else rest
        return before(self._sequence(items, plain), after)

    def _bodies(self, item: Any) -> list[list[Any]]:
        op, argument = str(item[0]), item[1]
        if op == "BRANCH":
            return [list(body) for body in argument[1]]
        if op == "SUBPATTERN" and not argument[1] and not argument[2]:
            return [list(argument[3])]
        raise self.error("a look-around inside a repeat is not supported")

    def _look(self, item: Any, at_start: bool) -> Dfa:
        """Texts that may follow the position of a look-ahead."""
        direction, body = item[1]
        negative = str(item[0]) == "ASSERT_NOT"
        if direction < 0:
            raise self.error("look-behind is not supported")
        ways = []
        for items in _alternatives(list(body)):
            if items and _is_start(items[0]):
                if not at_start:
                    raise self.error("anchors are supported at the pattern's two ends only")
                items = items[1:]
            ways.append(self._ahead(items, EVERY, at_start))
        return neither(any_of(ways)) if negative else any_of(ways)

    @property
    def looks_around(self) -> bool:
        """Whether the pattern has a look-around."""
        return any(map(_holds_look, self._parsed))

    def matches(self, text: str) -> bool:
        """Whether a text contains a match."""
        return _compiled(self.source, self.dialect).search(text) is not None

    def width(self) -> tuple[int, int | None]:
        """Least and most characters of a text that contains a match; None means no bound."""
        least, most = self._parsed.getwidth()
        anchored = all(
            alternative and _is_start(alternative[0]) and _is_end(alternative[-1])
            for alternative in _alternatives(list(self._parsed))
        )
        return least, most if anchored and most < 2**31 else None

    def longest(self) -> int | None:
        """Most characters of a match; None means no bound."""
        return self._longest(self._parsed)

    def _longest(self, items: Iterable[Any]) -> int | None:
        total = 0
        for item in items:
            op, argument = str(item[0]), item[1]
            ways: list[int | None] = [1]
            if op == "BRANCH":
                ways = [self._longest(body) for body in argument[1]]
            elif op == "SUBPATTERN":
                ways = [self._longest(argument[3])]
            elif op in ("MAX_REPEAT", "MIN_REPEAT"):
                turns, each = self._turns(argument[0], argument[1]), self._longest(argument[2])
                ways = [None if turns is None or each is None else turns * each]
            elif op == "AT":
                ways = [0]
            if None in ways:
                return None
            total += max(way for way in ways if way is not None)
        return total

    def _turns(self, low: Any, high: Any) -> int | None:
        found = None if high >= 2**31 else int(high)
        if self.most is None:
            return found
        return max(int(low), self.most if found is None else min(found, self.most))

    def _around(self, escape: Escape, left: Node, right: Node) -> Node:
        ways = []
        for items in _alternatives(list(self._parsed)):
            before, after = left, right
            if items and _is_start(items[0]):
                items, before = items[1:], EMPTY
            if items and _is_end(items[-1]):
                items, after = items[:-1], EMPTY
            parts = [self._item(item, escape) for item in items]
            if before != EMPTY:
                parts = _absorbed(parts)
            if after != EMPTY:
                parts = _absorbed(parts[::-1])[::-1]
            if not parts and EMPTY not in (left, right) and (before == left or after == right):
                return left
            ways.append(concat(before, concat(*parts), after))
        return alternate(*ways)

    def _sequence(self, items: Iterable[Any], escape: Escape) -> Node:
        return concat(*(self._item(item, escape) for item in items))

    def _item(self, item: Any, escape: Escape) -> Node:
        op, argument = str(item[0]), item[1]
        if op in ("LITERAL", "NOT_LITERAL", "IN"):
            node = escape(self._set(item))
            if node is None:
                raise self.error("this character class is empty")
            return node
        if op == "BRANCH":
            return alternate(*(self._sequence(part, escape) for part in argument[1]))
        if op == "SUBPATTERN":
            _, added, removed, body = argument
            if added or removed:
                raise self.error("inline flags are not supported")
            return self._sequence(body, escape)
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, body = argument
            return Repetition(self._sequence(body, escape), int(low), self._turns(low, high))
        if op == "AT":
            raise self.error("anchors are supported at the pattern's two ends only")
        raise self.error(f"{_REFUSED.get(op, op)} is not supported")

    def _set(self, item: Any) -> Ranges:
        op, argument = str(item[0]), item[1]
        if op == "LITERAL":
            return ((argument, argument),)
        if op == "NOT_LITERAL":
            return charset.negate(((argument, argument),))
        negated = any(str(kind) == "NEGATE" for kind, _ in argument)
        parts: list[Ranges] = []
        for kind, value in argument:
            if str(kind) == "LITERAL":
                parts.append(((value, value),))
            elif str(kind) == "RANGE":
                parts.append(((value[0], value[1]),))
        members = charset.union(parts)
        return charset.negate(members) if negated else members


def parse(source: str) -> Node:
    """A pattern as an expression that is matched in full, without escapes.

    Raises:
        GrammarError: it does not parse, or has a construct that is not supported.
    """
    return Pattern(source, "regex", "both").whole(plain)


def check(source: str) -> None:
    """Check a pattern as :func:`parse` does; one of more than :data:`MOST_CHECKED` characters is
    left to the compile.

    Raises:
        GrammarError: as `parse`.
    """
    if len(source) <= MOST_CHECKED:
        parse(source)


def _absorbed(parts: list[Node]) -> list[Node]:
    """The parts of a match behind any text, without what that text may be as well."""
    at = next((i for i, part in enumerate(parts) if not is_nullable(part)), len(parts))
    left = parts[at:]
    head = left[0] if left else EMPTY
    if isinstance(head, Repetition):
        least = head.least
        left[0] = head.body if least == 1 else Repetition(head.body, least, least)
    return left


@_kept_if_short
def _compiled(source: str, dialect: Dialect) -> re.Pattern[str]:
    # ASCII: ECMA-262's word boundaries.
    return re.compile(explicit(source, dialect), re.ASCII)


def _is_start(item: Any) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in ("AT_BEGINNING", "AT_BEGINNING_STRING")


def _is_end(item: Any) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in ("AT_END", "AT_END_STRING")


def _holds_look(item: Any) -> bool:
    """Whether an item contains a look-around."""
    return str(item[0]) in _LOOKS or any(map(_holds_look, _items_in(item[1])))


def _items_in(argument: Any) -> Iterator[Any]:
    """The items in an item's argument."""
    if isinstance(argument, _parser.SubPattern):
        yield from argument
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _items_in(part)


def _alternatives(items: list[Any]) -> list[list[Any]]:
    """Split a sequence whose first or last group contains an anchor into one per branch."""
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
