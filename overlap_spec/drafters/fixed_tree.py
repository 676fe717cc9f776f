"""What a tree of a fixed shape needs to be grown level by level."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Level(NamedTuple):
    """The inner nodes of one depth, and their children; int64 unless said otherwise.

    Attributes:
        nodes ``(m,)``: which children of the level before they are.
        above ``(m,)``: their parents among that level's inner nodes.
        seen: bool ``(m, W)``: which of all inner nodes up to here, the root not counted, each one
            sees: its ancestors and itself.
        most: The most children that one of them has.
        owner, rank ``(c,)``: of each child, its parent among ``nodes`` and its place there.
    """

    nodes: Tensor
    above: Tensor
    seen: Tensor
    most: int
    owner: Tensor
    rank: Tensor


class Shape(NamedTuple):
    """A tree's levels from the root's on; in node order ``parents (M,)`` and, among the children
    of all levels, each node's place ``order (M,)``: int64."""

    levels: tuple[Level, ...]
    parents: Tensor
    order: Tensor


@cache
def shape_of(parents: tuple[int, ...], device: torch.device) -> Shape:
    """The shape of a tree whose node n + 1 has the parent ``parents[n]``; 0 is the root.

    Its tensors are made once: a recording cannot bring numbers from the host.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, 1):
        children.setdefault(parent, []).append(node)
    above = [0, *parents]
    levels: list[Level] = []
    listed: list[int] = []
    # Places of the inner nodes that are an inner node's ancestors, and its own.
    path: dict[int, list[int]] = {0: []}
    inner, before, candidates = [0], [0], [0]
    grown = 0
    while inner:
        if levels:
            for place, node in enumerate(inner, grown):
                path[node] = [*path[above[node]], place]
            grown += len(inner)
        seen = torch.zeros(len(inner), grown, dtype=torch.bool)
        for row, node in enumerate(inner):
            seen[row, path[node]] = True
        born = [(row, rank, n) for row, x in enumerate(inner) for rank, n in enumerate(children[x])]
        levels.append(
            Level(
                torch.tensor([candidates.index(node) for node in inner], device=device),
                torch.tensor([before.index(above[node]) for node in inner], device=device),
                seen.to(device),
                1 + max(rank for _, rank, _ in born),
                torch.tensor([row for row, _, _ in born], device=device),
                torch.tensor([rank for _, rank, _ in born], device=device),
            )
        )
        before, candidates = inner, [node for _, _, node in born]
        listed += candidates
        inner = [node for node in candidates if node in children]
    order = torch.tensor(listed).argsort()
    return Shape(tuple(levels), torch.tensor(parents, device=device), order.to(device))
