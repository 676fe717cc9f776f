"""What drafters share that tell all depths in one pass."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.drafters.head_drafter import FusingDrafter
from overlap_spec.drafters.tree_drafter import Branches, Growth
from overlap_spec.kernels import (
    GrammarStanding,
    Noise,
    legal_candidates,
    noise_keys,
    top_candidates,
)
from overlap_spec.steps import FEW_TOKENS
from overlap_spec.tiers import Tier


class MarginalDrafter(FusingDrafter):
    """A head that tells the tokens of all depths without knowing one another.

    A tree's nodes go by the product of their probabilities, as if they were independent (DDTree's
    way).
    """

    stepwise: ClassVar[bool] = False

    @abstractmethod
    def depths(self, roots: Roots, count: int) -> Tensor:
        """The states from which the tokens at ``count`` depths come: ``(B, count, H)``."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        logits = self.logits(self.depths(roots, tier.steps).flatten(0, 1))
        return Marginals(self, roots, logits, tier.steps, tier.top_k).draft(roots, tier)


class Marginals(Growth):
    """Drafts that are grown from known logits, of which each depth has one row.

    A branch's state is the number of its row: int64 ``(..., 1)``.

    Args:
        logits: ``(B * depth, V)`` of the drafter's vocabulary, one root's depths after another's.
        most: Most children of a node.
    """

    def __init__(
        self, drafter: MarginalDrafter, roots: Roots, logits: Tensor, depth: int, most: int
    ) -> None:
        self.logits, self.depth = logits, depth
        self.offsets, self.draft_ids = drafter.offsets, drafter.draft_ids
        if roots.standing is not None:
            most = max(most, FEW_TOKENS)
        noise = None
        if roots.temperature is not None and roots.seeds is not None:
            places = roots.positions[:, None] + torch.arange(1, depth + 1, device=logits.device)
            told = roots.temperature, roots.seeds
            temperature, seeds = (each.repeat_interleave(depth) for each in told)
            noise = Noise(temperature, noise_keys(seeds, places.flatten()))
        # Branches of one depth differ in what the grammar allows alone.
        self.best = top_candidates(logits, min(most, logits.shape[1]), self.offsets, noise)

    def root_states(self, roots: Roots) -> Tensor:
        count = roots.tokens.shape[0]
        return (torch.arange(count, device=roots.tokens.device) * self.depth)[:, None]

    def states_below(self, roots: Roots, at: Branches) -> Tensor:  # noqa: ARG002
        return at.before + 1

    def candidates(
        self, states: Tensor, k: int, noise: Noise | None, standing: GrammarStanding | None
    ) -> tuple[Tensor, Tensor]:
        rows = states.flatten()
        score, token = (each[rows] for each in self.best)
        if standing is None:
            return score[:, :k].contiguous(), token[:, :k].contiguous()
        logits, known = self.logits[rows], (score, token)
        return legal_candidates(logits, k, standing, self.offsets, self.draft_ids, noise, known)
