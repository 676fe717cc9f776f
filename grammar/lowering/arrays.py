"""Array shapes as rules: items by position, by count, and without repeats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.ebnf import choice, literal, sequence
from overlap_spec.grammar.lowering.members import Member, Members, Tail
from overlap_spec.grammar.lowering.objects import Writer
from overlap_spec.grammar.lowering.shapes import (
    NOTHING,
    Arrays,
    Consts,
    Contains,
    Expr,
    all_of,
    negated,
)
from overlap_spec.grammar.source import json_path

_MOST_STATES = 1200
# A state of an array's automaton: what decides which items may follow.
State = tuple[int, ...]


@dataclass
class ArrayWriter:
    """Writes one array shape; arguments as in `ObjectWriter`."""

    writer: Writer
    shape: Arrays
    path: str
    depth: int

    def rule(self) -> str | None:
        """An expression for the shape; None if it is empty.

        Raises:
            GrammarError: a keyword that cannot be enforced exactly.
        """
        shape = self.shape
        if shape.unique and (shape.most is None or shape.most > 1):
            return self._distinct()
        if shape.contains:
            return self._counted()
        members = [
            Member(self._item(expr, i), i < shape.least) for i, expr in enumerate(shape.prefix)
        ]
        tail = None
        if shape.most is None or shape.most > len(members):
            rest = self._item(shape.rest, None)
            tail = None if rest is None else Tail(rest)
        layout = self.writer.layout
        build = Members(self.writer.rules, layout, "[]", self.depth, shape.least, shape.most)
        return build.array(members, tail)

    def _item(self, expr: Expr, place: int | None) -> str | None:
        keys: tuple[str | int, ...] = ("items",) if place is None else ("prefixItems", place)
        return self.writer.value(expr, json_path(self.path, *keys), self.depth + 1)

    def _distinct(self) -> str | None:
        """Arrays without equal items, for items of a few fixed values."""
        shape, values = self.shape, list[tuple[str, str]]()
        for found in self.writer.resolver.shapes(shape.rest):
            if not isinstance(found, Consts):
                reason = "is supported for fixed values only (enum, const)"
                raise keywords.refusal("uniqueItems", self.path, reason)
            values += found.values
        if shape.prefix or shape.contains:
            raise keywords.refusal("uniqueItems", self.path, "is not supported beside other items")
        pairs = list(dict(values).items())
        texts = [self.writer.layout.value(json.loads(text), self.depth + 1) for _, text in pairs]
        most = len(texts) if shape.most is None else min(shape.most, len(texts))

        def ways(state: State) -> Iterator[tuple[str | None, State]]:
            if len(state) < most:
                for i, text in enumerate(texts):
                    if i not in state:
                        yield text, tuple(sorted((*state, i)))

        return self._array(ways, lambda state: len(state) >= shape.least, (), "uniqueItems")

    def _counted(self) -> str | None:
        """Arrays by position and by how many items match each `contains`."""
        shape = self.shape
        far = max([len(shape.prefix), *(one.start for one in shape.contains)])
        top = max(far, shape.least if shape.most is None else shape.most)

        def ways(state: State) -> Iterator[tuple[str | None, State]]:
            place, counts = state[0], state[1:]
            if shape.most is not None and place >= shape.most:
                return
            known = place < len(shape.prefix)
            base = shape.prefix[place] if known else shape.rest
            after = min(place + 1, top) if shape.most is None else place + 1
            for hits in itertools.product(
                *(self._hits(one, place, n) for one, n in zip(shape.contains, counts, strict=True))
            ):
                item = all_of(base, *(expr for expr, _ in hits))
                if item != NOTHING:
                    here = place if known else None
                    yield self._item(item, here), (after, *(n for _, n in hits))

        def may_end(state: State) -> bool:
            enough = all(n >= one.least for n, one in zip(state[1:], shape.contains, strict=True))
            return state[0] >= shape.least and enough

        start = (0, *[0] * len(shape.contains))
        return self._array(ways, may_end, start, "contains")

    @staticmethod
    def _hits(one: Contains, place: int, count: int) -> Iterator[tuple[Expr, int]]:
        """What an item may be under one `contains`, with the count after it."""
        if place < one.start or (one.most is None and count >= one.least):
            yield all_of(), count
            return
        if one.most is None or count < one.most:
            yield one.item, count + 1
        yield (all_of() if one.most is None else negated(one.item)), count

    def _array(
        self,
        ways: Callable[[State], Iterator[tuple[str | None, State]]],
        may_end: Callable[[State], bool],
        start: State,
        keyword: str,
    ) -> str | None:
        """The rules of an automaton that reads one item per step."""
        layout, rules = self.writer.layout, self.writer.rules
        comma = layout.comma(self.depth + 1)
        names: dict[State, str] = {}
        pending: list[State] = []

        def name(state: State) -> str:
            if state not in names:
                if len(names) >= _MOST_STATES:
                    raise keywords.refusal(keyword, self.path, "has too many cases to count")
                names[state] = rules.reserve()
                pending.append(state)
            return names[state]

        first = [sequence(item, name(after)) for item, after in ways(start) if item is not None]
        for state in pending:
            steps = [
                sequence(comma, item, name(after))
                for item, after in ways(state)
                if item is not None
            ]
            # A dead state matches nothing: a rule that only refers to itself.
            ends = ['""'] if may_end(state) else []
            rules.define(names[state], choice([*steps, *ends]) if steps or ends else names[state])
        opening = layout.opening("[", self.depth + 1)
        closing = layout.closing("]", self.depth)
        found = [sequence(opening, choice(first), closing)] if first else []
        found += [literal("[]")] if may_end(start) else []
        return choice(found) if found else None
