"""Regular expressions as trees, and their two written forms: terminals and rules.

xgrammar 0.2.8 compiles a `Regex("…")` terminal into one automaton, which makes masks a thousand
times cheaper than rules. But it merges states wrongly if two alternatives share a prefix
(`(c(c|)|c)` accepts "ccc") or if `?` follows a loop. So only deterministic expressions become
terminals, with `?` written as an alternation; all others become rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from overlap_spec.grammar.automata.charset import Ranges, regex_class, rule_class

# Larger expressions count as nondeterministic, unchecked.
_MOST_POSITIONS = 3000


@dataclass(frozen=True)
class CharClass:
    """One character of a non-empty set."""

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


Node = CharClass | Concat | Alternation | Repetition
EMPTY = Concat(())


def concat(*parts: Node) -> Node:
    """A concatenation, or the part itself if there is only one."""
    return parts[0] if len(parts) == 1 else Concat(parts)


def alternate(*ways: Node) -> Node:
    """An alternation, or the alternative itself if there is only one."""
    return ways[0] if len(ways) == 1 else Alternation(ways)


def text(fixed: str) -> Node:
    """An expression that matches exactly this text."""
    return Concat(tuple(CharClass(((ord(char), ord(char)),)) for char in fixed))


def to_regex(node: Node) -> str:
    """An expression in the syntax of a `Regex("…")` terminal."""
    if isinstance(node, CharClass):
        return regex_class(node.members)
    if isinstance(node, Concat):
        return "".join(to_regex(part) for part in node.parts)
    if isinstance(node, Alternation):
        return f"({'|'.join(to_regex(way) for way in node.ways)})"
    body, least, most = f"({to_regex(node.body)})", node.least, node.most
    if most is None:
        return body * (least - 1) + f"{body}+" if least else f"{body}*"
    if most == 0:
        return ""
    if most == 1:
        return body if least else f"({to_regex(node.body)}|)"
    counted = f"{body}{{{max(least, 1)},{most}}}"
    return counted if least else f"({counted}|)"


def to_rule(node: Node) -> str:
    """An expression as the body of an EBNF rule."""
    if isinstance(node, CharClass):
        return rule_class(node.members)
    if isinstance(node, Concat):
        return " ".join(to_rule(part) for part in node.parts) or '""'
    if isinstance(node, Alternation):
        return f"({' | '.join(to_rule(way) for way in node.ways)})"
    body = f"({to_rule(node.body)})"
    if node.most is None:
        return f"{body}{{{node.least},}}" if node.least > 1 else f"{body}{'*+'[node.least]}"
    return f"{body}{{{node.least},{node.most}}}" if node.most else '""'


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
    if isinstance(node, CharClass):
        return 1
    if isinstance(node, Repetition):
        return _positions(node.body)
    return sum(map(_positions, node.parts if isinstance(node, Concat) else node.ways))


def _apart(sets: list[Ranges], group: set[int]) -> bool:
    spans = sorted(span for position in group for span in sets[position])
    return all(left[1] < right[0] for left, right in pairwise(spans))
