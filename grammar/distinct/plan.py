"""Where items and keys must differ, for the matcher that looks at them.

No context-free grammar knows what a text has said before. So rules let equal items through, and
`matcher` refuses them; this file tells it where. Where some array has a rest that is
fixed values alone, its rules count them (`arrays.py`), and nothing is left to look at.

The matcher refuses a text from which only repeated items can follow. It finds these by the texts
of the items so far, so equal items must be written alike, or their values never run out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec

from overlap_spec.grammar.distinct.text import Node
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.intersect import member, names_of
from overlap_spec.grammar.lowering.resolver import Resolver
from overlap_spec.grammar.lowering.shapes import ANY, Arrays, Consts, Expr, Objects, Shape
from overlap_spec.grammar.lowering.values import Values
from overlap_spec.grammar.schemas.source import json_path, key_of, loads

_MOST_NODES = 2000
_FIRST_BYTES = {"array": b"[", "object": b"{", "string": b'"'}


class DistinctPlan:
    """Makes the nodes of a document.

    Args:
        free: The values that the free keys of an object may have.
        in_rules: Whether an array's rules keep its items apart.
        keys_count: Whether equal keys would make an object's count wrong.
    """

    def __init__(
        self,
        resolver: Resolver,
        free: Callable[[Objects, str], Iterable[Expr]],
        in_rules: Callable[[Arrays], bool],
        keys_count: Callable[[Objects], bool],
    ) -> None:
        self._resolver, self._values = resolver, Values(resolver)
        self._free, self._in_rules, self._keys_count = free, in_rules, keys_count
        self._nodes = [Node()]
        self._known: dict[frozenset[Expr], int] = {frozenset((ANY,)): 0, frozenset(): 0}

    def of(self, expr: Expr) -> list[Node]:
        """The nodes from an expression on; empty if there is nothing to look at.

        Raises:
            Refusal: an array may or may not want its items to differ.
        """
        self._node((expr,), "$")
        live = {
            i for i, node in enumerate(self._nodes) if node.distinct_items or node.distinct_keys
        }
        while True:
            more = {i for i, n in enumerate(self._nodes) if i not in live and live & _inside(n)}
            if not more:
                break
            live |= more
        if not live:
            return []
        # To nodes that lead nowhere there is no way.
        left_out = dict.fromkeys(set(range(len(self._nodes))) - live, 0)
        for node in self._nodes:
            node.items = [left_out.get(to, to) for to in node.items]
            node.named = {name: left_out.get(to, to) for name, to in node.named.items()}
            node.rest, node.other = (left_out.get(to, to) for to in (node.rest, node.other))
        return self._nodes

    def _node(self, exprs: Iterable[Expr], path: str) -> int:
        key = frozenset(exprs)
        if key in self._known:
            return self._known[key]
        if len(self._nodes) > _MOST_NODES:
            raise keywords.refusal("uniqueItems", path, "stands in too many places")
        number = self._known[key] = len(self._nodes)
        node = Node()
        self._nodes.append(node)
        shapes = [shape for expr in key for shape in self._resolver.written(expr)]
        self._array(node, shapes, path)
        self._object(node, [shape for shape in shapes if isinstance(shape, Objects)], path)
        return number

    def _array(self, node: Node, shapes: list[Shape], path: str) -> None:
        arrays = [shape for shape in shapes if isinstance(shape, Arrays)]
        many = [shape for shape in arrays if shape.most is None or shape.most > 1]
        node.distinct_items = any(shape.unique and not self._in_rules(shape) for shape in many)
        if node.distinct_items and not (all(s.unique for s in many) and _differ(shapes)):
            reason = "beside another way to be an array that does not want it is not supported"
            raise keywords.refusal("uniqueItems", path, reason)
        length = max((len(shape.prefix) for shape in arrays), default=0)
        places = [
            [shape.prefix[i] if i < len(shape.prefix) else shape.rest for shape in arrays]
            for i in range(length)
        ]
        rest = [shape.rest for shape in arrays if shape.most != len(shape.prefix)]
        node.items = [
            self._node(exprs, json_path(path, "prefixItems", i)) for i, exprs in enumerate(places)
        ]
        node.rest = self._node(rest, json_path(path, "items"))
        if node.distinct_items:
            items = [expr for exprs in (*places, rest) for expr in exprs]
            found = [shape for expr in items for shape in self._resolver.written(expr)]
            node.endless = b"".join(
                first
                for kind, first in _FIRST_BYTES.items()
                if all(self._values.shape_is_infinite(s) for s in found if s.kind == kind)
            )
            node.exhaustible = not all(map(self._values.infinite, items))

    def _object(self, node: Node, objects: list[Objects], path: str) -> None:
        node.distinct_keys = any(map(self._keys_count, objects))
        names = dict.fromkeys(name for shape in objects for name in names_of(shape))
        for name in names:
            exprs = [member(shape, name, self._resolver) for shape in objects]
            node.named[name] = self._node(exprs, json_path(path, "properties", name))
        here = json_path(path, "additionalProperties")
        others = (expr for shape in objects for expr in self._free(shape, path))
        node.other = self._node(others, here)


def _inside(node: Node) -> set[int]:
    return {*node.items, node.rest, *node.named.values(), node.other}


def _differ(shapes: Iterable[Shape]) -> bool:
    """Whether all fixed arrays have different items."""
    for shape in shapes:
        if isinstance(shape, Consts) and shape.kind == "array":
            for _, text in shape.values:
                keys = sorted(map(key_of, loads(text)))
                if any(left == right for left, right in pairwise(keys)):
                    return False
    return True


def of_objects() -> list[Node]:
    """The plan of any JSON object that repeats no key at any depth."""
    return [Node(), Node(distinct_keys=True, rest=1, other=1)]


def packed(nodes: list[Node], blanks: bool) -> bytes:
    """What `matcher.wrap` reads; nothing if there are no nodes."""
    return msgspec.msgpack.encode((blanks, nodes)) if nodes else b""
