"""Free text up to fixed strings.

Builds the automaton of A. Aho and M. Corasick, "Efficient string matching" (1975), with one rule
per state. Each rule calls the next one last, so that long texts do not cost the matcher more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from overlap_spec.grammar.automata.charset import ALL, negate
from overlap_spec.grammar.automata.regex_ast import EMPTY, CharClass, Node, Repetition
from overlap_spec.grammar.ir.rules import Rules, choice, literal, sequence

ANY_TEXT = Repetition(CharClass(ALL), 0, None)


def free_text(rules: Rules, exits: Mapping[str, Node | None], may_end: bool) -> Node:
    """Any text in which none of the strings occurs, or that continues after the first one.

    Args:
        exits: Non-empty strings; for each the expression that follows its first occurrence, or
            None if it must not occur. If several end at the same character, None wins, then the
            longest.

    Returns:
        The expression.
    """
    if not exits:
        return ANY_TEXT if may_end else EMPTY
    automaton = _Automaton(exits)
    names = [rules.reserve() for _ in automaton.moves]
    for state, moves in enumerate(automaton.moves):
        known = set(moves)
        ways: list[Node] = []
        groups: dict[int, list[str]] = {0: []}
        for char, target in moves.items():
            found = automaton.found[target]
            if found is None:
                groups.setdefault(target, []).append(char)
            elif (after := exits[found]) is not None:
                ways.append(sequence(literal(char), after))
        for target, chars in groups.items():
            points = tuple((ord(char), ord(char)) for char in sorted(chars))
            if target == 0:
                gone = sorted(known - set(chars))
                points = negate(tuple((ord(char), ord(char)) for char in gone))
            ways.append(sequence(CharClass(points), names[target]))
        rules.define(names[state], choice([*ways, EMPTY] if may_end else ways))
    return names[0]


def free_start(rules: Rules, exits: Mapping[str, Node | None]) -> Node:
    """Any text that does not begin with one of the strings, or that continues after the one it
    begins with; otherwise as `free_text`. No string may be a prefix of another."""
    return _after("", rules, exits)


def _after(read: str, rules: Rules, exits: Mapping[str, Node | None]) -> Node:
    ways: list[Node] = [EMPTY]
    nexts = sorted({text[len(read)] for text in exits if text.startswith(read)})
    for char in nexts:
        found = read + char
        if found not in exits:
            ways.append(sequence(literal(char), _after(found, rules, exits)))
        elif (after := exits[found]) is not None:
            ways.append(sequence(literal(char), after))
    other = negate(tuple((ord(char), ord(char)) for char in nexts))
    return rules.add(choice([*ways, sequence(CharClass(other), ANY_TEXT)]))


class _Automaton:
    """`moves[state][char]` is the next state, for characters that do not lead back to state 0;
    `found[state]` the string that ends in a state."""

    def __init__(self, exits: Mapping[str, Node | None]) -> None:
        self.moves: list[dict[str, int]] = [{}]
        self.found: list[str | None] = [None]
        for text in exits:
            state = 0
            for char in text:
                if char not in self.moves[state]:
                    self.moves[state][char] = len(self.moves)
                    self.moves.append({})
                    self.found.append(None)
                state = self.moves[state][char]
            self.found[state] = text
        self._close(exits)

    def _close(self, exits: Mapping[str, Node | None]) -> None:
        """Add the moves on characters that a state's own string does not expect."""
        back = [0] * len(self.moves)
        waiting = deque(self.moves[0].values())
        while waiting:
            state = waiting.popleft()
            shorter = self.found[back[state]]
            own = self.found[state]
            if shorter is not None and (own is None or exits[shorter] is None):
                self.found[state] = shorter
            for char, target in self.moves[state].items():
                back[target] = self.moves[back[state]].get(char, 0)
                waiting.append(target)
            self.moves[state] = {**self.moves[back[state]], **self.moves[state]}
