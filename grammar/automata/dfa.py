"""Deterministic finite automata over code points, with intersection and complement.

Regular expressions have no operator for either. A state's moves are ascending, disjoint spans of
code points; a code point that no span covers is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TypeVar

from overlap_spec.grammar.automata.charset import ALL, Ranges, negate, union
from overlap_spec.grammar.automata.regex_ast import Alternation, CharClass, Concat, Node, Repetition

Move = tuple[int, int, int]
S = TypeVar("S", bound=Hashable)
MOST_STATES = 4000


class TooLargeError(Exception):
    """An automaton needs more states than the limit."""


@dataclass(frozen=True)
class Dfa:
    """An automaton; state 0 is the start.

    Args:
        moves: For each state its moves `(first, last, target)`, ascending and disjoint.
    """

    moves: tuple[tuple[Move, ...], ...]
    final: tuple[bool, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no text is accepted; exact for trimmed automata, which all of these are."""
        return not any(self.final)

    def targets(self, state: int) -> dict[int, Ranges]:
        """The characters that lead from a state to each of its successors."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for low, high, to in self.moves[state]:
            spans.setdefault(to, []).append((low, high))
        return {to: union([tuple(pairs)]) for to, pairs in spans.items()}


NONE = Dfa(((),), (False,))
EVERY = Dfa((tuple((low, high, 0) for low, high in ALL),), (True,))
EMPTY_TEXT = Dfa(((),), (True,))


@dataclass
class Nfa:
    """A nondeterministic automaton: each state's moves, with a character and without one."""

    free: list[list[int]] = field(default_factory=list)
    spans: list[list[Move]] = field(default_factory=list)

    def state(self) -> int:
        """A new state's number; TooLargeError over a limit."""
        if len(self.free) > 8 * MOST_STATES:
            raise TooLargeError
        self.free.append([])
        self.spans.append([])
        return len(self.free) - 1

    def add(self, node: Node, start: int) -> int:
        """Thompson's construction; returns the end state."""
        if isinstance(node, CharClass):
            end = self.state()
            self.spans[start] += [(low, high, end) for low, high in node.members]
            return end
        if isinstance(node, Concat):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, Alternation):
            end = self.state()
            for way in node.ways:
                self.free[self.add(way, start)].append(end)
            return end
        assert isinstance(node, Repetition)
        for _ in range(node.least):
            start = self.add(node.body, start)
        end = self.state()
        if node.most is None:
            self.free[start].append(end)
            self.free[self.add(node.body, end)].append(end)
            return end
        for _ in range(node.most - node.least):
            self.free[start].append(end)
            start = self.add(node.body, start)
        self.free[start].append(end)
        return end

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """States, and all that they reach without a character."""
        return frozenset(reached(states, self.free.__getitem__))


def reached(starts: Iterable[S], leads: Callable[[S], Iterable[S]]) -> set[S]:
    """Nodes of a graph, and all that they lead to."""
    pending, seen = list(starts), set[S]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += leads(node)
    return seen


def uncircled(leads: Mapping[S, Iterable[S]]) -> Iterator[S]:
    """The nodes of a graph that reach no circle, each behind those that it leads to."""
    sorter = TopologicalSorter(leads)
    # It gives the others all the same.
    with suppress(CycleError):
        sorter.prepare()
    while ready := sorter.get_ready():
        yield from ready
        sorter.done(*ready)


def from_node(node: Node) -> Dfa:
    """Texts that an expression matches in full."""
    return before(node, EMPTY_TEXT)


def before(node: Node, rest: Dfa) -> Dfa:
    """Texts that `node` matches, followed by texts of `rest`."""
    nfa = Nfa()
    end = nfa.add(node, nfa.state())
    offset = len(nfa.free)
    for moves in rest.moves:
        nfa.spans[nfa.state()] = [(low, high, to + offset) for low, high, to in moves]
    nfa.free[end].append(offset)
    final = {offset + state for state, last in enumerate(rest.final) if last}
    closure = cache(nfa.closure)

    def moves_of(states: frozenset[int]) -> list[tuple[int, int, frozenset[int]]]:
        cut = _cut([move for state in states for move in nfa.spans[state]])
        return [(low, high, closure(targets)) for low, high, targets in cut]

    return _explore(nfa.closure([0]), moves_of, lambda states: not final.isdisjoint(states))


def _cut(moves: list[Move]) -> list[tuple[int, int, frozenset[int]]]:
    edges = sorted({edge for low, high, _ in moves for edge in (low, high + 1)})
    found: list[tuple[int, int, frozenset[int]]] = []
    ordered = sorted(moves)
    active: list[Move] = []
    at = 0
    for low, after in pairwise(edges):
        while at < len(ordered) and ordered[at][0] <= low:
            active.append(ordered[at])
            at += 1
        active = [move for move in active if move[1] >= low]
        if active:
            found.append((low, after - 1, frozenset(move[2] for move in active)))
    return found


def _explore(
    start: S, moves_of: Callable[[S], list[tuple[int, int, S]]], is_final: Callable[[S], bool]
) -> Dfa:
    numbers = {start: 0}
    table: list[tuple[Move, ...]] = []
    pending = [start]
    for state in pending:
        row: list[Move] = []
        for low, high, target in moves_of(state):
            if target not in numbers:
                if len(numbers) >= MOST_STATES:
                    raise TooLargeError
                numbers[target] = len(numbers)
                pending.append(target)
            row.append((low, high, numbers[target]))
        table.append(tuple(row))
    return minimal(Dfa(tuple(table), tuple(is_final(state) for state in pending)))


def minimal(dfa: Dfa) -> Dfa:
    """The smallest equivalent automaton: dead states are removed, then partitions refined.

    Only states with a move into a block that was split are examined again, and the largest part
    of a block keeps its number, so that long chains stay cheap.
    """
    alive = _alive(dfa)
    if 0 not in alive:
        return NONE
    back: dict[int, set[int]] = {}
    for state in alive:
        for _, _, to in dfa.moves[state]:
            back.setdefault(to, set()).add(state)
    group = [int(last) for last in dfa.final]
    blocks: dict[int, set[int]] = {}
    for state in alive:
        blocks.setdefault(group[state], set()).add(state)
    dirty = set(alive)
    while dirty:
        touched: dict[int, set[int]] = {}
        for state in dirty:
            touched.setdefault(group[state], set()).add(state)
        dirty = set()
        # Split all blocks by the same grouping, then renumber.
        split = [_split(dfa, blocks[at], states, group, alive) for at, states in touched.items()]
        for at, parts in zip(touched, split, strict=True):
            for part in parts:
                number = len(blocks) + 2
                blocks[number] = part
                blocks[at] -= part
                for state in part:
                    group[state] = number
                    dirty |= back.get(state, set())
    return _grouped(dfa, group, alive)


def _split(
    dfa: Dfa, block: set[int], touched: set[int], group: list[int], alive: set[int]
) -> list[set[int]]:
    """The parts that leave a block: all but the untouched part, or all but the largest."""
    parts: dict[tuple[Move, ...], set[int]] = {}
    for state in touched:
        parts.setdefault(_row(dfa, state, group, alive), set()).add(state)
    untouched = next(iter(block - touched), None) if len(touched) < len(block) else None
    if untouched is not None:
        parts.pop(_row(dfa, untouched, group, alive), None)
        return list(parts.values())
    return sorted(parts.values(), key=len)[:-1]


def _alive(dfa: Dfa) -> set[int]:
    back: dict[int, list[int]] = {}
    for state, moves in enumerate(dfa.moves):
        for _, _, to in moves:
            back.setdefault(to, []).append(state)
    final = (state for state, last in enumerate(dfa.final) if last)
    return reached(final, lambda state: back.get(state, ()))


def _row(dfa: Dfa, state: int, group: list[int], alive: set[int]) -> tuple[Move, ...]:
    row: list[Move] = []
    for low, high, to in dfa.moves[state]:
        if to not in alive:
            continue
        if row and row[-1][1] == low - 1 and row[-1][2] == group[to]:
            row[-1] = (row[-1][0], high, group[to])
        else:
            row.append((low, high, group[to]))
    return tuple(row)


def _grouped(dfa: Dfa, group: list[int], alive: set[int]) -> Dfa:
    numbers: dict[int, int] = {group[0]: 0}
    rows: list[tuple[Move, ...]] = []
    final: list[bool] = []
    member = {group[state]: state for state in alive}
    pending = [group[0]]
    for block in pending:
        row = _row(dfa, member[block], group, alive)
        for _, _, to in row:
            if to not in numbers:
                numbers[to] = len(numbers)
                pending.append(to)
        rows.append(tuple((low, high, numbers[to]) for low, high, to in row))
        final.append(dfa.final[member[block]])
    return Dfa(tuple(rows), tuple(final))


def both(left: Dfa, right: Dfa) -> Dfa:
    """The intersection."""
    if left is EVERY or right is EVERY:
        return right if left is EVERY else left

    def moves_of(pair: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
        mine, theirs = left.moves[pair[0]], right.moves[pair[1]]
        found = []
        i = j = 0
        while i < len(mine) and j < len(theirs):
            low, high, to = mine[i]
            other_low, other_high, other = theirs[j]
            first, last = max(low, other_low), min(high, other_high)
            if first <= last:
                found.append((first, last, (to, other)))
            if high <= other_high:
                i += 1
            if other_high <= high:
                j += 1
        return found

    return _explore((0, 0), moves_of, lambda pair: left.final[pair[0]] and right.final[pair[1]])


def neither(dfa: Dfa) -> Dfa:
    """The complement."""
    sink = len(dfa.moves)
    rows = []
    for moves in (*dfa.moves, ()):
        covered = tuple((low, high) for low, high, _ in moves)
        gaps = negate(covered) if covered else ALL
        rows.append(tuple(sorted([*moves, *((low, high, sink) for low, high in gaps)])))
    return minimal(Dfa(tuple(rows), tuple(not last for last in (*dfa.final, False))))


def any_of(dfas: Iterable[Dfa]) -> Dfa:
    """The union."""
    ways = list(dfas)
    if len(ways) == 1:
        return ways[0]
    found = EVERY
    for way in ways:
        found = both(found, neither(way))
    return neither(found)


def lengths(least: int, most: int | None) -> Dfa:
    """Texts of `least` to `most` characters; None means no upper bound."""
    count = least if most is None else most
    if count >= MOST_STATES:
        raise TooLargeError
    rows = [tuple((low, high, n + 1) for low, high in ALL) for n in range(count)]
    rows.append(tuple((low, high, count) for low, high in ALL) if most is None else ())
    return Dfa(tuple(rows), tuple(n >= least for n in range(count + 1)))


def from_texts(texts: Iterable[str]) -> Dfa:
    """Exactly the given texts."""
    rows: list[dict[int, int]] = [{}]
    final = [False]
    for text in texts:
        state = 0
        for char in text:
            if ord(char) not in rows[state]:
                rows[state][ord(char)] = len(rows)
                rows.append({})
                final.append(False)
            state = rows[state][ord(char)]
        final[state] = True
    moves = tuple(tuple((p, p, to) for p, to in sorted(row.items())) for row in rows)
    return minimal(Dfa(moves, tuple(final))) if any(final) else NONE
