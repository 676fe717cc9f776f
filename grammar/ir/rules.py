"""Builds a grammar rule by rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from overlap_spec.grammar.automata.charset import ALL, intersect
from overlap_spec.grammar.automata.dfa import Dfa
from overlap_spec.grammar.automata.escape import Escape, in_json, plain
from overlap_spec.grammar.automata.regex_ast import (
    EMPTY,
    Alternation,
    CharClass,
    Concat,
    Node,
    Ref,
    Repetition,
    mapped,
)
from overlap_spec.grammar.ir.syntax import Syntax, whole
from overlap_spec.grammar.ir.tokens import Except, Token


class Rules:
    """Collects rules and tokens; equal ones share one name."""

    def __init__(self) -> None:
        self._count = 0
        self._bodies: dict[str, Node] = {}
        self._tokens: dict[str, Token] = {}
        self._known: dict[Node | Token, Ref] = {}

    def reserve(self) -> Ref:
        """A new rule, to be defined later, for recursion; it matches nothing until then."""
        made = Ref(f"r{self._count}")
        self._count += 1
        self._bodies[made.name] = made
        return made

    def define(self, rule: Ref, body: Node) -> None:
        """Set the body of a reserved rule."""
        self._bodies[rule.name] = body

    def add(self, body: Node) -> Ref:
        """The rule with this body."""
        if body not in self._known:
            made = self._known[body] = self.reserve()
            self._bodies[made.name] = body
        return self._known[body]

    def token(self, language: Node | Dfa | Except, escape: Escape = plain) -> Ref:
        """The token of a language; see `Token`."""
        token = Token(language, escape)
        if token not in self._known:
            made = self._known[token] = Ref(f"t{len(self._tokens)}")
            self._tokens[made.name] = token
        return self._known[token]

    def quoted(self, language: Node | Dfa | Except, escape: Escape = in_json) -> Node:
        """An expression for a JSON string with a language between its quotes: an expression is
        escaped for JSON already, an automaton is not.

        The quotes are outside of the token, so that the backend knows what follows it wherever
        it is used, which makes a mask a hundred times cheaper.
        """
        if isinstance(language, Dfa):
            language = Except.of(language) or language
        return sequence(literal('"'), self.token(language, escape), literal('"'))

    def embed(self, syntax: Syntax) -> Ref:
        """The start rule of a grammar without tokens, whose rules are added under new names."""
        names = {name: self.reserve() for name in syntax.rules}
        for name, body in syntax.rules.items():
            self.define(names[name], renamed(body, names))
        return names["root"]

    def syntax(self, root: Node) -> Syntax:
        """The whole grammar; `root` is its start node."""
        return whole({"root": root, **self._bodies}, self._tokens)


def renamed(node: Node, names: Mapping[str, Ref]) -> Node:
    """An expression with other references in place of some."""
    if isinstance(node, Ref):
        return names.get(node.name, node)
    return mapped(node, lambda part: renamed(part, names))


@lru_cache(8192)
def _char(char: str) -> CharClass:
    point = ord(char)
    # A surrogate is not a character: its class is empty.
    return CharClass(intersect(((point, point),), ALL))


def literal(text: str) -> Node:
    """An expression that matches exactly `text`."""
    return _char(text) if len(text) == 1 else Concat(tuple(map(_char, text)))


def sequence(*parts: Node) -> Node:
    """A sequence."""
    left: list[Node] = []
    for part in parts:
        if isinstance(part, Concat):
            left += part.parts
        else:
            left.append(part)
    return left[0] if len(left) == 1 else Concat(tuple(left))


def choice(ways: Iterable[Node]) -> Node:
    """One of the alternatives, of which there is at least one."""
    unique = tuple(dict.fromkeys(ways))
    return unique[0] if len(unique) == 1 else Alternation(unique)


def repeat(part: Node, least: int, most: int | None) -> Node:
    """`part` from `least` to `most` times; None means no bound."""
    if most == 0:
        return EMPTY
    return part if (least, most) == (1, 1) else Repetition(part, least, most)
