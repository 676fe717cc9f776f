"""Writes EBNF text: rules, literals and regular-expression terminals.

The dialect is GBNF with `{m,n}` repetition and `Regex("…")` terminals.
"""

from __future__ import annotations

import json
from contextlib import suppress

from overlap_spec.grammar.automata.dfa import Dfa, TooLargeError, from_node
from overlap_spec.grammar.automata.dfa_to_regex import to_node
from overlap_spec.grammar.automata.escape import Escape, in_json, plain
from overlap_spec.grammar.automata.regex_ast import (
    CharClass,
    Concat,
    Node,
    Repetition,
    is_deterministic,
    to_regex,
    to_rule,
)

# xgrammar pays for each state of an automaton that counts.
_MOST_COUNTING = 600


class Rules:
    """Collects rules; equal bodies share one name.

    Args:
        linear: Write expressions that count or are not deterministic as automata: one rule per
            state, a character followed by the next state. This makes xgrammar's masks a thousand
            times cheaper; libraries with a lexer want expressions.
    """

    def __init__(self, linear: bool = False) -> None:
        self.linear = linear
        self._count = 0
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def reserve(self) -> str:
        """A new name, to be defined later, for recursion."""
        name = f"r{self._count}"
        self._count += 1
        self._bodies[name] = name
        return name

    def define(self, name: str, body: str) -> None:
        """Set the body of a reserved name."""
        self._bodies[name] = body

    def add(self, body: str) -> str:
        """The name of a rule with this body; equal bodies share one."""
        if body not in self._names:
            name = self.reserve()
            self._bodies[name] = body
            self._names[body] = name
        return self._names[body]

    def terminal(self, node: Node) -> str:
        """The name of a rule that matches a regular expression."""
        counts = self.linear and _counts(node)
        deterministic = is_deterministic(node)
        if self.linear and (counts or not deterministic):
            with suppress(TooLargeError):
                made = from_node(node)
                if not made.is_empty and not (counts and len(made.moves) > _MOST_COUNTING):
                    return self._states(made, plain)
        if deterministic:
            return self.add(f"Regex({json.dumps(to_regex(node), ensure_ascii=False)})")
        return self.add(to_rule(node))

    def from_dfa(self, dfa: Dfa, escape: Escape) -> str:
        """The name of a rule for the texts of a non-empty automaton."""
        node = to_node(dfa, escape)
        if node is not None and (not self.linear or is_deterministic(node)):
            return self.terminal(node)
        return self._states(dfa, escape)

    def _states(self, dfa: Dfa, escape: Escape) -> str:
        names = [self.reserve() for _ in dfa.moves]
        for state, name in enumerate(names):
            ways = []
            for to, members in dfa.targets(state).items():
                char = escape(members)
                if char is not None:
                    ways.append(sequence(to_rule(char), names[to]))
            if dfa.final[state]:
                ways.append('""')
            self.define(name, choice(ways) if ways else name)
        return names[0]

    def quoted(self, language: Node | Dfa, escape: Escape = in_json) -> str:
        """An expression for a JSON string with a language between its quotes: a node is escaped
        for JSON already, an automaton is not.

        The quotes are outside of the terminal, so that the backend knows what follows it wherever
        it is used, which makes a mask a hundred times cheaper.
        """
        if isinstance(language, Dfa):
            return sequence(literal('"'), self.from_dfa(language, escape), literal('"'))
        return sequence(literal('"'), self.terminal(language), literal('"'))

    def drop(self, name: str) -> None:
        """Remove a reserved name that nothing refers to."""
        del self._bodies[name]

    def text(self, root: str) -> str:
        """The whole grammar; `root` is the start expression."""
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]
        return "\n".join(lines) + "\n"


def _counts(node: Node) -> bool:
    """Whether an expression has a repetition with a bound above 1."""
    if isinstance(node, CharClass):
        return False
    if isinstance(node, Repetition):
        return (node.most or node.least) > 1 or _counts(node.body)
    return any(map(_counts, node.parts if isinstance(node, Concat) else node.ways))


def literal(text: str) -> str:
    """An EBNF literal that matches exactly `text`."""
    return json.dumps(text, ensure_ascii=False)


def sequence(*parts: str) -> str:
    """A sequence; empty parts are left out."""
    return " ".join(part for part in parts if part) or '""'


def choice(alternatives: list[str]) -> str:
    """One of the alternatives, in parentheses if there are several."""
    unique = list(dict.fromkeys(alternatives))
    return unique[0] if len(unique) == 1 else f"({' | '.join(unique)})"


def repeat(part: str, least: int, most: int | None) -> str:
    """`part` from `least` to `most` times; None means no bound."""
    if most == 0:
        return ""
    if (least, most) == (0, None):
        return f"({part})*"
    if (least, most) == (1, 1):
        return part
    if (least, most) == (0, 1):
        return f"({part})?"
    return f"({part}){{{least},{'' if most is None else most}}}"
