"""The rules of a grammar by their nodes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.room.rules import RoomRules


class _Rows(dict[int, list[tuple[int, ...]]]):
    """What leads on from each node, read when it is asked for.

    Args:
        part: int32 `(n, width)`, by the node in the first column, which is left out.
        nodes: How many there are.
    """

    def __init__(self, part: npt.NDArray[np.int32], nodes: int) -> None:
        super().__init__()
        self._part = part
        self._bounds: list[int] = np.searchsorted(part[:, 0], np.arange(nodes + 1)).tolist()

    def __missing__(self, node: int) -> list[tuple[int, ...]]:
        first, end = self._bounds[node : node + 2]
        found = self[node] = [tuple(row) for row in self._part[first:end, 1:].tolist()]
        return found


class RuleGraph:
    """The rules of a grammar by their nodes.

    Attributes:
        starts: Of each rule, its first node.
        ends: The rule that ends at a node.
        rule_of: Of each node.
        edges: What leads on from a node by a byte: first and last byte, target.
        steps: Without one: the target.
        calls: By a rule: it, and where it goes on behind that.
    """

    def __init__(self, rules: RoomRules) -> None:
        nodes = len(rules.rests)
        self.starts: list[int] = rules.starts.tolist()
        self.ends = {node: rule for rule, node in enumerate(rules.ends.tolist())}
        before = np.searchsorted(rules.starts, np.arange(nodes), side="right")
        self.rule_of: list[int] = (before - 1).tolist()
        self.edges, self.steps = _Rows(rules.edges, nodes), _Rows(rules.steps, nodes)
        self.calls = _Rows(rules.calls, nodes)
        self._onward: dict[int, int] = {}

    def leads_on(self, node: int) -> bool:
        """Whether anything leads on from a node."""
        return bool(self.edges[node] or self.steps[node] or self.calls[node])

    def onward(self, node: int) -> int:
        """The last of the nodes to which one alone leads, and without a byte."""
        found = self._onward.get(node)
        if found is None:
            found, seen = node, {node}
            while len(self.steps[found]) == 1 and found not in self.ends:
                ((after,),) = self.steps[found]
                if self.edges[found] or self.calls[found] or after in seen:
                    break
                found = after
                seen.add(found)
            self._onward[node] = found
        return found
