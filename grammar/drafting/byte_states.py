"""A grammar's states by bytes, for drafts: what may come next, without a matcher and on any device.

The rules are unrolled into a table of moves, breadth first by how deep rules stand in each other,
until a limit: what lies behind is :data:`LOST`, where everything may come. Of rules that call each
other in a circle it is forgotten how often they did. High counts are loops, and texts that a token
leaves out are in it. So a table allows all that its grammar does, and more: what it forbids need
not be drafted, and what it forces is forced. Masks decide, as ever.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.dfa import reached
from overlap_spec.grammar.drafting.state_table import StateTable
from overlap_spec.grammar.ir.calls import Call, Calls
from overlap_spec.grammar.ir.network import Bytes, Closures, Network, merged
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.steps import COMMON_STATES, FEW_TOKENS

MOST_STATES, MOST_NODES = 2048, 20_000
# Rows of the states that every table has, before its own.
LOST, DEAD = 0, 1
# A count above it is a loop.
MOST_COUNT = 4
# Rules within rules, and places in rules at once, beyond which a state is LOST.
DEEPEST, MOST_PLACES = 32, 256
# Bytes that may come next in a state that has few tokens.
MOST_WAYS = 8
# Behind all texts that begin as one before it.
HIGHEST = b"\xff" * 64

# A node of the network, and the number of a stack of those to which its rules return.
Place = tuple[int, int]
State = frozenset[Place]
# Of a text that may end; of a place that was not looked at.
END: Place = -1, 0
UNKNOWN: State = frozenset(((-2, 0),))


def byte_states(grammar: Grammar, vocabulary: Vocabulary) -> StateTable:
    """The table of a grammar.

    Raises:
        GrammarError: it has no rules, or rules that are too large.
    """
    with bounded_depth():
        return _Unrolled(lower(grammar).loops).table(vocabulary)


class _Frame(NamedTuple):
    """A rule that goes on behind a call, the stack below it, and how deep both are.

    With no ``call`` it stands for any number of calls of one circle.
    """

    call: Call | None
    below: int
    depth: int
    circle: int


class _Near(NamedTuple):
    """Nodes with bytes, calls, and rules that end."""

    bytes: list[int]
    calls: list[Call]
    ended: list[str]


class _Unrolled:
    """Sets of places in rules, each with the places to which its rules return."""

    def __init__(self, syntax: Syntax) -> None:
        self.network = network = Network(MOST_NODES, MOST_COUNT)
        self.starts = {name: network.node() for name in syntax.rules}
        # The rule of each node; of its end alone, the rule that ends there.
        owners = list(syntax.rules)
        self.ends: dict[int, str] = {}
        for name, node in self.starts.items():
            self.ends[network.add(syntax.rules[name], node)] = name
            owners += [name] * (len(network.calls) - len(owners))
        self._calls = Calls(network, owners, frozenset(self.ends))
        self._moves_of = cache(Closures(network).moves)
        # By number: what a rule returns to.
        self._stacks = [_Frame(None, -1, 0, -1)]
        self._numbers: dict[tuple[int, int], int] = {}
        self._known: dict[Place, State | None] = {}
        self._known_near: dict[int, _Near] = {}

    def table(self, vocabulary: Vocabulary) -> StateTable:
        """Number the states, the least deep first, as many as the limits allow."""
        start = self._closed(frozenset(((self.starts["root"], 0),)))
        numbers: dict[State | None, int] = {None: LOST}
        order: list[State] = []
        waiting: list[tuple[int, int, State]] = []

        def number(state: State | None) -> int:
            if state is not None and state not in numbers:
                if len(order) >= MOST_STATES:
                    return LOST
                numbers[state] = COMMON_STATES + len(order)
                order.append(state)
                depth = max((self._stacks[stack].depth for _, stack in state), default=0)
                heapq.heappush(waiting, (depth, len(order), state))
            return numbers[state]

        if number(start) == LOST:
            raise GrammarError("its rules are too deep or too many for a table of states")
        moves = np.full((MOST_STATES, 256), DEAD, np.uint16)
        while waiting:
            _, count, state = heapq.heappop(waiting)
            row = moves[count - 1]
            for members, targets in self._moves(state):
                row[_bytes_of(members)] = number(self._closed(targets))
        count = len(order)
        moves = moves[:count].copy()
        final = np.array([END in state for state in order], bool)
        return StateTable.of(moves, final, _few(moves, vocabulary))

    def _moves(self, state: State) -> list[tuple[Bytes, State]]:
        """Disjoint sets of bytes, each with its target places."""
        by_stack: dict[int, list[int]] = {}
        for node, stack in state:
            if node >= 0:
                by_stack.setdefault(stack, []).append(node)
        found: list[tuple[Bytes, State]] = []
        for stack, nodes in by_stack.items():
            mine = [
                (members, frozenset((n, stack) for n in targets))
                for members, targets in self._moves_of(frozenset(nodes))
            ]
            found = merged(found, mine) if found else mine
        return found

    def _closed(self, places: State) -> State | None:
        """Places with bytes, or ends, reached without a byte; None: too many or too deep."""
        found: State = frozenset()
        for place in places:
            own = self._known.get(place, UNKNOWN)
            if own is UNKNOWN:
                own = self._known[place] = self._reached(place)
            if own is None:
                return None
            found = found | own if found else own
        return found if len(found) <= MOST_PLACES else None

    def _reached(self, place: Place) -> State | None:
        seen, pending = {place}, [place]
        kept: set[Place] = set()
        while pending:
            node, stack = pending.pop()
            near = self._known_near.get(node)
            if near is None:
                near = self._known_near[node] = self._near(node)
            kept.update([(inner, stack) for inner in near.bytes])
            further: list[Place] = []
            for call in near.calls:
                own = self._push(call, stack)
                if own < 0:
                    return None
                further.append((self.starts[call.called], own))
            for rule in near.ended:
                if stack:
                    further += self._returns(rule, stack)
                else:
                    kept.add(END)
            for other in further:
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
            if len(seen) > 8 * MOST_PLACES:
                return None
        return frozenset(kept)

    def _near(self, start: int) -> _Near:
        """What is reached from a node with nothing read and no call to come back from."""
        network, calls = self.network, self._calls
        seen = reached(
            [start],
            lambda node: [
                *network.steps[node],
                *(self.starts[r] for r in calls.tails.get(node, ())),
            ],
        )
        return _Near(
            [node for node in seen if network.bytes[node]],
            [call for node in seen for call in calls.at.get(node, ())],
            [self.ends[node] for node in seen if node in self.ends],
        )

    def _push(self, call: Call, below: int) -> int:
        """The stack with one more call; -1 where it is too deep."""
        top, circle = self._stacks[below], call.circle
        if circle >= 0 and circle == top.circle:
            return below
        # Of all calls of a circle there is one.
        key = (call.back if circle < 0 else -1 - circle, below)
        known = self._numbers.get(key)
        if known is None:
            known = len(self._stacks) if top.depth < DEEPEST else -1
            if known >= 0:
                frame = _Frame(None if circle >= 0 else call, below, top.depth + 1, circle)
                self._stacks.append(frame)
            self._numbers[key] = known
        return known

    def _returns(self, rule: str, stack: int) -> Iterator[Place]:
        """Where a rule may go on that ends with a stack."""
        call, below, _, circle = self._stacks[stack]
        if call is not None:
            yield call.back, below
            return
        first = self._stacks[below].call
        entered = first.called if first is not None else "root" if below == 0 else None
        for other in self._calls.circles[circle]:
            if rule in self._calls.same_end(other.called):
                yield other.back, stack
                if entered is None or other.caller in self._calls.same_end(entered):
                    yield other.back, below


@lru_cache(4096)
def _bytes_of(members: Bytes) -> npt.NDArray[np.intp]:
    bits = np.unpackbits(np.frombuffer(members.to_bytes(32, "little"), np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def _few(moves: npt.NDArray[np.uint16], vocabulary: Vocabulary) -> npt.NDArray[np.int32]:
    """Of each state the tokens with which a text can go on, where these are few."""
    found = np.full((len(moves), FEW_TOKENS + 1), -1, np.int32)
    found[:, -1] = 0
    there = moves != DEAD
    # Of states with few ways alone: each byte, and where it leads.
    ways: list[list[tuple[int, int]] | None] = [None] * len(moves)
    for state in np.flatnonzero(there.sum(1) <= MOST_WAYS).tolist():
        (members,) = np.nonzero(there[state])
        ways[state] = list(zip(members.tolist(), moves[state, members].tolist(), strict=True))
    for state, own in enumerate(ways):
        if own:
            tokens, closed = _tokens_of(ways, state, vocabulary)
            if len(tokens) > FEW_TOKENS:
                half = FEW_TOKENS // 2
                tokens = tokens[:half] + tokens[-half:]
            found[state, : len(tokens)], found[state, -1] = tokens, closed
    return found


def _tokens_of(
    ways: Sequence[list[tuple[int, int]] | None], start: int, vocabulary: Vocabulary
) -> tuple[list[int], bool]:
    """Tokens that can come in a state, and whether these are all."""
    texts, tokens = vocabulary.by_text
    found: list[int] = []
    closed = True
    pending = [(start, b"", 0, len(texts))]
    while pending:
        state, text, low, high = pending.pop()
        # The tokens of this range begin with the text: its own is the first.
        if text and texts[low] == text:
            found.append(tokens[low])
            low += 1
        own = ways[state]
        if low == high:
            continue
        if own is None or len(found) + len(pending) > 4 * FEW_TOKENS:
            closed = False
            continue
        for byte, target in own:
            longer = text + bytes((byte,))
            first = bisect_left(texts, longer, low, high)
            last = bisect_left(texts, longer + HIGHEST, first, high)
            if first < last and target < COMMON_STATES:
                closed = False
            elif first < last:
                pending.append((target - COMMON_STATES, longer, first, last))
    return found, closed
