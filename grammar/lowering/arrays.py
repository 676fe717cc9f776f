"""Array shapes as rules: items by position, by count, and without repeats."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from overlap_spec.grammar.automata.regex_ast import EMPTY, Node, Ref
from overlap_spec.grammar.ir.rules import choice, sequence
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.keywords import Refusal
from overlap_spec.grammar.lowering.members import Member, Members, Tail
from overlap_spec.grammar.lowering.objects import Writer
from overlap_spec.grammar.lowering.resolver import Resolver
from overlap_spec.grammar.lowering.shapes import (
    NOTHING,
    Arrays,
    Consts,
    Contains,
    Expr,
    Numbers,
    Objects,
    all_of,
    negated,
)
from overlap_spec.grammar.lowering.values import MANY, Once
from overlap_spec.grammar.schemas.source import json_path

_MOST_STATES = 1200
_FEW = 64
# A state of an array's automaton: what decides which items may follow.
State = tuple[int, ...]


@dataclass
class ArrayWriter:
    """Writes one array shape; arguments as in `ObjectWriter`."""

    writer: Writer
    shape: Arrays
    path: str
    depth: int
    once: Once = Once.NO

    def rule(self) -> Node | None:
        """An expression for the shape; None if it is empty.

        Raises:
            GrammarError: a keyword that cannot be enforced exactly.
        """
        shape = self.shape
        if shape.unique and (shape.most is None or shape.most > 1):
            values = fixed_items(shape, self.writer.resolver)
            if values is not None:
                return self._distinct(values)
            self._look()
        elif shape.contains:
            return self._counted()
        members = [
            Member(self._item(expr, i), i < shape.least) for i, expr in enumerate(shape.prefix)
        ]
        tail = None
        if shape.most is None or shape.most > len(members):
            rest = self._item(shape.rest, None)
            tail = None if rest is None else Tail(rest)
        layout = self.writer.layout
        build = Members(layout, "[]", self.depth, shape.least, shape.most)
        return build.array(members, tail)

    def _item(self, expr: Expr, place: int | None) -> Node | None:
        keys: tuple[str | int, ...] = ("items",) if place is None else ("prefixItems", place)
        once = self.once
        if self.shape.unique and once is Once.NO:
            once = Once.ITEM
        return self.writer.value(expr, json_path(self.path, *keys), self.depth + 1, once)

    def _look(self) -> None:
        """Leave it to the matcher to keep items apart.

        Raises:
            Refusal: it could come to a text from which only equal items follow.
        """
        shape, values = self.shape, self.writer.values

        def refuse(reason: str) -> Refusal:
            return keywords.refusal("uniqueItems", self.path, reason)

        if not self.writer.apart:
            raise refuse("is supported in whole schemas only, beyond a few fixed values")
        if self.once is not Once.NO:
            raise refuse("inside an item that must differ is not supported")
        if shape.contains:
            raise refuse("beside contains is not supported")
        if shape.least > MANY:
            raise refuse(f"is supported with minItems up to {MANY}")
        items = [*shape.prefix, *([] if shape.most == len(shape.prefix) else [shape.rest])]
        found = [part for expr in items for part in self.writer.resolver.written(expr)]
        for kind in ("array", "object"):
            kinds = {part for part in found if part.kind == kind}
            is_open = all(
                isinstance(part, Arrays | Objects) and values.is_open(part) for part in kinds
            )
            if not is_open and not (
                len(kinds) == 1 and all(map(values.shape_is_written_once, kinds))
            ):
                raise refuse(f"over these {kind}s is not supported: equal ones may look different")
        for place in range(shape.least):
            expr = shape.prefix[place] if place < len(shape.prefix) else shape.rest
            if values.count(expr) <= place:
                raise refuse(f"may leave no value for item {place}")
            if place >= len(shape.prefix) and values.count(expr) >= shape.least:
                break
        self.writer.looks = True

    def _spellings(self, value: Any) -> list[Node]:
        """The texts of a fixed item: 2.0 equals 2."""
        equal = [int(value)] if isinstance(value, float) and value.is_integer() else []
        return [self.writer.layout.value(one, self.depth + 1) for one in (value, *equal)]

    def _distinct(self, values: list[str]) -> Node | None:
        """Arrays without equal items, for items of a few fixed values."""
        shape = self.shape
        texts = [choice(self._spellings(json.loads(text))) for text in values]
        most = len(texts) if shape.most is None else min(shape.most, len(texts))

        def ways(state: State) -> Iterator[tuple[Node | None, State]]:
            if len(state) < most:
                for i, text in enumerate(texts):
                    if i not in state:
                        yield text, tuple(sorted((*state, i)))

        return self._array(ways, lambda state: len(state) >= shape.least, (), "uniqueItems")

    def _counted(self) -> Node | None:
        """Arrays by position and by how many items match each `contains`."""
        shape = self.shape
        far = max([len(shape.prefix), *(one.start for one in shape.contains)])
        top = max(far, shape.least if shape.most is None else shape.most)

        def ways(state: State) -> Iterator[tuple[Node | None, State]]:
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
        ways: Callable[[State], Iterator[tuple[Node | None, State]]],
        may_end: Callable[[State], bool],
        start: State,
        keyword: str,
    ) -> Node | None:
        """The rules of an automaton that reads one item per step."""
        layout, rules = self.writer.layout, self.writer.rules
        comma = layout.comma(self.depth + 1)
        names: dict[State, Ref] = {}
        pending: list[State] = []

        def name(state: State) -> Ref:
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
            # A dead state matches nothing, as reserved.
            ends = [EMPTY] if may_end(state) else []
            if steps or ends:
                rules.define(names[state], choice([*steps, *ends]))
        inside = choice(first) if first else None
        return layout.container("[]", self.depth, inside, may_end(start))


def fixed_items(shape: Arrays, resolver: Resolver) -> list[str] | None:
    """The texts of items that are a few fixed values, which rules can keep apart; or None."""
    if shape.prefix or shape.contains:
        return None
    values: dict[str, str] = {}
    for found in resolver.written(shape.rest):
        if isinstance(found, Consts):
            values |= dict(found.values)
        elif isinstance(found, Numbers) and found.whole:
            low, high = found.bounds.integers()
            if low is None or high is None or high - low > _FEW:
                return None
            numbers = map(str, range(low, high + 1))
            values |= {text: text for text in numbers if resolver.holds(found, text)}
        else:
            return None
    most = len(values) if shape.most is None else min(shape.most, len(values))
    states = sum(math.comb(len(values), count) for count in range(most + 1))
    return list(values.values()) if states <= _MOST_STATES else None
