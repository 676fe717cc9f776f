"""EAGLE-3 drafting (arXiv 2503.01840)."""

from __future__ import annotations

from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import DraftCache, MakeCache, Tables
from overlap_spec.drafters.head_drafter import HeadDrafter
from overlap_spec.errors import ConfigError
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.eagle3 import Eagle3Head, feature_layers
from overlap_spec.models.weights import load_eagle3


class Eagle3Drafter(HeadDrafter):
    """A head over features of the target; its state is what a draft step hands to the next."""

    head: Eagle3Head

    def __init__(self, head: Eagle3Head, target: Decoder, cache: DraftCache, rows: int) -> None:
        offsets = head.d2t if hasattr(head, "lm_head") else None
        super().__init__(head, target, cache, rows, head.fc.out_features, offsets)
        self.feature_layers = feature_layers(head.config, target.config)

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> Eagle3Drafter:
        if config.draft_path is None:
            raise ConfigError("algorithm 'eagle3' needs draft, the folder of a draft head")
        head = load_eagle3(config.draft_path, target, target.embed_tokens.weight.dtype)
        return cls(head, target, make_cache(head.config.layer, first=1), len(tables.roots))

    def states_before(self, features: Tensor | None) -> Tensor:
        assert features is not None
        return self.head.fuse(features)

    def logits(self, states: Tensor) -> Tensor:
        if hasattr(self.head, "lm_head"):
            return self.head.logits(states)
        return self._target_logits(self.head.normed(states))
