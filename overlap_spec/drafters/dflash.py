"""DFlash drafting (arXiv 2602.06036): a block of masks behind each root, in one pass."""

from __future__ import annotations

import logging
from functools import partial
from typing import Self

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Committed, MakeCache, Roots, Tables
from overlap_spec.drafters.marginals import MarginalDrafter
from overlap_spec.models.decoder import Decoder, Heads
from overlap_spec.models.dflash import DFlashConfig, DFlashHead, load_dflash

log = logging.getLogger(__name__)


class DFlashDrafter(MarginalDrafter):
    """A model that reads the root and masks behind it, and tells of each mask its own token.

    Slot i of its cache holds what the layers make of the feature of position i - 1, as slots of the
    target's other heads do. Of a root nothing is kept: its block begins with it.
    """

    load_head = staticmethod(load_dflash)

    head: DFlashHead

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> Self:
        drafter = super().build(config, target, tables, make_cache)
        assert isinstance(drafter.head.config, DFlashConfig)
        learnt = drafter.head.config.block_tokens - 1
        if config.num_steps > learnt:
            told = "num_steps %d: %s has learnt to draft %d deep; deeper ones are worse"
            log.warning(told, config.num_steps, config.draft, learnt)
        return drafter

    def extend(self, committed: Committed) -> None:
        assert committed.features is not None
        # Slot 0 is never seen, so its position may be any.
        positions = (committed.positions - 1).clamp(min=0)
        self.head.context(committed.features, positions, partial(committed.store, self.cache))

    def depths(self, roots: Roots, count: int) -> Tensor:
        masks = torch.full_like(roots.tokens, self.head.config.mask_token)[:, None]
        tokens = torch.cat([roots.tokens[:, None], masks.expand(-1, count)], 1)
        batch, width = tokens.shape
        positions = roots.positions[:, None] + torch.arange(width, device=tokens.device)
        # A slot is one behind its position, for the windows too.
        slots, causal = positions + 1, self.head.config.causal
        every = torch.ones(width, width, dtype=torch.bool, device=tokens.device)
        places = roots.pages, slots, roots.positions + 1, slots
        ways = {
            way: self.cache.attend(*places, None if way else every.expand(batch, -1, -1))
            for way in set(causal)
        }

        def attend(layer: int, heads: Heads) -> Tensor:
            return ways[causal[layer]](layer, heads)

        at = positions.clamp(max=self.last_position).flatten()
        out: Tensor = self.head(self.embed_tokens(tokens.flatten()), at, attend)
        return out.view(batch, width, -1)[:, 1:]
