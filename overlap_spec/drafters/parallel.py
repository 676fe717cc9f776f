"""P-EAGLE drafting (arXiv 2602.01469): all depths of a draft in one pass of the head."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.drafters.base import DraftCache, Roots
from overlap_spec.drafters.marginals import MarginalDrafter
from overlap_spec.drafters.tree_drafter import Branches
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.parallel_eagle import ParallelHead, load_parallel


class ParallelDrafter(MarginalDrafter):
    """A head that sees masks behind the root, and tells of each the token after it."""

    load_head = staticmethod(load_parallel)

    head: ParallelHead
    mask_feature: Tensor

    def __init__(self, head: ParallelHead, target: Decoder, cache: DraftCache, rows: int) -> None:
        super().__init__(head, target, cache, rows)
        with torch.no_grad():
            self.register_buffer("mask_feature", head.mask_feature())

    def depths(self, roots: Roots, count: int) -> Tensor:
        state = self.root_state[roots.rows][:, None]
        if count == 1:
            return state
        mask = torch.full_like(roots.tokens, self.head.config.mask_token)[:, None]
        mask = mask.expand(-1, count - 1)
        before = self.mask_feature.expand(mask.shape[0], count - 1, -1)
        return torch.cat([state, self.states_below(roots, Branches(mask, before, 1))], 1)
