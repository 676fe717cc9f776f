"""EAGLE-3 drafting (arXiv 2503.01840)."""

from __future__ import annotations

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import MakeCache, Tables
from overlap_spec.drafters.head_drafter import FusingDrafter
from overlap_spec.errors import ConfigError
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.weights import load_eagle3


class Eagle3Drafter(FusingDrafter):
    """A head over features of the target; its state is what a draft step hands to the next."""

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> Eagle3Drafter:
        if config.draft_path is None:
            raise ConfigError("algorithm 'eagle3' needs draft, the folder of a draft head")
        head = load_eagle3(config.draft_path, target, target.embed_tokens.weight.dtype)
        return cls(head, target, make_cache(head.config.layer, first=1), len(tables.roots))
