"""Rules for objects whose members come in any order: one for each set of members that are there.

So they double with each named member, and are bounded: a schema with more is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from overlap_spec.grammar.automata.dfa import reached
from overlap_spec.grammar.automata.regex_ast import EMPTY, Node
from overlap_spec.grammar.ir.rules import choice, sequence
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.layout import Layout
from overlap_spec.grammar.lowering.members import Member, Tail

MOST_SETS = 512
"""Sets of members in one object: those of 9 named ones."""
MOST_IN_ALL = 2048
"""Sets of members in all objects of a schema."""


@dataclass(frozen=True)
class Present:
    """What an object has so far.

    Args:
        named: One bit for each named member that is there.
        free: Free members, as far as they are counted.
    """

    named: int = 0
    free: int = 0
    must: bool = False

    @property
    def count(self) -> int:
        """Members."""
        return self.named.bit_count() + self.free


@dataclass
class Orders:
    """Writes the objects of one schema, each member wherever it comes."""

    layout: Layout
    _sets: int = field(default=0, init=False)

    def object(
        self,
        members: list[Member],
        tail: Tail | None,
        counts: tuple[int, int | None],
        depth: int,
        path: str,
    ) -> Node | None:
        """An expression for an object; None if it is empty.

        Raises:
            Refusal: it has too many sets of members.
        """
        if any(member.required and member.rule is None for member in members):
            return None
        possible = [member for member in members if member.rule is not None]
        sets = _Sets(possible, tail, *counts)
        if 2 ** len(possible) > MOST_SETS:
            raise _refusal(path, f"{len(possible)} properties")
        alive = sets.alive(path)
        self._sets += len(alive)
        if self._sets > MOST_IN_ALL:
            raise _refusal(path, f"with it all objects have over {MOST_IN_ALL} sets of members")
        start = Present()
        if start not in alive:
            return None
        rules = self.layout.rules
        names = {state: rules.reserve() for state in alive}
        comma = self.layout.comma(depth + 1)
        for state, name in names.items():
            ways: list[Node] = [sequence(comma, rule, names[to]) for rule, to in alive[state]]
            rules.define(name, choice([*ways, EMPTY] if sets.may_end(state) else ways))
        first = [sequence(rule, names[to]) for rule, to in alive[start]]
        inside = choice(first) if first else None
        return self.layout.container("{}", depth, inside, sets.may_end(start))


def _refusal(path: str, what: str) -> keywords.Refusal:
    reason = f'is too much for key_order "any", where each set of members needs a rule: {what}'
    return keywords.refusal("properties", path, reason)


@dataclass
class _Sets:
    """The sets of members of one object, and what may follow each."""

    members: list[Member]
    tail: Tail | None
    least: int
    most: int | None

    def __post_init__(self) -> None:
        self._required = sum(1 << i for i, one in enumerate(self.members) if one.required)
        # Free members are counted up to here.
        needed = self.least > self._required.bit_count()
        self._top = self.most if self.most is not None else self.least if needed else 0

    def may_end(self, state: Present) -> bool:
        """Whether an object may have these members and no others."""
        return (
            state.named & self._required == self._required
            and state.count >= self.least
            and (state.must or self.tail is None or self.tail.must is None)
        )

    def _ways(self, state: Present) -> Iterator[tuple[Node, Present]]:
        if self.most is not None and state.count >= self.most:
            return
        for i, member in enumerate(self.members):
            if member.rule is not None and not state.named >> i & 1:
                yield member.rule, replace(state, named=state.named | 1 << i)
        if self.tail is None:
            return
        more = replace(state, free=min(state.free + 1, self._top))
        if state.must:
            if self.tail.after is not None:
                yield self.tail.after, more
        else:
            yield self.tail.every, more
            if self.tail.must is not None:
                yield self.tail.must, replace(more, must=True)

    def alive(self, path: str) -> dict[Present, list[tuple[Node, Present]]]:
        """The sets from which an object can be finished, each with its next members."""
        found: dict[Present, list[tuple[Node, Present]]] = {}
        pending = [Present()]
        for state in pending:
            if state in found:
                continue
            if len(found) >= MOST_SETS * 2:
                raise _refusal(path, "there are too many free ones to count")
            found[state] = list(self._ways(state))
            pending += (to for _, to in found[state])
        before: dict[Present, list[Present]] = {}
        for state, ways in found.items():
            for _, to in ways:
                before.setdefault(to, []).append(state)
        seen = reached(filter(self.may_end, found), lambda state: before.get(state, ()))
        return {
            state: [(rule, to) for rule, to in ways if to in seen]
            for state, ways in found.items()
            if state in seen
        }
