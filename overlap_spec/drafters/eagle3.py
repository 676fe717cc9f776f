"""EAGLE-3 drafting (arXiv 2503.01840)."""

from __future__ import annotations

from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import DraftCache, MakeCache, Tables
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.errors import ConfigError
from overlap_spec.models.decoder import Attend, Decoder
from overlap_spec.models.eagle3 import Eagle3Head, feature_layers
from overlap_spec.models.weights import load_eagle3


class Eagle3Drafter(TreeDrafter):
    """A head over features of the target; its state is what a draft step hands to the next.

    Slot i of its cache holds (feature of position i - 1, token i), so that slot 0 does not exist.
    """

    def __init__(self, head: Eagle3Head, target: Decoder, cache: DraftCache, rows: int) -> None:
        embed_tokens = getattr(head, "embed_tokens", target.embed_tokens)
        state = embed_tokens.weight.new_zeros(rows, head.fc.out_features)
        offsets = head.d2t if hasattr(head, "lm_head") else None
        super().__init__(cache, state, target.config.max_position - 1, offsets)
        self.feature_layers = feature_layers(head.config, target.config)
        self.head, self.embed_tokens = head, embed_tokens
        # No module of this one: the target's weights are packed once.
        self._target_logits = target.logits

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

    def advance(
        self, tokens: Tensor, before: Tensor | None, positions: Tensor, attend: Attend
    ) -> Tensor:
        assert before is not None
        state: Tensor = self.head(self.embed_tokens(tokens), before, positions, attend)
        return state

    def logits(self, states: Tensor) -> Tensor:
        found: Tensor
        if hasattr(self.head, "lm_head"):
            found = self.head.logits(states)
        else:
            found = self._target_logits(self.head.normed(states))
        return found
