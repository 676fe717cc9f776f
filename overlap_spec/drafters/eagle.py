"""EAGLE-1 and EAGLE-2 drafting (arXiv 2401.15077, 2406.16858)."""

from __future__ import annotations

from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import DraftCache, MakeCache, Tables
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.errors import ConfigError
from overlap_spec.hub import find_folder
from overlap_spec.models.decoder import NORMED_OUTPUT, Attend, Decoder
from overlap_spec.models.eagle import EagleHead
from overlap_spec.models.weights import load_eagle


class EagleDrafter(TreeDrafter):
    """A head that predicts the target's normed output, which is its state; the target's head reads
    it.

    Slot i of its cache holds (feature of position i - 1, token i), so that slot 0 does not exist.
    """

    feature_layers = (NORMED_OUTPUT,)

    def __init__(self, head: EagleHead, target: Decoder, cache: DraftCache, rows: int) -> None:
        embed_tokens = getattr(head, "embed_tokens", target.embed_tokens)
        state = embed_tokens.weight.new_zeros(rows, head.fc.out_features)
        super().__init__(cache, state, target.config.max_position - 1)
        self.head, self.embed_tokens = head, embed_tokens
        # No module of this one: the target's weights are packed once.
        self._target_logits = target.logits

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> EagleDrafter:
        if config.draft is None:
            raise ConfigError("algorithm 'eagle' needs draft, the folder of a draft head")
        head = load_eagle(find_folder(config.draft), target, target.embed_tokens.weight.dtype)
        return cls(head, target, make_cache(head.config, first=1), len(tables.roots))

    def advance(
        self, tokens: Tensor, before: Tensor | None, positions: Tensor, attend: Attend
    ) -> Tensor:
        assert before is not None
        state: Tensor = self.head(self.embed_tokens(tokens), before, positions, attend)
        return state

    def logits(self, states: Tensor) -> Tensor:
        found: Tensor = self._target_logits(states)
        return found
