"""A grammar over bytes: one small automaton per rule, with calls to other rules."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.charset import UTF8_LENGTHS, Ranges
from overlap_spec.grammar.automata.dfa import reached
from overlap_spec.grammar.automata.regex_ast import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Ref,
    Repetition,
)

ByteEdge = tuple[int, int, int]
"""First byte, last byte, target node."""
Bytes = int
"""A set of byte values: bit b is byte b."""
Nodes = frozenset[int]
T = TypeVar("T")


class Network:
    """A graph whose edges are bytes, calls of rules, and epsilon steps. Nodes are numbers.

    Args:
        most_count: Counts above it are treated as unbounded: allows more, and is much smaller.
    """

    def __init__(self, most_nodes: int = 200_000, most_count: int | None = None) -> None:
        self.most_nodes = most_nodes
        self.most_count = most_count
        self.bytes: list[list[ByteEdge]] = []
        self.steps: list[list[int]] = []
        self.calls: list[list[tuple[str, int]]] = []

    def node(self) -> int:
        """A new node.

        Raises:
            GrammarError: the limit is reached.
        """
        if len(self.bytes) >= self.most_nodes:
            raise GrammarError(f"the grammar is larger than {self.most_nodes} byte states")
        self.bytes.append([])
        self.steps.append([])
        self.calls.append([])
        return len(self.bytes) - 1

    def add(self, node: Node, start: int) -> int:
        """Add an expression after a node; returns its end node."""
        if isinstance(node, Concat):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, Repetition):
            return self._repeat(node, start)
        end = self.node()
        if isinstance(node, CharClass):
            self._chars(node.members, start, end)
        elif isinstance(node, Ref):
            self.calls[start].append((node.name, end))
        else:
            assert isinstance(node, Alternation)
            for way in node.ways:
                first = self.node()
                self.steps[start].append(first)
                self.steps[self.add(way, first)].append(end)
        return end

    def add_whole(self, node: Node, start: int) -> int:
        """As `add`, with an end node that has no outgoing edge."""
        end = self.node()
        self.steps[self.add(node, start)].append(end)
        return end

    def _repeat(self, repeat: Repetition, start: int) -> int:
        least, most = repeat.least, repeat.most
        counted = self.most_count
        if counted is not None and (most is None or most > counted):
            least, most = min(least, counted), None
        for _ in range(least):
            start = self.add(repeat.body, start)
        end = self.node()
        self.steps[start].append(end)
        if most is None:
            inner = self.node()
            self.steps[end].append(inner)
            self.steps[self.add(repeat.body, inner)].append(end)
            return end
        for _ in range(most - least):
            inner = self.node()
            self.steps[start].append(inner)
            start = self.add(repeat.body, inner)
            self.steps[start].append(end)
        return end

    def _chars(self, members: Ranges, start: int, end: int) -> None:
        inner: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for low, high in members:
            for spans in utf8_spans(low, high):
                # Equal suffixes of UTF-8 sequences share their nodes.
                for at in range(len(spans) - 1, 0, -1):
                    rest = spans[at:]
                    if rest not in inner:
                        inner[rest] = self.node()
                        self.bytes[inner[rest]].append((*rest[0], inner[rest[1:]]))
                self.bytes[start].append((*spans[0], inner[spans[1:]]))


def merged(
    some: list[tuple[Bytes, frozenset[T]]], others: list[tuple[Bytes, frozenset[T]]]
) -> list[tuple[Bytes, frozenset[T]]]:
    """Both lists of disjoint sets as one, with the targets of both where they overlap."""
    found, rest = [], list(others)
    for members, targets in some:
        left = members
        for at, (theirs, more) in enumerate(rest):
            if both := left & theirs:
                found.append((both, targets | more))
                left &= ~both
                rest[at] = theirs & ~both, more
        if left:
            found.append((left, targets))
    return found + [(theirs, more) for theirs, more in rest if theirs]


class Closures:
    """Subset construction over a network without calls.

    Nodes with epsilon steps only are left out.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.single: dict[int, Nodes] = {}

    def of(self, nodes: Nodes) -> Nodes:
        """The epsilon closure of a set of nodes."""
        return frozenset().union(*(self._one(node) for node in nodes))

    def first(self, node: int) -> Bytes:
        """Bytes that may come next."""
        found = 0
        for inner in self._one(node):
            for low, high, _ in self.network.bytes[inner]:
                found |= _span(low, high)
        return found

    def moves(self, nodes: Nodes) -> list[tuple[Bytes, Nodes]]:
        """Disjoint sets of bytes, each with its target nodes."""
        blocks: list[tuple[Bytes, Nodes]] = []
        by_target: dict[int, Bytes] = {}
        for node in nodes:
            for low, high, target in self.network.bytes[node]:
                by_target[target] = by_target.get(target, 0) | _span(low, high)
        for target, members in by_target.items():
            blocks = merged(blocks, [(members, frozenset((target,)))])
        return blocks

    def _one(self, node: int) -> Nodes:
        if node not in self.single:
            read, steps = self.network.bytes, self.network.steps
            seen = reached([node], steps.__getitem__)
            self.single[node] = frozenset(n for n in seen if read[n] or not steps[n])
        return self.single[node]


@lru_cache(8192)
def utf8_spans(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """The UTF-8 encodings of a range of code points, as products of byte ranges."""
    found: list[tuple[tuple[int, int], ...]] = []
    for first, last in UTF8_LENGTHS:
        if max(low, first) <= min(high, last):
            found += _spans(max(low, first), min(high, last))
    return found


def _spans(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    left, right = chr(low).encode(errors="surrogatepass"), chr(high).encode(errors="surrogatepass")
    for shift in range(6 * (len(left) - 1), 0, -6):
        block = 1 << shift
        # Within one block the leading bytes are equal: only smaller blocks matter.
        if low // block == high // block:
            continue
        if low % block:
            cut = (low // block + 1) * block
            return _spans(low, cut - 1) + _spans(cut, high)
        if (high + 1) % block:
            cut = high // block * block
            return _spans(low, cut - 1) + _spans(cut, high)
    return [tuple(zip(left, right, strict=True))]


def _span(low: int, high: int) -> Bytes:
    return (1 << (high + 1)) - (1 << low)
