"""No guesses: what the grammar forces is drafted, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from overlap_spec.drafters.base import Draft, Drafter, Roots
from overlap_spec.tiers import Tier


class GrammarDrafter(Drafter):
    """A chain of forced tokens after each root; it needs no weights, and costs no time."""

    @classmethod
    def build(cls, *_: Any, **__: Any) -> GrammarDrafter:
        return cls()

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        tokens = roots.forced[:, : tier.steps]
        tokens = F.pad(tokens, (0, tier.nodes - 1 - tokens.shape[1]), value=-1)
        scores = torch.where(tokens >= 0, 0.0, -torch.inf)
        return Draft(tokens.clamp(min=0), None, scores)
