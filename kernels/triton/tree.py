"""Draft trees: one program a tree, which fits in registers."""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels.tree import Accepted, Tree
from overlap_spec.kernels.triton.launch import launch, power_of_two


@triton.jit
def _rerank(scores, out, candidates, count, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    inside = index < candidates
    score = tl.load(scores + row * row_stride + index, mask=inside, other=-float("inf"))
    rank = tl.zeros([SIZE], tl.int32)
    for begin in range(0, SIZE, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        there = other < candidates
        rival = tl.load(scores + row * row_stride + other, mask=there, other=-float("inf"))
        earlier = other[None, :] < index[:, None]
        ahead = (rival[None, :] > score[:, None]) | ((rival[None, :] == score[:, None]) & earlier)
        rank += tl.sum((ahead & there[None, :]).to(tl.int32), 1)
    kept = inside & (rank < count)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    # NaN ranks before all and may keep too many: never write past the row.
    tl.store(out + row * count + place, index.to(tl.int64), mask=kept & (place < count))


def rerank(scores: Tensor, count: int) -> Tensor:
    """See :func:`overlap_spec.kernels.rerank`."""
    batch, candidates = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    count = min(count, candidates)
    out = torch.empty(batch, count, dtype=torch.int64, device=scores.device)
    size = power_of_two(candidates)
    launch(
        _rerank, (batch,), scores, out, candidates, count, scores.stride(0),
        SIZE=size, BLOCK=min(size, 16), num_warps=8 if size > 256 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _build_tree(
    root, tokens, parents, all_tokens, all_parents, child, sibling, depths, ancestors,
    token_row, parent_row, depth, NODES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, SIZE)
    inside = node < NODES
    drafted = inside & (node > 0)
    here = tree * NODES + node
    token = tl.load(tokens + tree * token_row + node - 1, mask=drafted, other=0)
    token = tl.where(node == 0, tl.load(root + tree), token)
    parent = tl.load(parents + tree * parent_row + node - 1, mask=drafted, other=-1)
    parent = tl.where(drafted, parent, -1).to(tl.int32)
    tl.store(all_tokens + here, token, mask=inside)
    tl.store(all_parents + here, parent.to(tl.int64), mask=inside)

    other = node[None, :]
    above = other == node[:, None]
    climber = parent
    for _ in range(depth):
        above = above | (other == climber[:, None])
        up = tl.load(parents + tree * parent_row + climber - 1, mask=climber > 0, other=-1)
        climber = up.to(tl.int32)
    square = inside[:, None] & inside[None, :]
    above = above & square
    flat = (tree * NODES + node)[:, None] * NODES + other
    tl.store(ancestors + flat, above.to(tl.uint8), mask=square)
    tl.store(depths + here, (tl.sum(above.to(tl.int32), 1) - 1).to(tl.int64), mask=inside)

    # Node numbers along rows here, those looked for along columns.
    column_parent = tl.load(
        parents + tree * parent_row + other - 1, mask=(other > 0) & (other < NODES), other=-2
    ).to(tl.int32)
    first = tl.min(tl.where(column_parent == node[:, None], other, SIZE), 1)
    later = (column_parent == parent[:, None]) & (other > node[:, None])
    following = tl.min(tl.where(later, other, SIZE), 1)
    tl.store(child + here, tl.where(first < SIZE, first, -1).to(tl.int64), mask=inside)
    tl.store(sibling + here, tl.where(following < SIZE, following, -1).to(tl.int64), mask=inside)


def build_tree(root: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> Tree:
    """See :func:`overlap_spec.kernels.build_tree`."""
    batch, drafted = tokens.shape
    nodes = drafted + 1
    made = torch.empty(5, batch, nodes, dtype=torch.int64, device=root.device)
    ancestors = torch.empty(batch, nodes, nodes, dtype=torch.bool, device=root.device)
    tokens, parents = tokens.contiguous(), parents.contiguous()
    size = power_of_two(nodes)
    launch(
        _build_tree, (batch,),
        root.contiguous(), tokens, parents, *made.unbind(), ancestors.view(torch.uint8),
        tokens.stride(0), parents.stride(0), depth,
        NODES=nodes, SIZE=size, num_warps=4 if size > 32 else 1,
    )  # fmt: skip
    return Tree(made[0], made[1], made[2], made[3], made[4], ancestors)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


@triton.jit
def _accept_path(
    targets, tokens, parents, depths, limits, lengths, path, bonus,
    target_row, token_row, parent_row, depth_row, width,
    LIMITED: tl.constexpr, NODES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, SIZE)
    inside = node < NODES
    token = tl.load(tokens + tree * token_row + node, mask=inside, other=0)
    parent = tl.load(parents + tree * parent_row + node, mask=inside, other=-1)
    open_to = inside & (node > 0)
    if LIMITED:
        depth = tl.load(depths + tree * depth_row + node, mask=inside, other=0)
        open_to = open_to & (depth <= tl.load(limits + tree))
    at = tl.full((), 0, tl.int64)
    length = tl.full((), 0, tl.int64)
    target = tl.load(targets + tree * target_row)
    tl.store(path + tree * width, at)
    for step in range(1, width):
        matching = open_to & (parent == at) & (token == target)
        found = tl.min(tl.where(matching, node, SIZE), 0)
        # Where a path has ended nothing ever matches again.
        going = found < SIZE
        length += tl.where(going, 1, 0)
        at = tl.where(going, found.to(tl.int64), at)
        target = tl.load(targets + tree * target_row + at)
        tl.store(path + tree * width + step, at)
    tl.store(lengths + tree, length)
    tl.store(bonus + tree, target)


def accept_path(targets: Tensor, tree: Tree, width: int, limits: Tensor | None = None) -> Accepted:
    """See :func:`overlap_spec.kernels.accept_path`; behind its end a path repeats its last node."""
    batch, nodes = tree.tokens.shape
    device = targets.device
    lengths = torch.empty(batch, dtype=torch.int64, device=device)
    bonus = torch.empty_like(lengths)
    path = torch.empty(batch, width, dtype=torch.int64, device=device)
    # A chain's links are one row for all requests: a view that needs no copy.
    targets, tokens, parents, depths = map(
        _dense_rows, (targets, tree.tokens, tree.parents, tree.depths)
    )
    size = power_of_two(nodes)
    launch(
        _accept_path, (batch,),
        targets, tokens, parents, depths, depths if limits is None else limits.contiguous(),
        lengths, path, bonus,
        targets.stride(0), tokens.stride(0), parents.stride(0), depths.stride(0), width,
        LIMITED=limits is not None, NODES=nodes, SIZE=size, num_warps=1 if size <= 64 else 4,
    )  # fmt: skip
    return Accepted(lengths, path, bonus)
