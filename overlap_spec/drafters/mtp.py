"""Drafting with the target's own next-token module (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import DraftCache, MakeCache, Tables
from overlap_spec.drafters.head_drafter import HeadDrafter
from overlap_spec.hub import find_folder
from overlap_spec.models.decoder import NORMED_OUTPUT, Decoder
from overlap_spec.models.mtp import MtpModule
from overlap_spec.models.weights import load_mtp


class MtpDrafter(HeadDrafter):
    """A module that predicts the target's normed output, which is its state; it reads its own
    output at every later depth.
    """

    feature_layers = (NORMED_OUTPUT,)

    def __init__(self, module: MtpModule, target: Decoder, cache: DraftCache, rows: int) -> None:
        super().__init__(module, target, cache, rows, module.config.hidden_size)

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> MtpDrafter:
        path = config.target_path if config.draft is None else find_folder(config.draft)
        module = load_mtp(path, target, target.embed_tokens.weight.dtype)
        return cls(module, target, make_cache(module.config, first=1), len(tables.roots))

    def logits(self, states: Tensor) -> Tensor:
        found: Tensor = getattr(self.head, "head", self._target_logits)(states)
        return found
