"""Grafts: drafted tokens that the grammar forces, in place of what a drafter would have guessed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from overlap_spec.drafters.base import HostDraft, Roots
from overlap_spec.tiers import Tier


def forced_first(roots: Roots, scores: Tensor, tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Candidates with the token first that is forced behind each root at this step, if any, with
    the score of certainty, 0. It is taken out of the others, or takes the last one's place.

    Args:
        scores, tokens: ``(B, k)``: log-probabilities and tokens, descending, of the children of the
            node that ends what is forced in earlier steps.
        step: Depth of that node.
    """
    if step >= roots.forced.shape[1]:
        return scores, tokens
    forced = roots.forced[:, step, None]
    there = forced >= 0
    if tokens.shape[1] == 1:
        return scores.masked_fill(there, 0.0), torch.where(there, forced, tokens)
    # Candidate j moves back by one, up to the place from which the forced token came.
    before = (tokens == forced).cumsum(1) == 0
    moves = before[:, :-1] & there
    first = scores[:, :1].masked_fill(there, 0.0), torch.where(there, forced, tokens[:, :1])
    others = [torch.where(moves, each[:, :-1], each[:, 1:]) for each in (scores, tokens)]
    scores, tokens = (torch.cat(pair, 1) for pair in zip(first, others, strict=True))
    return scores, tokens


def graft(draft: HostDraft, forced: Sequence[int], tier: Tier) -> HostDraft:
    """A draft with the path of forced tokens in it, as first children of their parents.

    What it drafted behind these tokens stays there, as likely as it was after them. Of more nodes
    than the tier has, the best are kept; a chain keeps what goes on from its end.
    """
    run = list(forced[: tier.steps])
    if not run:
        return draft
    parents = range(len(draft.tokens)) if draft.parents is None else draft.parents.tolist()
    # New number and old score of each old node that stays, by its old number.
    place, cost = {0: 0}, {0: 0.0}
    nodes = [(token, at, 0.0) for at, token in enumerate(run)]
    drafted = zip(draft.tokens.tolist(), parents, draft.scores.tolist(), strict=True)
    for number, (token, parent, score) in enumerate(drafted, 1):
        above = place.get(parent)
        if above is None:
            continue
        if above < len(run) and run[above] == token:
            place[number], cost[number] = above + 1, score
        elif tier.top_k > 1 or above == len(nodes):
            nodes.append((token, above, score - cost[parent]))
            place[number], cost[number] = len(nodes), cost[parent]
    # The best of them, none before its parent.
    order = sorted(sorted(range(len(nodes)), key=lambda at: -nodes[at][2])[: tier.nodes - 1])
    renumbered = {0: 0} | {at + 1: new for new, at in enumerate(order, 1)}
    return HostDraft(
        np.array([nodes[at][0] for at in order], np.int64),
        np.array([renumbered[nodes[at][1]] for at in order], np.int64),
        np.array([nodes[at][2] for at in order], np.float32),
    )
