"""Draft trees: choosing nodes (EAGLE-2, arXiv 2406.16858), their links, and the accepted path.

All trees of a batch are rectangles ``(B, N)``; node 0 is the root, parents come before children.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels.dispatch import operation


class Tree(NamedTuple):
    """Trees of ``B`` requests with ``N`` nodes each, on the device.

    ``tokens``, ``parents`` (root: -1), ``first_child``, ``next_sibling`` (none: -1), ``depths``:
    int64 ``(B, N)``. ``ancestors``: bool ``(B, N, N)``, ``[b, i, j]``: j is i or above it.
    ``scores``: float32 ``(B, N)``, summed log-probability of each node's path (root: 0).

    A score of -inf marks a dead node: parent, first child and next sibling are -1, depth is 0, no
    link leads to it, and it is never accepted. It keeps its place and its token.
    """

    tokens: Tensor
    parents: Tensor
    first_child: Tensor
    next_sibling: Tensor
    depths: Tensor
    ancestors: Tensor
    scores: Tensor


class Grown(NamedTuple):
    """The ``k`` best of each tree's new candidates, descending.

    ``score`` float32, ``token``, ``branch`` (whose child each is) and ``best`` (which of its tree's
    ``k * k`` candidates) int64 ``(B, k)``. ``mask`` bool ``(B, k, W + k)``: what each sees, itself
    included; None where none was given.
    """

    score: Tensor
    token: Tensor
    branch: Tensor
    best: Tensor
    mask: Tensor | None


@operation
def grow(score: Tensor, added: Tensor, choices: Tensor, mask: Tensor | None = None) -> Grown:
    """The end of a draft step: every branch has ``k`` children, the ``k`` best of all go on.

    Ranked by (score descending, index ascending), as :func:`rerank` does.

    Args:
        score: float32 ``(B, k)``: summed log-probabilities of the branches.
        added: float32 ``(B * k, k)``, contiguous: log-probability of each child. The branch's
            score is added to it in place, which makes it the scores of all candidates.
        choices: int64 ``(B * k, k)``, contiguous: the children's tokens.
        mask: bool ``(B, k, W)``: the drafted keys that each branch sees; None: of no interest.
    """
    batch, k = score.shape
    scores = added.view(batch, k, k).add_(score[:, :, None]).flatten(1)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    branch = best // k
    if mask is not None:
        seen = mask.gather(1, branch[:, :, None].expand(-1, -1, mask.shape[2]))
        own = torch.eye(k, dtype=torch.bool, device=mask.device).expand(batch, k, k)
        mask = torch.cat([seen, own], 2)
    token = choices.view(batch, k * k).gather(1, best)
    return Grown(scores.gather(1, best), token, branch, best, mask)


@operation
def rerank(scores: Tensor, count: int) -> Tensor:
    """The ``count`` best candidates of each row, as ascending indices.

    Ranked by (score descending, index ascending): a child scores at most what its parent does and
    comes later, so a kept child's parent is kept. ``scores (B, C)`` → int64 ``(B, count)``.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return order.sort(dim=-1).values


class Selected(NamedTuple):
    """The nodes of a batch that are verified.

    ``pack`` int64 ``(count,)``: flat node numbers ``b * N + n``, ascending. ``scores`` float32
    ``(B, N)``: those of the nodes in ``pack`` that are alive, -inf at all others.
    """

    pack: Tensor
    scores: Tensor


@operation
def select_nodes(scores: Tensor, count: int, most: Tensor | None = None) -> Selected:
    """The ``count`` nodes of the whole batch that are worth verifying.

    A node's rank within its request is by (score descending, index ascending), the root's is 0.
    Kept are all roots, then the others by (score descending, flat number ascending). Nodes of rank
    ``most`` or more are dead. If fewer than ``count`` nodes live, dead ones fill up, those of
    lowest number.

    A child scores at most what its parent does and comes later, so a kept child's parent is kept.

    Args:
        scores: float32 ``(B, N)``, as in :class:`Tree`; NaN counts as -inf.
        count: From B to B * N.
        most: int64 ``(B,)``, nodes of each request, root included; None: no such bound.
    """
    key = torch.where(scores > -torch.inf, scores, -torch.inf)
    key[:, 0] = torch.inf
    if most is not None:
        order = key.sort(dim=-1, descending=True, stable=True).indices
        index = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, index)
        key[:, 1:].masked_fill_(rank[:, 1:] >= most[:, None], -torch.inf)
    order = key.flatten().sort(descending=True, stable=True).indices
    pack = order[:count].sort().values
    kept = torch.zeros_like(key, dtype=torch.bool).flatten().index_fill_(0, pack, 1)
    kept = kept.view_as(key) & (key > -torch.inf)
    return Selected(pack, torch.where(kept, scores, -torch.inf))


@operation
def build_tree(root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, depth: int) -> Tree:
    """Links and ancestor mask of reranked candidates.

    A dead node's only ancestor is itself. Nodes below a dead one must be dead too.

    Args:
        root: int64 ``(B,)``, last committed tokens.
        tokens: int64 ``(B, N - 1)``, siblings distinct and in descending draft probability.
        parents: int64 ``(B, N - 1)``: node number of each one's parent, below its own; of no
            interest where the node is dead.
        scores: float32 ``(B, N - 1)``, as in :class:`Tree`; NaN counts as -inf.
        depth: No node is deeper than this.
    """
    tokens = torch.cat([root[:, None], tokens], 1)
    alive = scores > -torch.inf
    parents = F.pad(torch.where(alive, parents, -1), (1, 0), value=-1)
    nodes = tokens.shape[1]
    index = torch.arange(nodes, device=tokens.device)
    child_of = parents[:, :, None] == index  # (B, child, parent)
    reach = (child_of | (index[:, None] == index)).to(torch.float32)
    for _ in range(max(depth - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    # Without a parent there are no siblings.
    twin = (parents[:, :, None] == parents[:, None, :]) & (parents >= 0)[:, None, :]
    return Tree(
        tokens=tokens,
        parents=parents,
        first_child=_first(child_of.transpose(1, 2)),
        next_sibling=_first(twin & (index[:, None] < index)),
        depths=reach.sum(-1).long() - 1,
        ancestors=reach > 0,
        scores=F.pad(torch.where(alive, scores, -torch.inf), (1, 0)),
    )


def build_chain(root: Tensor, tokens: Tensor, scores: Tensor) -> Tree:
    """:func:`build_tree` of chains, in which each token ``(B, N - 1)`` follows the one before.

    One difference: a dead node's ancestors are all nodes up to itself. They are one view for all
    requests, and as the dead nodes are a chain's last ones they are no living node's ancestors.
    """
    tokens = torch.cat([root[:, None], tokens], 1)
    batch, nodes = tokens.shape
    index = torch.arange(nodes, device=tokens.device)
    alive = scores > -torch.inf
    depths = F.pad(torch.where(alive, index[1:], 0), (1, 0))
    return Tree(
        tokens=tokens,
        parents=depths - 1,
        first_child=F.pad(torch.where(alive, index[1:], -1), (0, 1), value=-1),
        next_sibling=torch.full_like(index, -1).expand(batch, nodes),
        depths=depths,
        ancestors=(index <= index[:, None]).expand(batch, nodes, nodes),
        scores=F.pad(torch.where(alive, scores, -torch.inf), (1, 0)),
    )


def _first(where: Tensor) -> Tensor:
    """Index of the first True of the last dimension, -1 where there is none."""
    value, index = where.to(torch.uint8).max(-1)
    return torch.where(value > 0, index, -1)


class Accepted(NamedTuple):
    """Accepted paths of ``B`` trees.

    ``lengths`` int64 ``(B,)``: accepted drafts. ``path`` int64 ``(B, W)``: their nodes after the
    root's 0, then arbitrary ones. ``bonus`` int64 ``(B,)``: the token after the path, or -1.
    """

    lengths: Tensor
    path: Tensor
    bonus: Tensor


@operation
def accept_path(targets: Tensor, tree: Tree, width: int, limits: Tensor | None = None) -> Accepted:
    """Follow the target's own choices down each tree.

    A node is accepted when its whole path is: each token on it is the target's choice at its
    parent, and no node on it is dead. Choices are argmax, in sampling under noise that depends on
    seed, position and token alone, so that the emitted text is plain decoding's, token by token.
    (Acceptance by probability changes the choices: :mod:`overlap_spec.kernels.acceptance`.)

    Args:
        targets: int64 ``(B, N)``, the target's choice after each node; -1 for an empty row.
        tree: The drafted trees.
        width: Length of the returned paths, at least depth + 1.
        limits: int64 ``(B,)``: no deeper node is accepted; None: no limit.
    """
    chosen = targets.gather(1, tree.parents.clamp(min=0)) == tree.tokens
    # A dead node's token may be -1, as the choice of an empty row is.
    chosen &= tree.parents >= 0
    if limits is not None:
        chosen &= tree.depths <= limits[:, None]
    chosen[:, 0] = True
    on_path = ~(tree.ancestors & ~chosen[:, None, :]).any(-1)
    lengths = on_path.sum(-1) - 1
    path = (~on_path).to(torch.uint8).sort(dim=-1, stable=True).indices[:, :width]
    last = path.gather(1, lengths[:, None])
    return Accepted(lengths, path, targets.gather(1, last)[:, 0])
