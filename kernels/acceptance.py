"""Rules of acceptance other than the exact one, at all nodes at once: which child each one keeps.

They change what is emitted after a node: its accepted child's token, or one drawn from what the
rule leaves of the target's distribution. :func:`overlap_spec.kernels.accept_path` then follows the
emitted tokens, whatever rule they come from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec.kernels.tree import Tree


class Odds(NamedTuple):
    """From what each node's children were drawn, one after the other and none twice.

    ``ids`` int64 ``(B, N, M)``: the tokens that could be drawn, distinct. ``probs`` float32
    ``(B, N, M)``: their probabilities, which sum to 1; all 0 where a node has no children.
    """

    ids: Tensor
    probs: Tensor


class Residual(NamedTuple):
    """What multi-round rejection leaves at each node.

    ``child`` int64 ``(B, N)``: the accepted child's node number, or -1. Where it is -1 the token is
    drawn from ``own`` float32 ``(B, N, M)``, the masses of the node's :class:`Odds` ``ids``, and,
    for all other tokens, from the target's probabilities times ``scale`` float32 ``(B, N)``.
    """

    child: Tensor
    own: Tensor
    scale: Tensor


def accept_by_threshold(
    probs: Tensor, coin: Tensor, tree: Tree, single: float, total: float
) -> Tensor:
    """SGLang's target-only rule: the first child of each node that is probable enough.

    A child is accepted where the coin, times ``total``, is below the probability of it and the
    siblings before it together, or where its own is at least ``single``. With ``total`` 1 and
    ``single`` over 1 this is rejection sampling of drafts whose own probabilities are unknown:
    lossless, where the rest is drawn from what the children leave.

    Args:
        probs: float32 ``(B, N)``, the target's probability of each node's token at its parent.
        coin: float32 ``(B, N)`` in [0, 1), one for the children of each node.
        single, total: From 0 to 1.

    Returns:
        int64 ``(B, N)``: the accepted child's node number, or -1.
    """
    parents = tree.parents
    index = torch.arange(parents.shape[1], device=parents.device)
    alive = (parents >= 0) & (probs > 0)
    siblings = (parents[:, :, None] == parents[:, None, :]) & (index <= index[:, None])
    together = (siblings * torch.where(alive, probs, 0.0)[:, None, :]).sum(-1)
    thrown = coin.gather(1, parents.clamp(min=0)) * total
    return first_child(alive & ((thrown < together) | (probs >= single)), tree)


def first_child(accepted: Tensor, tree: Tree) -> Tensor:
    """The first accepted child of each node: bool ``(B, N)`` → int64 ``(B, N)``, -1 for none."""
    index = torch.arange(accepted.shape[1], device=accepted.device)
    found = (tree.parents[:, None, :] == index[:, None]) & accepted[:, None, :]
    value, child = found.to(torch.uint8).max(-1)
    return torch.where(value > 0, child, -1)


def accept_by_rejection(own: Tensor, uniform: Tensor, odds: Odds, tree: Tree) -> Residual:
    """Multi-round rejection sampling over each node's children, in order (SpecInfer, arXiv
    2305.09781; one child: Leviathan et al., arXiv 2211.17192).

    A child is accepted with the chance (target's probability) / (probability with which it was
    drawn). If it is not, the target's distribution becomes the normalised positive part of its
    difference to the draft's, and the next child's odds are those without the refused token.

    Args:
        own: float32 ``(B, N, M)``, the target's probabilities of the odds' ids.
        uniform: float32 ``(B, N, K)`` in (0, 1), one a round; no node has more than K children.
    """
    mass, left = torch.where(odds.probs > 0, own, 0.0), odds.probs
    outside = (1.0 - mass.sum(-1)).clamp(min=0.0)
    rest = outside
    child, chosen = tree.first_child, torch.full_like(tree.first_child, -1)
    for turn in range(uniform.shape[2]):
        token = tree.tokens.gather(1, child.clamp(min=0))
        hit = odds.ids == token[:, :, None]
        total = mass.sum(-1) + rest
        drawn = left.sum(-1).clamp(min=torch.finfo(left.dtype).tiny)
        wanted = (mass * hit).sum(-1) / total
        offered = (left * hit).sum(-1) / drawn
        open_to = (child >= 0) & (chosen < 0)
        accepted = open_to & (wanted > 0) & (uniform[:, :, turn] * offered < wanted)
        chosen = torch.where(accepted, child, chosen)
        after = (mass / total[:, :, None] - left / drawn[:, :, None]).clamp(min=0.0)
        # Where both distributions are one, rounding alone refuses, and nothing would be left.
        refused = open_to & ~accepted & (after.sum(-1) + rest > 0)
        mass = torch.where(refused[:, :, None], after, mass)
        rest = torch.where(refused, rest / total, rest)
        left = left.masked_fill(hit & (child >= 0)[:, :, None], 0.0)
        following = tree.next_sibling.gather(1, child.clamp(min=0))
        child = torch.where(child >= 0, following, -1)
    scale = torch.where(outside > 0, rest / outside, 1.0)
    return Residual(chosen, mass, scale)


def relaxed_children(probs: Tensor, best: Tensor, kth: Tensor, tree: Tree, delta: float) -> Tensor:
    """Relaxed acceptance: the first child of each node that is nearly as good as the best token.

    Args:
        probs: float32 ``(B, N)``, the target's probability of each node's token at its parent.
        best, kth: float32 ``(B, N)``: at each node, those of the best and the k-th best token.
        delta: How far below the best a child may be.

    Returns:
        int64 ``(B, N)``: the accepted child's node number, or -1.
    """
    above = tree.parents.clamp(min=0)
    good = (probs >= best.gather(1, above) - delta) & (probs >= kth.gather(1, above))
    return first_child(good & (probs > 0) & (tree.parents >= 0), tree)
