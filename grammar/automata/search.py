"""Finds where a pattern's first match ends in a text that comes piece by piece.

States of the pattern's automaton are followed together, so that a character costs a time that the
pattern's size bounds, whatever the text; what was met before is looked up.
"""

from __future__ import annotations

from functools import lru_cache

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.dfa import Nfa
from overlap_spec.grammar.automata.regex import Pattern
from overlap_spec.grammar.automata.regex_ast import (
    CharClass,
    Concat,
    Node,
    Repetition,
    is_nullable,
    parts_of,
)

LONGEST_PATTERN = 256
# Positions of a pattern, a repeat's turns counted; and states of the moves that one remembers.
MOST_POSITIONS, MOST_KNOWN = 512, 2**15


class Search:
    """A pattern to look for, in any number of texts.

    Args:
        source: Read as the constraint `regex` is; anchors stand for the ends of the text so far.

    Raises:
        GrammarError: it does not parse, is not supported, is too large, or matches an empty text.
    """

    def __init__(self, source: str, param: str) -> None:
        if len(source) > LONGEST_PATTERN:
            raise GrammarError(
                f"{param}: a pattern of {len(source)} characters; {LONGEST_PATTERN} are allowed",
                param,
            )
        self.source = source
        pattern = Pattern(source, param, "both")
        node = pattern.ending()
        if is_nullable(node):
            raise pattern.error("it matches the empty text, and would end every output at once")
        if _positions(node) > MOST_POSITIONS:
            raise pattern.error(f"it has over {MOST_POSITIONS} positions: use smaller repeats")
        self._nfa = Nfa()
        first = self._nfa.state()
        self._end = self._nfa.add(node, first)
        self.start = self._nfa.closure([first])
        self._known: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._known_states = 0

    def is_end(self, states: frozenset[int]) -> bool:
        """Whether a match ends here."""
        return self._end in states

    def after(self, states: frozenset[int], char: str) -> frozenset[int]:
        """The states behind one more character."""
        found = self._known.get((states, char))
        if found is None:
            point = ord(char)
            found = self._nfa.closure(
                to
                for state in states
                for low, high, to in self._nfa.spans[state]
                if low <= point <= high
            )
            self._known_states += 1 + len(found)
            if self._known_states > MOST_KNOWN:
                self._known.clear()
                self._known_states = 1 + len(found)
            self._known[states, char] = found
        return found


class TextSearch:
    """A search through one text; see ``scheduler.stops.Finder``."""

    def __init__(self, search: Search) -> None:
        self.source, self._search, self._states = search.source, search, search.start

    def push(self, text: str, watched: bool) -> int | None:
        """Go on by ``text``: its characters up to the first place where a match ends; None: there
        is none, or the text is not watched."""
        for index, char in enumerate(text):
            self._states = self._search.after(self._states, char)
            if watched and self._search.is_end(self._states):
                return index + 1
        return None


# A pattern's automaton and what it remembers take a megabyte or two.
@lru_cache(32)
def search(source: str, param: str) -> Search:
    """The search for a pattern, kept for the next request; errors as :class:`Search`."""
    return Search(source, param)


def _positions(node: Node) -> int:
    """Characters that an expression has room for, at least one a turn of a repeat."""
    if isinstance(node, CharClass):
        return 1
    inside = sum(map(_positions, parts_of(node)))
    if isinstance(node, Repetition):
        return max(inside, 1) * max(node.least if node.most is None else node.most, 1)
    return inside if isinstance(node, Concat) else inside + 1
