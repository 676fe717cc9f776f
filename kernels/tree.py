"""Draft trees: choosing nodes (EAGLE-2, arXiv 2406.16858), their links, and the accepted path.

All trees of a batch are rectangles ``(B, N)``; node 0 is the root, parents come before children.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec.kernels.dispatch import operation


class Tree(NamedTuple):
    """Trees of ``B`` requests with ``N`` nodes each, on the device.

    ``tokens``, ``parents`` (root: -1), ``first_child``, ``next_sibling`` (none: -1), ``depths``:
    int64 ``(B, N)``. ``ancestors``: bool ``(B, N, N)``, ``[b, i, j]``: j is i or above it.
    """

    tokens: Tensor
    parents: Tensor
    first_child: Tensor
    next_sibling: Tensor
    depths: Tensor
    ancestors: Tensor


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


@operation
def build_tree(root: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> Tree:
    """Links and ancestor mask of reranked candidates.

    Args:
        root: int64 ``(B,)``, last committed tokens.
        tokens: int64 ``(B, N - 1)``, siblings distinct and in descending draft probability.
        parents: int64 ``(B, N - 1)``: node number of each one's parent, below its own.
        depth: No node is deeper than this.
    """
    tokens = torch.cat([root[:, None], tokens], 1)
    parents = torch.cat([torch.full_like(root, -1)[:, None], parents], 1)
    nodes = tokens.shape[1]
    index = torch.arange(nodes, device=tokens.device)
    child_of = parents[:, :, None] == index  # (B, child, parent)
    reach = (child_of | (index[:, None] == index)).to(torch.float32)
    for _ in range(max(depth - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    later_twin = (parents[:, :, None] == parents[:, None, :]) & (index[:, None] < index)
    return Tree(
        tokens=tokens,
        parents=parents,
        first_child=_first(child_of.transpose(1, 2)),
        next_sibling=_first(later_twin),
        depths=reach.sum(-1).long() - 1,
        ancestors=reach > 0,
    )


def build_chain(root: Tensor, tokens: Tensor) -> Tree:
    """:func:`build_tree` of chains, in which each token ``(B, N - 1)`` follows the one before."""
    tokens = torch.cat([root[:, None], tokens], 1)
    batch, nodes = tokens.shape
    index = torch.arange(nodes, device=tokens.device)
    return Tree(
        tokens=tokens,
        parents=(index - 1).expand(batch, nodes),
        first_child=torch.where(index < nodes - 1, index + 1, -1).expand(batch, nodes),
        next_sibling=torch.full_like(index, -1).expand(batch, nodes),
        depths=index.expand(batch, nodes),
        ancestors=(index <= index[:, None]).expand(batch, nodes, nodes),
    )


def _first(where: Tensor) -> Tensor:
    """Index of the first True of the last dimension, -1 where there is none."""
    value, index = where.to(torch.uint8).max(-1)
    return torch.where(value > 0, index, -1)


class Accepted(NamedTuple):
    """Accepted paths of ``B`` trees.

    ``lengths`` int64 ``(B,)``: accepted drafts. ``path`` int64 ``(B, W)``: their nodes behind the
    root's 0, then arbitrary ones. ``bonus`` int64 ``(B,)``: the token after the path, or -1.
    """

    lengths: Tensor
    path: Tensor
    bonus: Tensor


@operation
def accept_path(targets: Tensor, tree: Tree, width: int, limits: Tensor | None = None) -> Accepted:
    """Follow the target's own choices down each tree.

    A node is accepted when its whole path is: each token on it is the target's choice at its
    parent. Choices are argmax or, in sampling, the inverse of the masked distribution at a coin
    that depends on position alone, so that the emitted text is plain decoding's, token by token.

    Args:
        targets: int64 ``(B, N)``, the target's choice after each node; -1 for an empty row.
        tree: The drafted trees.
        width: Length of the returned paths, at least depth + 1.
        limits: int64 ``(B,)``: no deeper node is accepted; None: no limit.
    """
    chosen = targets.gather(1, tree.parents.clamp(min=0)) == tree.tokens
    if limits is not None:
        chosen &= tree.depths <= limits[:, None]
    chosen[:, 0] = True
    on_path = ~(tree.ancestors & ~chosen[:, None, :]).any(-1)
    lengths = on_path.sum(-1) - 1
    path = (~on_path).to(torch.uint8).sort(dim=-1, stable=True).indices[:, :width]
    last = path.gather(1, lengths[:, None])
    return Accepted(lengths, path, targets.gather(1, last)[:, 0])
