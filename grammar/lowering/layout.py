"""White space between JSON tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from overlap_spec.grammar.automata.regex import parse
from overlap_spec.grammar.automata.regex_ast import EMPTY, Node
from overlap_spec.grammar.ir.rules import Rules, choice, literal, sequence

# One line break and some indentation: enough for any pretty printer, too little for endless output.
_BOUNDED = parse(r"\n?[ \t]{0,16}")


@dataclass(frozen=True)
class Layout:
    """Where white space goes.

    Args:
        whitespace: `"compact"`, `"bounded"`, or the number of spaces of an indented form.
    """

    rules: Rules
    whitespace: str | int

    @property
    def by_depth(self) -> bool:
        """Whether an expression depends on its nesting depth."""
        return isinstance(self.whitespace, int)

    def comma(self, depth: int) -> Node:
        """The separator of two members at `depth`."""
        return self._spaced(",", depth)

    def colon(self) -> Node:
        """The separator of key and value."""
        return literal(": ") if self.by_depth else self._spaced(":", 0)

    def container(
        self, brackets: str, depth: int, inside: Node | None, may_be_empty: bool
    ) -> Node | None:
        """An array or object at `depth`, of members inside or of none; None if it has neither."""
        ways: list[Node] = []
        if inside is not None:
            if isinstance(self.whitespace, int):
                closing = literal("\n" + " " * (self.whitespace * depth) + brackets[1])
            else:
                closing = sequence(self._space(), literal(brackets[1]))
            ways.append(sequence(self._spaced(brackets[0], depth + 1), inside, closing))
        if may_be_empty:
            ways.append(literal(brackets))
        return choice(ways) if ways else None

    def value(self, value: Any, depth: int) -> Node:
        """The text of a fixed value at `depth`."""
        if isinstance(self.whitespace, int):
            text = json.dumps(value, ensure_ascii=False, indent=self.whitespace)
            return literal(text.replace("\n", "\n" + " " * (self.whitespace * depth)))
        return literal(json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    def _spaced(self, mark: str, depth: int) -> Node:
        if isinstance(self.whitespace, int):
            return literal(mark + "\n" + " " * (self.whitespace * depth))
        return sequence(literal(mark), self._space())

    def _space(self) -> Node:
        return self.rules.token(_BOUNDED) if self.whitespace == "bounded" else EMPTY
