"""EBNF text: rules, literals and regular-expression terminals.

The dialect is GBNF with `{m,n}` repetition and `Regex("…")` terminals.
"""

from __future__ import annotations

import json

from overlap_spec.grammar.lowering.automaton import Node, is_deterministic, to_regex, to_rule


class Rules:
    """Collects rules; equal bodies share one name."""

    def __init__(self) -> None:
        self._count = 0
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def reserve(self) -> str:
        """A name whose body comes later, for recursion."""
        name = f"r{self._count}"
        self._count += 1
        self._bodies[name] = name
        return name

    def define(self, name: str, body: str) -> None:
        """Give a reserved name its body."""
        self._bodies[name] = body

    def add(self, body: str) -> str:
        """The name of a rule with this body, new or not."""
        if body not in self._names:
            name = self.reserve()
            self._bodies[name] = body
            self._names[body] = name
        return self._names[body]

    def terminal(self, node: Node) -> str:
        """The name of a rule that matches a regular expression."""
        if is_deterministic(node):
            return self.add(f"Regex({json.dumps(to_regex(node), ensure_ascii=False)})")
        return self.add(to_rule(node))

    def quoted(self, node: Node) -> str:
        """An expression for a JSON string with `node` between its quotes.

        The quotes stand outside of the terminal: the backend then knows what follows it, in
        however many places it is used, which makes a mask a hundred times cheaper.
        """
        return sequence(literal('"'), self.terminal(node), literal('"'))

    def drop(self, name: str) -> None:
        """Take back a reserved name that nothing refers to."""
        del self._bodies[name]

    def text(self, root: str) -> str:
        """The whole grammar, starting at the expression `root`."""
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]
        return "\n".join(lines) + "\n"


def literal(text: str) -> str:
    """An EBNF string that matches `text` and nothing else."""
    return json.dumps(text, ensure_ascii=False)


def sequence(*parts: str) -> str:
    """Parts one after another; empty parts vanish."""
    return " ".join(part for part in parts if part) or '""'


def choice(alternatives: list[str]) -> str:
    """One of the alternatives, in parentheses where there are several."""
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
