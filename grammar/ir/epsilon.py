"""Epsilon removal."""

from __future__ import annotations

from collections.abc import Container

from overlap_spec.grammar.automata.regex_ast import (
    EMPTY,
    Alternation,
    CharClass,
    Concat,
    Node,
    Ref,
    Repetition,
    alternate,
    is_nullable,
    parts_of,
    references,
)
from overlap_spec.grammar.ir.rules import renamed, sequence
from overlap_spec.grammar.ir.syntax import Syntax


class EpsilonFree:
    """A grammar with ε removed from every rule.

    Attributes:
        rules: The rules; those that matched the empty text only are gone.
        plain: The exceptions: rules `name*` that still match the empty text, each a repetition of
            characters, mapped to the rule `name` that does not.
        excepts, quoted: As in `Syntax`, of the rules of both names.
    """

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._nullable = syntax.nullable
        self._blank = frozenset(syntax.rules) - syntax.least(_speaks)
        self.root_nullable = "root" in syntax.nullable
        # By `id`: each is asked for by itself and by what it stands in.
        self._known: dict[int, Node | None] = {}
        self.rules: dict[str, Node] = {}
        self.plain: dict[str, str] = {}
        for name, body in syntax.rules.items():
            # A token inside a string stays one lexeme: only its whole text must not be empty.
            whole = name in syntax.quoted and name not in self._nullable
            found = body if whole and not references(body) else self._of(body)
            if found is not None and name not in self._blank:
                self.rules[name] = found
        owners = {name: self.plain.get(name, name) for name in self.rules}
        known = syntax.excepts
        self.excepts = {n: known[owner] for n, owner in owners.items() if owner in known}
        self.quoted = {n for n, owner in owners.items() if owner in syntax.quoted}

    @property
    def syntax(self) -> Syntax:
        """The grammar without ε but at its start."""
        if "root" not in self.rules:
            return Syntax({"root": EMPTY})
        if not self.root_nullable:
            return Syntax(self.rules)
        inner = Ref("root+")
        rules: dict[str, Node] = {"root": Alternation((inner, EMPTY))}
        for name, body in self.rules.items():
            rules[inner.name if name == "root" else name] = renamed(body, {"root": inner})
        return Syntax(rules)

    def _of(self, node: Node) -> Node | None:
        """An expression with ε removed; None if nothing is left."""
        if isinstance(node, CharClass):
            return node
        if id(node) not in self._known:
            self._known[id(node)] = self._made(node)
        return self._known[id(node)]

    def _made(self, node: Node) -> Node | None:
        if isinstance(node, Ref):
            return None if node.name in self._blank else node
        if isinstance(node, Alternation):
            ways = [self._of(way) for way in node.ways]
            return _either([way for way in ways if way is not None])
        if isinstance(node, Concat):
            return self._chain(node.parts)
        assert isinstance(node, Repetition)
        body = self._of(node.body)
        if body is None or node.most == 0:
            return None
        if node.least == 0 or is_nullable(node.body, self._nullable):
            return Repetition(body, 1, node.most)
        return Repetition(body, node.least, node.most)

    def _chain(self, parts: tuple[Node, ...]) -> Node | None:
        whole = [self._maybe(part) for part in parts]
        if not all(is_nullable(part, self._nullable) for part in parts):
            return sequence(*whole)
        # One alternative for each part that may be the first non-empty one.
        ways = []
        for i, part in enumerate(parts):
            first = self._of(part)
            if first is not None:
                ways.append(sequence(first, *whole[i + 1 :]))
        return _either(ways)

    def _maybe(self, node: Node) -> Node:
        """An unchanged language, over the new rules."""
        found = self._of(node)
        if found is None:
            return EMPTY
        if not is_nullable(node, self._nullable):
            return found
        return self._starred(found) or Repetition(found, 0, 1)

    def _starred(self, found: Node) -> Node | None:
        """`x*` for `(x+)?`; if `x+` is a rule, a rule of its own."""
        name = found.name if isinstance(found, Ref) else ""
        if name and references(self._syntax.rules[name]):
            return None
        loop = self._of(self._syntax.rules[name]) if name else found
        if not (isinstance(loop, Repetition) and loop.least == 1):
            return None
        loop = Repetition(loop.body, 0, loop.most)
        if not name:
            return loop
        self.rules[f"{name}*"] = loop
        self.plain[f"{name}*"] = name
        return Ref(f"{name}*")


def _speaks(node: Node, rules: Container[str]) -> bool:
    """Whether an expression matches more than the empty text, given the rules that do."""
    if isinstance(node, Ref):
        return node.name in rules
    if isinstance(node, Repetition) and node.most == 0:
        return False
    return isinstance(node, CharClass) or any(_speaks(p, rules) for p in parts_of(node))


def _either(ways: list[Node]) -> Node | None:
    """A choice with nested choices flattened; None if there is no alternative."""
    left: list[Node] = []
    for way in ways:
        left += way.ways if isinstance(way, Alternation) else (way,)
    return alternate(*left) if left else None
