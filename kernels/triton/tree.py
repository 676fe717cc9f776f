"""Draft trees: one program a tree, which fits in registers; one a batch where nodes compete."""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels import tree as definitions
from overlap_spec.kernels.dispatch import reference_of
from overlap_spec.kernels.tree import Accepted, Grown, Selected, Tree
from overlap_spec.kernels.triton.filters import key_of, value_of
from overlap_spec.kernels.triton.launch import launch, power_of_two

# What one program selects from, a request's nodes rounded up to a power of two.
SELECTED = 16384
# Keys of nodes: 0 for a dead one, below 2 ** 32 by score, and the roots'.
LOWEST = tl.constexpr(-0x7F800001)
ROOT = tl.constexpr(2**33)
END = tl.constexpr(2**33 + 1)
STEPS = tl.constexpr(34)


@triton.jit
def _rerank(scores, out, candidates, count, row_stride, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    inside = index < candidates
    score = tl.load(scores + row * row_stride + index, mask=inside, other=-float("inf"))
    score = score.to(tl.float32)
    # NaN would rank nowhere and leave places unwritten.
    score = tl.where(score != score, -float("inf"), score)
    # The last score kept: the highest that ``count`` candidates reach. Bisecting its key takes 32
    # sums at most; comparing all with all would take the square of their number.
    low = key_of(tl.full((), -float("inf"), tl.float32), 0).to(tl.int64)
    high = key_of(tl.max(score, 0), 0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((score >= value_of(middle, 0)).to(tl.int32), 0) >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    last = value_of(low, 0)
    room = count - tl.sum((score > last).to(tl.int32), 0)
    tie = score == last
    kept = (score > last) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(out + row * count + place, index.to(tl.int64), mask=kept)


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
        SIZE=size, num_warps=4 if size > 128 else 1,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["score_row", "mask_tree", "mask_row", "width"],
    do_not_specialize_on_alignment=["token", "branch", "best"],
)
def _grow(
    score, added, choices, mask, out_score, token, branch, best, out_mask,
    score_row, mask_tree, mask_row, width,
    TOP: tl.constexpr, MASKED: tl.constexpr, RANKS: tl.constexpr, SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    inside = index < TOP * TOP
    here = tree * (TOP * TOP)
    total = tl.load(score + tree * score_row + index // TOP, mask=inside, other=0.0)
    total += tl.load(added + here + index, mask=inside, other=0.0)
    tl.store(added + here + index, total, mask=inside)

    # Every rank must be somebody's, or a place stays unwritten: NaN ranks last.
    mine = tl.where(inside & (total == total), total, -float("inf"))
    earlier = index[None, :] < index[:, None]
    ahead = (mine[None, :] > mine[:, None]) | ((mine[None, :] == mine[:, None]) & earlier)
    rank = tl.sum(ahead.to(tl.int32), 1)
    place = tl.arange(0, RANKS)
    exists = place < TOP
    holds = rank[None, :] == place[:, None]
    found = tl.sum(tl.where(holds, index[None, :], 0), 1)
    above = found // TOP
    out = tree * TOP + place
    tl.store(out_score + out, tl.sum(tl.where(holds, total[None, :], 0.0), 1), mask=exists)
    tl.store(token + out, tl.load(choices + here + found, mask=exists, other=0), mask=exists)
    tl.store(branch + out, above.to(tl.int64), mask=exists)
    tl.store(best + out, found.to(tl.int64), mask=exists)
    if MASKED:
        column = tl.arange(0, COLUMNS)[None, :]
        seen = mask + tree * mask_tree + above[:, None] * mask_row + column
        flag = tl.load(seen, mask=exists[:, None] & (column < width), other=0)
        flag = tl.where(column < width, flag, (column - width == place[:, None]).to(tl.uint8))
        all_columns = exists[:, None] & (column < width + TOP)
        tl.store(out_mask + out[:, None] * (width + TOP) + column, flag, mask=all_columns)


def grow(score: Tensor, added: Tensor, choices: Tensor, mask: Tensor | None = None) -> Grown:
    """See :func:`overlap_spec.kernels.grow`."""
    batch, k = score.shape
    score = _dense_rows(score)
    made = torch.empty(3, batch, k, dtype=torch.int64, device=score.device)
    out_score = score.new_empty(batch, k)
    old = new = made
    width = tree_stride = row_stride = 0
    out_mask = None
    if mask is not None:
        if mask.stride(2) != 1:
            mask = mask.contiguous()
        width, tree_stride, row_stride = mask.shape[2], mask.stride(0), mask.stride(1)
        out_mask = mask.new_empty(batch, k, width + k)
        old, new = mask.view(torch.uint8), out_mask.view(torch.uint8)
    launch(
        _grow, (batch,),
        score, added, choices, old, out_score, *made.unbind(), new,
        score.stride(0), tree_stride, row_stride, width,
        TOP=k, MASKED=mask is not None, RANKS=power_of_two(k), SIZE=power_of_two(k * k),
        COLUMNS=power_of_two(width + k), num_warps=4 if k > 4 else 1,
    )  # fmt: skip
    return Grown(out_score, made[0], made[1], made[2], out_mask)


@triton.jit
def _sums(x, EACH: tl.constexpr):
    """The sum of each row, or of all of them."""
    total = tl.sum(x, 1, keep_dims=True)
    return total if EACH else tl.sum(total, 0, keep_dims=True)


@triton.jit
def _best(key, count, EACH: tl.constexpr):
    """Which ``count`` entries are first by (key descending, place ascending); keys below 0 never.

    Of each row, or (EACH false) of all rows laid end to end. Bisected as in :func:`_rerank`.
    """
    low = tl.zeros_like(count)
    high = low + END
    for _ in range(STEPS):
        middle = low + (high - low) // 2
        enough = _sums((key >= middle).to(tl.int32), EACH) >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    room = count - _sums((key > low).to(tl.int32), EACH)
    return (key > low) | ((key == low) & (_counted(key == low, EACH) <= room))


@triton.jit
def _counted(flag, EACH: tl.constexpr):
    """How many flags are set up to each one, itself included, in its row or in all of them."""
    flag = flag.to(tl.int32)
    number = tl.cumsum(flag, 1)
    if not EACH:
        rows = tl.sum(flag, 1)
        number += (tl.cumsum(rows, 0) - rows)[:, None]
    return number


@triton.jit(do_not_specialize=["batch", "count"], do_not_specialize_on_alignment=["most"])
def _select_nodes(
    scores, most, pack, kept_scores, batch, count, row_stride,
    MOST: tl.constexpr, NODES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, node = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (row < batch) & (node < NODES)
    place = row.to(tl.int64) * row_stride + node
    score = tl.load(scores + place, mask=inside, other=-float("inf"))
    score = tl.where(score != score, -float("inf"), score)
    # Below 0: no node. 0: a dead one. Then by score, and roots above all.
    key = key_of(score, 0).to(tl.int64) - LOWEST
    key = tl.where(inside, tl.where(node == 0, ROOT, key), -1)
    if MOST:
        bound = tl.load(most + row, mask=row < batch, other=0)
        over = (key > 0) & (node > 0) & (_best(key, bound, True) == 0)
        key = tl.where(over, 0, key)
    live = key > 0
    kept = _best(key, tl.zeros([1, 1], tl.int64) + count, False)
    index = row.to(tl.int64) * NODES + node
    tl.store(pack + _counted(kept, False) - 1, index, mask=kept)
    tl.store(kept_scores + index, tl.where(kept & live, score, -float("inf")), mask=inside)


def select_nodes(scores: Tensor, count: int, most: Tensor | None = None) -> Selected:
    """See :func:`overlap_spec.kernels.select_nodes`."""
    batch, nodes = scores.shape
    rows, size = power_of_two(batch), power_of_two(nodes)
    if rows * size > SELECTED:
        # One program would hold too much; torch's sorts wait for nothing either.
        return reference_of(definitions.select_nodes)(scores, count, most)
    scores = _dense_rows(scores)
    pack = torch.empty(count, dtype=torch.int64, device=scores.device)
    kept = torch.empty(batch, nodes, dtype=torch.float32, device=scores.device)
    launch(
        _select_nodes, (1,),
        scores, pack if most is None else most.contiguous(), pack, kept, batch, count,
        scores.stride(0), MOST=most is not None, NODES=nodes, ROWS=rows, SIZE=size,
        num_warps=min(16, max(1, rows * size // 256)),
    )  # fmt: skip
    return Selected(pack, kept)


@triton.jit(
    do_not_specialize=["token_row", "parent_row", "score_row", "depth"],
    do_not_specialize_on_alignment=[
        "tokens",
        "parents",
        "scores",
        "all_tokens",
        "all_parents",
        "child",
        "sibling",
        "depths",
    ],
)
def _build_tree(
    root, tokens, parents, scores, all_tokens, all_parents, child, sibling, depths, ancestors,
    all_scores, token_row, parent_row, score_row, depth, NODES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, SIZE)
    inside = node < NODES
    drafted = inside & (node > 0)
    here = tree * NODES + node
    token = tl.load(tokens + tree * token_row + node - 1, mask=drafted, other=0)
    token = tl.where(node == 0, tl.load(root + tree), token)
    parent = tl.load(parents + tree * parent_row + node - 1, mask=drafted, other=-1)
    score = tl.load(scores + tree * score_row + node - 1, mask=drafted, other=-float("inf"))
    alive = score > -float("inf")
    parent = tl.where(alive, parent, -1).to(tl.int32)
    score = tl.where(alive, score, tl.where(node == 0, 0.0, -float("inf")))
    tl.store(all_scores + here, score, mask=inside)
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
    column = (other > 0) & (other < NODES)
    column_parent = tl.load(parents + tree * parent_row + other - 1, mask=column, other=-2)
    column_score = tl.load(scores + tree * score_row + other - 1, mask=column, other=0.0)
    # No node's number, and not the -1 of the dead and the root, which have no siblings.
    column_parent = tl.where(column_score > -float("inf"), column_parent, -2).to(tl.int32)
    first = tl.min(tl.where(column_parent == node[:, None], other, SIZE), 1)
    later = (column_parent == parent[:, None]) & (other > node[:, None])
    following = tl.min(tl.where(later, other, SIZE), 1)
    tl.store(child + here, tl.where(first < SIZE, first, -1).to(tl.int64), mask=inside)
    tl.store(sibling + here, tl.where(following < SIZE, following, -1).to(tl.int64), mask=inside)


def build_tree(root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, depth: int) -> Tree:
    """See :func:`overlap_spec.kernels.build_tree`."""
    batch, drafted = tokens.shape
    nodes = drafted + 1
    made = torch.empty(5, batch, nodes, dtype=torch.int64, device=root.device)
    ancestors = torch.empty(batch, nodes, nodes, dtype=torch.bool, device=root.device)
    all_scores = torch.empty(batch, nodes, dtype=torch.float32, device=root.device)
    tokens, parents, scores = tokens.contiguous(), parents.contiguous(), scores.contiguous()
    size = power_of_two(nodes)
    launch(
        _build_tree, (batch,),
        root.contiguous(), tokens, parents, scores, *made.unbind(), ancestors.view(torch.uint8),
        all_scores, tokens.stride(0), parents.stride(0), scores.stride(0), depth,
        NODES=nodes, SIZE=size, num_warps=4 if size > 32 else 1,
    )  # fmt: skip
    return Tree(made[0], made[1], made[2], made[3], made[4], ancestors, all_scores)


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
    """See :func:`overlap_spec.kernels.accept_path`; after its end a path repeats its last node."""
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
