"""Bodies of repetitions, such as the characters of a string, as automata over bytes.

A token inside a string is mostly so many of its characters. Which tokens are is known of the
characters alone, wherever the string stands: what is found of it serves all places.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.room.graph import RuleGraph

# Larger automata are not made, nor those of fewer first bytes, whose tokens are few.
MOST_STATES, MOST_ITEMS, MOST_DEPTH, LEAST_BYTES = 64, 64, 4, 8
# A node, and where the rules around it go on behind them.
_Item = tuple[int, ...]


class Body:
    """A rule none of whose texts begins with another.

    Attributes:
        moves: int16 `(states + 2, 256)`: the state after each byte; 0 is the first one, the last is
            the end of a text, and the last but one that of no text.
        end: That last state.
        ways: Of each state, spans of bytes that lead on: first and last byte, the state behind.
        begins: bool `(256,)`: the bytes that a text may begin with.
        rules: It, and those that it calls.
    """

    def __init__(self, moves: npt.NDArray[np.int16], rules: frozenset[int]) -> None:
        self.moves, self.rules, self.end = moves, rules, len(moves) - 1
        self.ways: list[list[tuple[int, int, int]]] = []
        for row in moves.tolist():
            firsts = [byte for byte in range(256) if not byte or row[byte] != row[byte - 1]]
            spans = zip(firsts, [*firsts[1:], 256], strict=True)
            self.ways.append(
                [(low, end - 1, row[low]) for low, end in spans if row[low] != self.end - 1]
            )
        self.begins = moves[0] != self.end - 1


def body_of(graph: RuleGraph, rule: int) -> Body | None:
    """A rule as a body; None: a text begins with another, or it is too large or too small."""
    rules = {rule}
    first = _closure(graph, [(graph.starts[rule],)], rules)
    if first is None or () in first:
        return None
    if sum(high + 1 - low for low, high, _ in _edges(graph, first)) < LEAST_BYTES:
        return None
    numbers, rows, found = {first: 0}, [], [first]
    for state in found:
        edges = _edges(graph, state)
        row = np.full(256, -2, np.int16)
        cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        for low, end in itertools.pairwise(cuts):
            items = [item for a, b, item in edges if a <= low <= b]
            if not items:
                continue
            after = _closure(graph, items, rules)
            if after is None:
                return None
            if () in after:
                if len(after) > 1:
                    return None
                row[low:end] = -1
                continue
            if after not in numbers:
                numbers[after] = len(found)
                found.append(after)
            row[low:end] = numbers[after]
        rows.append(row)
        if len(found) > MOST_STATES:
            return None
    moves = np.stack([*rows, *np.full((2, 256), -2, np.int16)])
    moves[moves < 0] += len(moves)
    return Body(moves, frozenset(rules))


def _edges(graph: RuleGraph, state: frozenset[_Item]) -> list[tuple[int, int, _Item]]:
    return [
        (low, high, (target, *item[1:]))
        for item in state
        if item
        for low, high, target in graph.edges[item[0]]
    ]


def _closure(graph: RuleGraph, items: list[_Item], rules: set[int]) -> frozenset[_Item] | None:
    """Where positions lead without a byte; `()` is the end of a text. None: too far."""
    seen, pending = set(items), [*items]

    def add(item: _Item) -> None:
        if item not in seen:
            seen.add(item)
            pending.append(item)

    while pending:
        item = pending.pop()
        if not item:
            continue
        node, *outer = item
        for (target,) in graph.steps[node]:
            add((target, *outer))
        for called, back in graph.calls[node]:
            rules.add(called)
            add((graph.starts[called], back, *outer))
        if node in graph.ends:
            add(tuple(outer))
        if len(seen) > MOST_ITEMS or len(item) > MOST_DEPTH:
            return None
    # What no byte leads on from is left out.
    return frozenset(item for item in seen if not item or graph.edges[item[0]])
