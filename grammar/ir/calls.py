"""Which rules of a network call which, and where calls go in circles."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from overlap_spec.grammar.automata.dfa import reached
from overlap_spec.grammar.ir.network import Network


class Call(NamedTuple):
    """A call inside a rule: what it calls, the node where it goes on, and the number of the circle
    of rules that both are in, or -1."""

    caller: str
    called: str
    back: int
    circle: int


class Calls:
    """The calls of a network.

    Attributes:
        at: The calls of each node, without those that nothing can follow.
        tails: Of each node, the rules that it calls with nothing behind: their end is its rule's.
        circles: By number, the calls of a circle.

    Raises:
        RecursionError: rules call each other too deep.
    """

    def __init__(self, network: Network, owners: list[str], ends: frozenset[int]) -> None:
        self._network, self._ends = network, ends
        self._ending: dict[int, bool] = {}
        self.at: dict[int, list[Call]] = {}
        self.tails: dict[int, list[str]] = {}
        self.circles: dict[int, list[Call]] = {}
        self._tails_of: dict[str, set[str]] = {}
        self._same_end: dict[str, frozenset[str]] = {}
        calling = [(node, calls) for node, calls in enumerate(network.calls) if calls]
        callees: dict[str, set[str]] = {}
        for node, calls in calling:
            callees.setdefault(owners[node], set()).update(called for called, _ in calls)
        circle_of = circles(callees)
        for node, calls in calling:
            caller = owners[node]
            for called, back in calls:
                if self.is_end(back):
                    self.tails.setdefault(node, []).append(called)
                    self._tails_of.setdefault(caller, set()).add(called)
                    continue
                circle = circle_of[caller] if circle_of[caller] == circle_of[called] else -1
                call = Call(caller, called, back, circle)
                self.at.setdefault(node, []).append(call)
                if circle >= 0:
                    self.circles.setdefault(circle, []).append(call)

    def same_end(self, rule: str) -> frozenset[str]:
        """The rules whose end can be the end of a rule: itself, and those it calls last."""
        found = self._same_end.get(rule)
        if found is None:
            ends = reached([rule], lambda name: self._tails_of.get(name, ()))
            found = self._same_end[rule] = frozenset(ends)
        return found

    def is_end(self, node: int) -> bool:
        """Whether a rule can do nothing but end at a node."""
        found = self._ending.get(node)
        if found is None:
            network = self._network
            self._ending[node] = False
            steps = network.steps[node]
            found = not network.bytes[node] and not network.calls[node]
            found = found and (all(map(self.is_end, steps)) if steps else node in self._ends)
            self._ending[node] = found
        return found


def circles(callees: Mapping[str, Set[str]]) -> dict[str, int]:
    """The number of each rule's circle: of its strongly connected component (Tarjan, 1972), or, of
    a rule that never comes back to itself, one that no other has."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    found: dict[str, int] = {}
    open_rules: list[str] = []

    def visit(rule: str) -> None:
        order[rule] = lowest[rule] = len(order)
        open_rules.append(rule)
        for called in callees.get(rule, ()):
            if called not in order:
                visit(called)
            if called not in found:
                lowest[rule] = min(lowest[rule], lowest[called])
        if lowest[rule] == order[rule]:
            while rule not in found:
                found[open_rules.pop()] = order[rule]

    for rule in callees:
        if rule not in order:
            visit(rule)
    return found
