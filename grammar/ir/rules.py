"""Builds a grammar rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from overlap_spec.grammar.automata.charset import ALL, Ranges, intersect, negate, union
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


@dataclass(frozen=True)
class Holding:
    """Texts of `least` to `most` characters, of which one at least is among `members`.

    An automaton has two states for each length. Rules have halves: either the first half of a text
    holds one, or it does not and the rest does. So some rules for each power of two are enough.
    """

    members: Ranges
    least: int
    most: int

    @classmethod
    def of(cls, found: Dfa, least: int, most: int) -> Holding | None:
        """Texts of an automaton that have so many characters; None where it asks for more."""
        if found.final != (False, True) or found.targets(1) != {1: ALL}:
            return None
        here = found.targets(0)
        every = union(here.values()) == ALL
        return cls(here[1], max(1, least), most) if every and most >= max(1, least) else None

    def written(self, add: Callable[[Node], Node], escape: Escape) -> Node:
        """The texts, over rules that `add` makes; `escape` writes some of the members."""
        inside, outside, any_one = map(escape, (self.members, negate(self.members), ALL))
        assert inside is not None
        assert any_one is not None

        def split(half: int, first: Node, more: tuple[int, int], rest: Node | None) -> list[Node]:
            ways = [sequence(first, repeat(any_one, *more))]
            if outside is not None and rest is not None:
                ways.append(sequence(repeat(outside, half, half), rest))
            return ways

        @cache
        def exactly(count: int) -> Node:
            if count == 1:
                return inside
            half = count // 2
            rest = count - half
            return add(choice(split(half, exactly(half), (rest, rest), exactly(rest))))

        @cache
        def at_most(count: int) -> Node:
            if count == 1:
                return inside
            half = count // 2
            ways = split(half, exactly(half), (0, count - half), at_most(count - half))
            return add(choice([*ways, at_most(half - 1)] if half > 1 else ways))

        if self.least == 1:
            return at_most(self.most)
        more = self.most - self.least
        rest = at_most(more) if more else None
        return choice(split(self.least, exactly(self.least), (0, more), rest))


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

    def token(self, language: Node | Dfa | Except | Holding, escape: Escape = plain) -> Node:
        """The token of a language, see `Token`; or the rules of one that has some."""
        if isinstance(language, Holding):
            return language.written(self.add, escape)
        token = Token(language, escape)
        if token not in self._known:
            made = self._known[token] = Ref(f"t{len(self._tokens)}")
            self._tokens[made.name] = token
        return self._known[token]

    def quoted(self, language: Node | Dfa | Except | Holding, escape: Escape = in_json) -> Node:
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
