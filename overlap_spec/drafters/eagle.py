"""EAGLE-1 and EAGLE-2 drafting (arXiv 2401.15077, 2406.16858)."""

from __future__ import annotations

from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import DraftCache, MakeCache, Tables
from overlap_spec.drafters.head_drafter import HeadDrafter
from overlap_spec.errors import ConfigError
from overlap_spec.hub import find_folder
from overlap_spec.models.decoder import NORMED_OUTPUT, Decoder
from overlap_spec.models.eagle import EagleHead
from overlap_spec.models.weights import load_eagle


class EagleDrafter(HeadDrafter):
    """A head that predicts the target's normed output, which is its state; the target's head reads
    it.
    """

    feature_layers = (NORMED_OUTPUT,)

    def __init__(self, head: EagleHead, target: Decoder, cache: DraftCache, rows: int) -> None:
        super().__init__(head, target, cache, rows, head.fc.out_features)

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> EagleDrafter:
        if config.draft is None:
            raise ConfigError("algorithm 'eagle' needs draft, the folder of a draft head")
        head = load_eagle(find_folder(config.draft), target, target.embed_tokens.weight.dtype)
        return cls(head, target, make_cache(head.config, first=1), len(tables.roots))

    def logits(self, states: Tensor) -> Tensor:
        return self._target_logits(states)
