"""A grammar's rules over bytes, with the fewest bytes from each place in a rule to its end.

Made in a worker, read in the engine's process. The fewest bytes are a least fixpoint over the rules
(D. E. Knuth, "A generalization of Dijkstra's algorithm", 1977): exact, also where rules call each
other in circles.
"""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.charset import intersect
from overlap_spec.grammar.automata.regex_ast import (
    CharClass,
    Node,
    Ref,
    Repetition,
    alternate,
    mapped,
)
from overlap_spec.grammar.ir.network import Network
from overlap_spec.grammar.ir.reach import ENDLESS, Thinking
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth

Ints = npt.NDArray[np.int32]
# Larger grammars are not followed.
MOST_NODES = 60_000
# A body that may be repeated more often is a rule of its own.
MOST_COPIES = 4
# The rule of a text that thinks first: no rule is named so.
THINKING = ""
LAST_ASCII = 0x7F
ASCII, OTHERS = ((0, LAST_ASCII),), ((LAST_ASCII + 1, 0x10FFFF),)
_WIDTHS = (4, 2, 3, 1, 1, 1, 1)


class RoomRules(NamedTuple):
    """A grammar; nodes and rules are numbers, and rule 0 is the start. The nodes of a rule are
    those from its start to before the next one's.

    Attributes:
        edges: int32 `(E, 4)`: node, first and last byte, target.
        steps: int32 `(S, 2)`: node, target, without a byte.
        calls: int32 `(C, 3)`: node, called rule, and where it goes on behind that.
        starts: int32 `(R,)`: the first node of each rule.
        ends: int32 `(R,)`: the node at which it ends.
        nullable: int32 `(R,)`: 1 where it matches the empty text.
        rests: int32 `(N,)`: fewest bytes from each node to its rule's end.
    """

    edges: Ints
    steps: Ints
    calls: Ints
    starts: Ints
    ends: Ints
    nullable: Ints
    rests: Ints

    def to_bytes(self) -> bytes:
        """What :meth:`from_bytes` reads."""
        sizes = np.array([len(part) for part in self], np.int32)
        return zlib.compress(b"".join(part.tobytes() for part in (sizes, *self)), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> RoomRules:
        """The rules that :meth:`to_bytes` wrote.

        Raises:
            ValueError: they name nodes or rules that there are not.
        """
        try:
            read = zlib.decompressobj().decompress(data, 64 * MOST_NODES * len(_WIDTHS))
            whole = np.frombuffer(read, np.int32)
            sizes = whole[: len(_WIDTHS)]
            bounds = np.cumsum([len(_WIDTHS), *(sizes * _WIDTHS)])
            if (sizes < 0).any() or bounds[-1] != len(whole):
                raise ValueError("their parts have other sizes")
            parts = [whole[a:b] for a, b in pairwise(bounds)]
            found = cls(
                *(p.reshape(-1, w) if w > 1 else p for p, w in zip(parts, _WIDTHS, strict=True))
            )
        except (zlib.error, ValueError) as error:
            raise ValueError(f"not the rules of a grammar: {error}") from None
        nodes, rules = len(found.rests), len(found.starts)
        named = (found.edges[:, (0, 3)], found.steps, found.calls[:, (0, 2)], found.ends)
        if not (
            all(((part >= 0) & (part < nodes)).all() for part in named)
            and ((found.calls[:, 1] >= 0) & (found.calls[:, 1] < rules)).all()
            and rules == len(found.ends) == len(found.nullable) > 0
            and found.starts[0] == 0
            and (np.diff(found.starts) > 0).all()
            and found.starts[-1] < nodes
        ):
            raise ValueError("not the rules of a grammar: they name what is not there")
        return found


@bounded_depth()
def room_rules(
    syntax: Syntax, thinking: Thinking | None = None, most_nodes: int = MOST_NODES
) -> RoomRules:
    """The rules of a grammar.

    Raises:
        GrammarError: it is too large.
    """
    syntax = _shared(syntax)
    network, names = Network(most_nodes), {name: i for i, name in enumerate(syntax.rules)}
    starts: list[int] = []
    ends: list[int] = []
    nullable = [name in syntax.nullable for name in names]
    if thinking is not None:
        names = {THINKING: 0} | {name: i + 1 for name, i in names.items()}
        nullable.insert(0, bool(thinking.begin) and nullable[0])
        starts.append(network.node())
        ends.append(_think(network, thinking, starts[0], next(iter(syntax.rules))))
    for body in syntax.rules.values():
        starts.append(network.node())
        ends.append(network.add_whole(body, starts[-1]))
    calls = [
        (node, names[rule], back) for node, each in enumerate(network.calls) for rule, back in each
    ]
    edges = [(node, *edge) for node, each in enumerate(network.bytes) for edge in each]
    steps = [(node, target) for node, each in enumerate(network.steps) for target in each]
    rests = _rests(network, names, starts, ends)
    if rests[0] >= ENDLESS:
        raise GrammarError("the grammar allows no finite text")
    return RoomRules(
        np.array(edges, np.int32).reshape(-1, 4),
        np.array(steps, np.int32).reshape(-1, 2),
        np.array(calls, np.int32).reshape(-1, 3),
        np.array(starts, np.int32),
        np.array(ends, np.int32),
        np.array(nullable, np.int32),
        np.array(rests, np.int32),
    )


def _shared(syntax: Syntax) -> Syntax:
    """The same grammar with the large parts that stand in many places in rules of their own."""
    parts: dict[Node, Ref] = {}
    unread: list[Node] = []

    def ref(node: Node) -> Ref:
        if node not in parts:
            # No rule is named so.
            parts[node] = Ref(f"\0{len(parts)}")
            unread.append(node)
        return parts[node]

    def fold(node: Node) -> Node:
        if isinstance(node, CharClass) and node.members and node.members[-1][1] > LAST_ASCII:
            short, long = intersect(node.members, ASCII), intersect(node.members, OTHERS)
            return alternate(CharClass(short), ref(CharClass(long))) if short else ref(node)
        if isinstance(node, Repetition):
            often = node.most is None or max(node.least, node.most) > MOST_COPIES
            body = ref(node.body) if often and not isinstance(node.body, Ref) else fold(node.body)
            return Repetition(body, node.least, node.most)
        return mapped(node, fold)

    rules = {name: fold(body) for name, body in syntax.rules.items()}
    while unread:
        node = unread.pop()
        name, body = parts[node].name, fold(node)
        # Characters of several bytes alone stay what they are.
        rules[name] = node if body == parts[node] else body
    return Syntax(rules)


def _think(network: Network, thinking: Thinking, start: int, root: str) -> int:
    """Add the rule of a text that thinks before its grammar; returns its end node.

    Bytes of the thinking need not be characters, so that it is no expression.
    """
    marker, last = thinking.end, network.node()
    # One for each length of the marker that was read last (Knuth, Morris and Pratt, 1977).
    read = [network.node() for _ in range(len(marker) + 1)]
    for size, node in enumerate(read[:-1]):
        for byte in range(256):
            text = marker[:size] + bytes((byte,))
            longest = next(n for n in range(len(text), -1, -1) if text.endswith(marker[:n]))
            network.bytes[node].append((byte, byte, read[longest]))
    if thinking.begin:
        network.calls[start].append((root, last))
    else:
        network.steps[start].append(read[0])
    here = start
    for at, byte in enumerate(thinking.begin):
        after = read[0] if at == len(thinking.begin) - 1 else network.node()
        network.bytes[here].append((byte, byte, after))
        here = after
    here = read[-1]
    for count in range(thinking.most_gap + 1):
        network.calls[here].append((root, last))
        for byte in thinking.gap if count < thinking.most_gap else b"":
            after = network.node()
            network.bytes[here].append((byte, byte, after))
            here = after
    return last


def _rests(
    network: Network, names: dict[str, int], starts: list[int], ends: list[int]
) -> list[int]:
    """Fewest bytes from each node to its rule's end."""
    leads: list[list[tuple[int, int, int]]] = []
    for each, steps, calls in zip(network.bytes, network.steps, network.calls, strict=True):
        targets = {target for _, _, target in each}
        leads.append([(1, target, -1) for target in targets])
        leads[-1] += [(0, target, -1) for target in steps]
        leads[-1] += [(0, back, starts[names[rule]]) for rule, back in calls]
    # What a node leads to before it: one pass does, except for circles.
    order: list[int] = []
    seen = [False] * len(leads)
    pending = [*starts]
    while pending:
        node = pending.pop()
        if node < 0:
            order.append(~node)
        elif not seen[node]:
            seen[node] = True
            pending.append(~node)
            for _, target, called in leads[node]:
                pending.append(target)
                if called >= 0:
                    pending.append(called)
    rests = [ENDLESS] * (len(leads) + 1)
    for end in ends:
        rests[end] = 0
    # Of no call.
    rests[-1] = 0
    grown = True
    while grown:
        grown = False
        for node in order:
            for cost, target, called in leads[node]:
                rest = cost + rests[target] + rests[called]
                if rest < rests[node]:
                    rests[node], grown = rest, True
    return rests[:-1]
