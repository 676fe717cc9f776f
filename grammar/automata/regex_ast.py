"""Expressions: one tree for regular expressions and for the rules of grammars."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import pairwise

from overlap_spec.grammar.automata.charset import Ranges

# Larger expressions count as nondeterministic, unchecked.
_MOST_POSITIONS = 3000


@dataclass(frozen=True)
class CharClass:
    """One character of a set; an empty set matches nothing."""

    members: Ranges


@dataclass(frozen=True)
class Concat:
    """Parts one after another; no part means the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternation:
    """One of several alternatives."""

    ways: tuple[Node, ...]


@dataclass(frozen=True)
class Repetition:
    """`body` from `least` to `most` times; None means no bound."""

    body: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Ref:
    """A reference to a rule; regular expressions have none."""

    name: str


Node = CharClass | Concat | Alternation | Repetition | Ref
EMPTY = Concat(())
_NO_NAMES = frozenset[str]()


def concat(*parts: Node) -> Node:
    """A concatenation, or the part itself if there is only one."""
    return parts[0] if len(parts) == 1 else Concat(parts)


def alternate(*ways: Node) -> Node:
    """An alternation, or the alternative itself if there is only one."""
    return ways[0] if len(ways) == 1 else Alternation(ways)


def text(fixed: str) -> Node:
    """An expression that matches exactly this text."""
    return Concat(tuple(CharClass(((ord(char), ord(char)),)) for char in fixed))


def parts_of(node: Node) -> tuple[Node, ...]:
    """The direct parts of an expression."""
    if isinstance(node, Concat):
        return node.parts
    if isinstance(node, Alternation):
        return node.ways
    return (node.body,) if isinstance(node, Repetition) else ()


def mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """An expression with each of its direct parts changed."""
    if isinstance(node, Concat):
        return Concat(tuple(map(change, node.parts)))
    if isinstance(node, Alternation):
        return Alternation(tuple(map(change, node.ways)))
    if isinstance(node, Repetition):
        return Repetition(change(node.body), node.least, node.most)
    return node


def references(node: Node) -> frozenset[str]:
    """Names of the rules that an expression refers to directly.

    An expression keeps them, for each of its parts is asked by whoever walks it.
    """
    if isinstance(node, CharClass):
        return _NO_NAMES
    kept: dict[str, frozenset[str]] = node.__dict__
    found = kept.get("references")
    if found is None:
        own = (node.name,) if isinstance(node, Ref) else ()
        inside = (references(part) for part in parts_of(node) if not isinstance(part, CharClass))
        found = kept["references"] = _NO_NAMES.union(own, *inside)
    return found


def is_nullable(node: Node, rules: Container[str] = ()) -> bool:
    """Whether an expression matches the empty text, given the rules that do."""
    if isinstance(node, Ref):
        return node.name in rules
    if isinstance(node, Concat):
        return all(is_nullable(part, rules) for part in node.parts)
    if isinstance(node, Alternation):
        return any(is_nullable(way, rules) for way in node.ways)
    if isinstance(node, Repetition):
        return node.least == 0 or is_nullable(node.body, rules)
    return False


@dataclass
class _Glushkov:
    sets: list[Ranges] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)

    def visit(self, node: Node) -> tuple[bool, set[int], set[int]]:
        """Whether the node is nullable, and its first and last positions."""
        if isinstance(node, CharClass):
            self.sets.append(node.members)
            self.follow.append(set())
            here = {len(self.sets) - 1}
            return False, here, here
        if isinstance(node, Alternation):
            seen = [self.visit(way) for way in node.ways]
            first = set().union(*(part[1] for part in seen))
            return any(part[0] for part in seen), first, set().union(*(part[2] for part in seen))
        if isinstance(node, Concat):
            return self._chain(node)
        assert isinstance(node, Repetition)
        empty, first, last = self.visit(node.body)
        if node.most is None or node.most > 1:
            # A counted repetition is treated as a loop: stricter, and independent of the count.
            for position in last:
                self.follow[position] |= first
        return empty or node.least == 0, first, last

    def _chain(self, node: Concat) -> tuple[bool, set[int], set[int]]:
        empty, first, last = True, set[int](), set[int]()
        for part in node.parts:
            part_empty, part_first, part_last = self.visit(part)
            for position in last:
                self.follow[position] |= part_first
            first = first | part_first if empty else first
            last = last | part_last if part_empty else part_last
            empty = empty and part_empty
        return empty, first, last


def is_deterministic(node: Node) -> bool:
    """Whether the next character always decides which position matches it (one-unambiguous)."""
    if _positions(node) > _MOST_POSITIONS:
        return False
    glushkov = _Glushkov()
    _, first, _ = glushkov.visit(node)
    return all(_apart(glushkov.sets, group) for group in [first, *glushkov.follow])


def _positions(node: Node) -> int:
    return isinstance(node, CharClass) + sum(map(_positions, parts_of(node)))


def _apart(sets: list[Ranges], group: set[int]) -> bool:
    spans = sorted(span for position in group for span in sets[position])
    return all(left[1] < right[0] for left, right in pairwise(spans))
