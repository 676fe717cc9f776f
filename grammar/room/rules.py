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
from overlap_spec.grammar.ir.calls import circles
from overlap_spec.grammar.ir.network import Network
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth

Ints = npt.NDArray[np.int32]
# Larger grammars are not followed.
MOST_NODES = 60_000
# Longer rests are not told apart.
ENDLESS = 2**30
# The rule of a text that thinks first: no rule is named so.
THINKING = ""
_WIDTHS = (4, 2, 3, 1, 1, 1, 1, 1)


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
        growth: int32 `(2,)`: no text of `n` bytes has a shorter rest than the first, and the second
            for each of `n + 1` bytes.
    """

    edges: Ints
    steps: Ints
    calls: Ints
    starts: Ints
    ends: Ints
    nullable: Ints
    rests: Ints
    growth: Ints

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
            and len(found.growth) == len(cls._fields[:2])
        ):
            raise ValueError("not the rules of a grammar: they name what is not there")
        return found


class Thinking(NamedTuple):
    """What stands before a grammar: any bytes up to the first ``end``, then at most ``most_gap``
    times ``gap``. With ``begin`` that is only where the text starts with it."""

    end: bytes
    begin: bytes
    gap: bytes
    most_gap: int


@bounded_depth()
def room_rules(syntax: Syntax, thinking: Thinking | None = None) -> RoomRules:
    """The rules of a grammar.

    Args:
        syntax: In rules alone.
        thinking: What stands before it.

    Raises:
        GrammarError: it is too large.
    """
    network, names = Network(MOST_NODES), {name: i for i, name in enumerate(syntax.rules)}
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
        np.array(_growth(network, names, starts, rests), np.int32),
    )


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
    rests = [ENDLESS] * len(network.bytes)
    for end in ends:
        rests[end] = 0
    grown = True
    while grown:
        grown = False
        # Nodes and rules mostly lead to later ones: one pass does, except for circles.
        for node in range(len(rests) - 1, -1, -1):
            best = rests[node]
            for _, _, target in network.bytes[node]:
                best = min(best, 1 + rests[target])
            for target in network.steps[node]:
                best = min(best, rests[target])
            for rule, back in network.calls[node]:
                best = min(best, rests[starts[names[rule]]] + rests[back])
            if best < rests[node]:
                rests[node], grown = best, True
    return rests


def _growth(
    network: Network, names: dict[str, int], starts: list[int], rests: list[int]
) -> tuple[int, int]:
    """How long a rest can be: a bound, by the longest way down the calls.

    Where rules call each other in a circle, each waits at most once for each byte of the text:
    where one waits twice behind the same byte, the shortest rest leaves out what lies between.
    """
    of_rule = list(names)
    bounds = [*starts, len(rests)]
    # By rule, the rules that it calls, each with the longest rest behind it.
    waits: list[dict[int, int]] = []
    longest: list[int] = []
    for first, end in pairwise(bounds):
        behind: dict[int, int] = {}
        for node in range(first, end):
            for called, back in network.calls[node]:
                if rests[back] < ENDLESS:
                    rule = names[called]
                    behind[rule] = max(behind.get(rule, 0), rests[back])
        waits.append(behind)
        longest.append(max(rest for rest in rests[first:end] if rest < ENDLESS))
    numbers = circles({of_rule[r]: {of_rule[c] for c in calls} for r, calls in enumerate(waits)})
    circle = [numbers[name] for name in of_rule]
    each, deepest = 0, dict.fromkeys(circle, 0)
    members: dict[int, list[int]] = {}
    for rule, number in enumerate(circle):
        members.setdefault(number, []).append(rule)
    # A circle gets its number, by Tarjan's way, before those that it calls, and they end first.
    for number in sorted(members, reverse=True):
        for rule in members[number]:
            deepest[number] = max(deepest[number], longest[rule])
            inner = 0
            for other, rest in waits[rule].items():
                if circle[other] == number:
                    inner = max(inner, rest)
                else:
                    deepest[number] = max(deepest[number], rest + deepest[circle[other]])
            each += inner
    return min(deepest[circle[0]], ENDLESS), min(each, ENDLESS)
