"""A whole grammar as trees: its rules, and the tokens that they refer to."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.dfa import Dfa, uncircled
from overlap_spec.grammar.automata.escape import Escape, plain
from overlap_spec.grammar.automata.regex_ast import (
    EMPTY,
    Alternation,
    CharClass,
    Concat,
    Node,
    Ref,
    Repetition,
    alternate,
    concat,
    is_nullable,
    mapped,
    parts_of,
    references,
)
from overlap_spec.grammar.ir.tokens import Except, Token


@dataclass(frozen=True, eq=False)
class Syntax:
    """A grammar.

    Attributes:
        rules: By name, `root` first; each is reachable, and some finite text completes every
            alternative.
        tokens: By name, among the names of the rules.
        excepts: By name of a rule, what its expression wrongly allows (see :meth:`loops`).
        quoted: Rules that were tokens inside JSON strings: a quote in them is one behind a `\\`.
    """

    rules: dict[str, Node]
    tokens: dict[str, Token] = field(default_factory=dict)
    excepts: dict[str, tuple[Node, ...]] = field(default_factory=dict)
    quoted: frozenset[str] = frozenset()

    @cached_property
    def plain(self) -> Syntax:
        """The same grammar in rules alone."""
        return self._spelled(False)

    @cached_property
    def loops(self) -> Syntax:
        """The grammar in rules alone, in which tokens that leave out some texts do not: those
        stand in `excepts`, for a language with an operator for it."""
        return self._spelled(True)

    def _spelled(self, loops: bool) -> Syntax:
        rules = dict(self.rules)
        excepts: dict[str, tuple[Node, ...]] = {}
        for name, token in self.tokens.items():
            if loops and isinstance(token.language, Except):
                rules[name] = token.language.loop
                excepts[name] = token.language.written
            elif token.node is not None:
                rules[name] = token.node
            else:
                assert isinstance(token.language, Dfa)
                rules |= states(name, token.language, token.escape)
        quoted = (name for name, token in self.tokens.items() if token.escape is not plain)
        return Syntax(rules, {}, excepts, frozenset(quoted))

    @cached_property
    def recursive(self) -> frozenset[str]:
        """Rules that reach a cycle of rules; their languages need not be regular. Of a grammar in
        rules alone, as is what follows."""
        calls = {name: references(body) for name, body in self.rules.items()}
        ending = set(uncircled(calls))
        return frozenset(self.rules) - ending

    @cached_property
    def nullable(self) -> frozenset[str]:
        """Rules that match the empty text."""
        return self.least(is_nullable)

    def least(
        self, holds: Callable[[Node, set[str]], bool], given: Iterable[str] = ()
    ) -> frozenset[str]:
        """The given names and, as few as can be, the rules for which `holds(body, names)`."""
        found = set(given)
        grown = True
        while grown:
            grown = False
            # What is referred to stands behind: one pass does, except for circles.
            for name in [name for name in reversed(self.rules) if name not in found]:
                if holds(self.rules[name], found):
                    found.add(name)
                    grown = True
        return frozenset(found)


@contextmanager
def bounded_depth() -> Iterator[None]:
    """Refuse a grammar whose trees are too deep for the functions that walk them.

    Raises:
        GrammarError: it is.
    """
    try:
        yield
    except RecursionError as error:
        raise GrammarError(
            "the grammar is nested too deep, or has a name of some hundred characters "
            'beside free keys ("additionalProperties": false would do without these)'
        ) from error


def states(name: str, dfa: Dfa, escape: Escape) -> dict[str, Node]:
    """Rules for the texts of a non-empty automaton, one a state; the first is `name`."""
    names = [name, *(f"{name}.{state}" for state in range(1, len(dfa.moves)))]
    found: dict[str, Node] = {}
    for state, own in enumerate(names):
        ways: list[Node] = []
        for to, members in dfa.targets(state).items():
            char = escape(members)
            if char is not None:
                ways.append(concat(char, Ref(names[to])))
        if dfa.final[state]:
            ways.append(EMPTY)
        found[own] = alternate(*ways) if ways else Ref(own)
    return found


def whole(rules: dict[str, Node], tokens: dict[str, Token]) -> Syntax:
    """The grammar of the rules that `root` reaches, without alternatives that no finite text can
    complete, so that no mask leads into one.

    Raises:
        GrammarError: a rule is missing, or no finite text is allowed.
    """

    def asked(name: str) -> Node:
        if name not in rules:
            raise GrammarError(f"EBNF rule {name} is not defined", "ebnf")
        return rules[name]

    found = _reached(asked, tokens)
    alive = found.least(_lives, found.tokens)
    if "root" not in alive:
        raise GrammarError("the grammar allows no finite text", "ebnf")
    is_whole = len(alive) == len(found.rules) + len(found.tokens)
    if is_whole and not any(map(_has_empty_class, found.rules.values())):
        return found
    return _reached(lambda name: _living(rules[name], alive), found.tokens)


def _reached(body_of: Callable[[str], Node], tokens: dict[str, Token]) -> Syntax:
    """The rules and tokens that `root` reaches."""
    reached: dict[str, Node] = {}
    used: dict[str, Token] = {}
    pending = ["root"]
    while pending:
        name = pending.pop()
        if name in tokens:
            used[name] = tokens[name]
        elif name not in reached:
            body = reached[name] = body_of(name)
            pending.extend(sorted(references(body), reverse=True))
    return Syntax(reached, used)


def _lives(node: Node, rules: Container[str]) -> bool:
    """Whether some finite text completes an node, given the rules of which it is so."""
    if isinstance(node, CharClass):
        return bool(node.members)
    if isinstance(node, Ref):
        return node.name in rules
    if isinstance(node, Repetition):
        return node.least == 0 or _lives(node.body, rules)
    found = (_lives(part, rules) for part in parts_of(node))
    return all(found) if isinstance(node, Concat) else any(found)


def _living(node: Node, rules: Container[str]) -> Node:
    """A living expression without dead alternatives."""
    if isinstance(node, Alternation):
        return alternate(*(_living(way, rules) for way in node.ways if _lives(way, rules)))
    if isinstance(node, Repetition) and not _lives(node.body, rules):
        return EMPTY
    return mapped(node, lambda part: _living(part, rules))


def _has_empty_class(node: Node) -> bool:
    if isinstance(node, CharClass):
        return not node.members
    return any(_has_empty_class(part) for part in parts_of(node))
