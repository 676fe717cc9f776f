"""Rules for the members of arrays and objects: order, separators and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex_ast import EMPTY, Node
from overlap_spec.grammar.ir.rules import choice, repeat, sequence
from overlap_spec.grammar.lowering.layout import Layout

# Each member's rule refers to the next one's, and the backends' libraries follow rules by
# recursion: before 2,000 members one of them overflows its stack, which ends the process.
MOST_NAMED = 1024


@dataclass(frozen=True)
class Member:
    """A named or positional member; its expression is None where it is impossible."""

    rule: Node | None
    required: bool


@dataclass(frozen=True)
class Tail:
    """Free members: the expression of any, and, if one of a kind is required, those of that one and
    of what may follow it (None if none may)."""

    every: Node
    must: Node | None = None
    after: Node | None = None


@dataclass
class Members:
    """Builds the rules of one container."""

    layout: Layout
    brackets: str
    depth: int
    least: int
    most: int | None
    _made: dict[tuple[int, int, bool], Node | None] = field(default_factory=dict)

    def array(self, members: list[Member], tail: Tail | None) -> Node | None:
        """Positional members, then free ones; an array may end before any of them."""
        for i, member in enumerate(members):
            if member.rule is None:
                # No item is possible here, so the array ends before.
                return self._whole(members[:i], None, True)
        return self._whole(members, tail, True)

    def object(self, members: list[Member], tail: Tail | None) -> Node | None:
        """Named members, of which those not required are optional, then free ones.

        Raises:
            GrammarError: more than :data:`MOST_NAMED` of them.
        """
        if len(members) > MOST_NAMED:
            raise GrammarError(
                f"an object of {len(members)} named properties: at most {MOST_NAMED} are taken; "
                "split it into nested objects, or name fewer",
                "schema",
            )
        if any(member.required and member.rule is None for member in members):
            return None
        return self._whole([m for m in members if m.rule is not None], tail, False)

    def _whole(self, members: list[Member], tail: Tail | None, positional: bool) -> Node | None:
        self._members, self._tail, self._positional = members, tail, positional
        # Counting multiplies the rules, so it is done only if a bound can be violated.
        need = sum(m.required for m in members)
        room = None if tail is not None else len(members)
        self._counts = (
            positional
            or self.least > need
            or not (self.most is None or (room is not None and room <= self.most))
        )
        if not self._counts:
            self._from_the_end()
        inside = self._from(0, 0, True)
        empty = self.least == 0 and (positional or need == 0) and not (tail and tail.must)
        return self.layout.container(self.brackets, self.depth, inside, empty)

    def _from_the_end(self) -> None:
        """Make the rules last member first, so that :meth:`_from` never recurses deep."""
        required = (i for i, member in enumerate(self._members) if member.required)
        leading = next(required, len(self._members))
        for first, last in ((False, len(self._members)), (True, leading)):
            for index in range(last, 0, -1):
                self._from(index, index, first)

    def _from(self, index: int, count: int, first: bool) -> Node | None:
        """Members from `index` on, after `count` members; at least one if `first`."""
        if self.most is not None and self._counts and count > self.most:
            return None
        key = (index, count if self._counts else 0, first)
        if key not in self._made:
            body = self._rest(index, count, first)
            self._made[key] = body if body is None or body == EMPTY else self.layout.rules.add(body)
        return self._made[key]

    def _rest(self, index: int, count: int, first: bool) -> Node | None:
        if index == len(self._members):
            return self._tails(count, first)
        member = self._members[index]
        ways: list[Node] = []
        after = self._from(index + 1, count + 1, False)
        if after is not None:
            assert member.rule is not None
            comma = EMPTY if first else self.layout.comma(self.depth + 1)
            ways.append(sequence(comma, member.rule, after))
        if self._positional:
            if not first and count >= self.least:
                ways.append(EMPTY)
        elif not member.required:
            without = self._from(index + 1, count, first)
            ways += [without] if without is not None else []
        return choice(ways) if ways else None

    def _tails(self, count: int, first: bool) -> Node | None:
        least = max(self.least - count, 0) if self._counts else 0
        most = None if self.most is None or not self._counts else self.most - count
        tail = self._tail
        if tail is not None and tail.must is not None:
            return self._must(tail, least, most, first)
        if tail is None or most == 0:
            return None if first or least > 0 else EMPTY
        more = sequence(self.layout.comma(self.depth + 1), tail.every)
        if not first:
            return repeat(more, least, most)
        again = repeat(more, max(least - 1, 0), None if most is None else most - 1)
        return sequence(tail.every, again)

    def _must(self, tail: Tail, least: int, most: int | None, first: bool) -> Node | None:
        """Free members, one of a required kind: any, then the last of that kind, then others."""
        ways = []
        for ahead in range(0 if most is None else most):
            left = most - ahead - 1 if most is not None else 0
            need = max(least - ahead - 1, 0)
            if need <= left and (need == 0 or tail.after is not None):
                ways.append(self._around(tail, (ahead, ahead), (need, left), first))
        if most is None:
            ways.append(self._around(tail, (max(least - 1, 0), None), (0, None), first))
        return choice(ways) if ways else None

    def _around(
        self, tail: Tail, before: tuple[int, int | None], after: tuple[int, int | None], first: bool
    ) -> Node:
        comma = self.layout.comma(self.depth + 1)
        head = repeat(sequence(tail.every, comma), *before)
        rest = EMPTY if tail.after is None else repeat(sequence(comma, tail.after), *after)
        assert tail.must is not None
        return sequence(EMPTY if first else comma, head, tail.must, rest)
