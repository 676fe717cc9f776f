"""Grafts: drafted tokens that the grammar forces, in place of what a drafter would have guessed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.drafters.base import Draft, HostDraft, Roots
from overlap_spec.tiers import Tier


class Grafts:
    """The forced tokens behind each root, as the first candidates of the draft's steps.

    Args:
        steps: Depth of the draft.
    """

    def __init__(self, roots: Roots, steps: int) -> None:
        self._tokens = roots.forced[:, :steps]
        self._there = self._tokens >= 0

    def first(self, scores: Tensor, tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Candidates with the forced token first, where there is one.

        It gets score 0, that of certainty. It is taken out of the others, or takes the place of
        the last, so that all stay distinct.

        Args:
            scores, tokens: ``(B, k)``: log-probabilities and tokens, descending, of the children
                of the node that ends what is forced in earlier steps.
            step: Depth of that node.
        """
        if step >= self._tokens.shape[1]:
            return scores, tokens
        forced, there = self._tokens[:, step, None], self._there[:, step, None]
        if tokens.shape[1] == 1:
            return scores.masked_fill(there, 0.0), torch.where(there, forced, tokens)
        # Candidate j moves back by one, up to the place from which the forced token came.
        before = (tokens == forced).cumsum(1) == 0
        moves = before[:, :-1] & there
        scores = torch.cat(
            [scores[:, :1].masked_fill(there, 0.0), scores[:, 1:].where(~moves, scores[:, :-1])], 1
        )
        tokens = torch.cat(
            [
                torch.where(there, forced, tokens[:, :1]),
                torch.where(moves, tokens[:, :-1], tokens[:, 1:]),
            ],
            1,
        )
        return scores, tokens


def lengthen(draft: Draft, roots: Roots, tier: Tier) -> Draft:
    """A draft with room for more nodes: in it, what is forced behind that part of a run which is
    drafted already, as one more branch.

    Args:
        draft: Of ``tier.base``.
        tier: With a base.
    """
    tokens, parents, scores = draft
    batch, drafted = tokens.shape
    index = torch.arange(tier.nodes - 1, device=tokens.device)
    if parents is None:
        parents = index[:drafted].expand(batch, drafted)
    run = roots.forced[:, : tier.steps]
    # The last drafted node of the run, and its depth.
    end = depth = torch.zeros_like(roots.tokens)
    goes_on = torch.ones_like(end, dtype=torch.bool)
    for step in range(min(tier.own.steps, run.shape[1])):
        follows = (parents == end[:, None]) & (tokens == run[:, step, None])
        value, node = (follows & (scores > -torch.inf)).to(torch.uint8).max(1)
        goes_on = goes_on & (value > 0)
        end, depth = torch.where(goes_on, node + 1, end), depth + goes_on
    room = index[drafted:]
    place = depth[:, None] + (room - drafted)
    tail = run.gather(1, place.clamp(max=run.shape[1] - 1))
    lives = (place < run.shape[1]) & (tail >= 0)
    score = F.pad(scores, (1, 0)).gather(1, end[:, None])
    first = room == drafted
    return Draft(
        torch.cat([tokens, tail.clamp(min=0)], 1),
        torch.cat([parents, torch.where(first, end[:, None], room)], 1),
        torch.cat([scores, torch.where(lives, score, -torch.inf)], 1),
    )


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
    return _best(nodes, tier.nodes - 1)


def _best(nodes: list[tuple[int, int, float]], count: int) -> HostDraft:
    """The ``count`` best of nodes (token, parent, score), none before its parent."""
    order = sorted(sorted(range(len(nodes)), key=lambda at: -nodes[at][2])[:count])
    number = {0: 0} | {at + 1: new for new, at in enumerate(order, 1)}
    return HostDraft(
        np.array([nodes[at][0] for at in order], np.int64),
        np.array([number[nodes[at][1]] for at in order], np.int64),
        np.array([nodes[at][2] for at in order], np.float32),
    )
