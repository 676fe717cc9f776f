"""Acceptance by probability, at all nodes at once: which child each one keeps.

It changes what is emitted after a node: its accepted child's token, or one drawn from what is left
of the target's distribution. :func:`overlap_spec.kernels.accept_path` then follows the emitted
tokens, however they were chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.kernels.tree import Tree


def accept_by_probability(
    probs: Tensor, least: Tensor, tree: Tree, coin: Tensor | None = None
) -> Tensor:
    """The first child of each node that is probable enough.

    A child is accepted where its probability is at least ``least``, or where the coin is below the
    probability of it and the siblings before it together. The second is SGLang's target-only rule;
    with ``least`` over 1 it is rejection sampling of drafts whose own probabilities are unknown:
    lossless, where the rest is drawn from what the children leave.

    Args:
        probs: float32 ``(B, N)``, the target's probability of each node's token at its parent.
        least: float32, expands to ``(B, N)``: what the children of each node must reach.
        coin: float32 ``(B, N)``, at least 0, one for the children of each node.

    Returns:
        int64 ``(B, N)``: the accepted child's node number, or -1.
    """
    parents = tree.parents
    above, alive = parents.clamp(min=0), (parents >= 0) & (probs > 0)
    good = probs >= least.expand_as(probs).gather(1, above)
    index = torch.arange(parents.shape[1], device=parents.device)
    if coin is not None:
        siblings = (parents[:, :, None] == parents[:, None, :]) & (index <= index[:, None])
        together = (siblings * torch.where(alive, probs, 0.0)[:, None, :]).sum(-1)
        good |= coin.gather(1, above) < together
    found = (parents[:, None, :] == index[:, None]) & (alive & good)[:, None, :]
    value, child = found.to(torch.uint8).max(-1)
    return torch.where(value > 0, child, -1)
