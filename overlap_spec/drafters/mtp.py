"""Drafting with the target's own next-token module (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import DraftCache, MakeCache, Tables
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.hub import find_folder
from overlap_spec.models.decoder import NORMED_OUTPUT, Attend, Decoder
from overlap_spec.models.mtp import MtpModule
from overlap_spec.models.weights import load_mtp


class MtpDrafter(TreeDrafter):
    """A module that predicts the target's normed output, which is its state; it reads its own
    output at every later depth.

    Slot i of its cache holds (feature of position i - 1, token i), so that slot 0 does not exist.
    """

    feature_layers = (NORMED_OUTPUT,)

    def __init__(self, module: MtpModule, target: Decoder, cache: DraftCache, rows: int) -> None:
        embed_tokens = getattr(module, "embed_tokens", target.embed_tokens)
        state = embed_tokens.weight.new_zeros(rows, module.config.hidden_size)
        super().__init__(cache, state, target.config.max_position - 1)
        self.module, self.embed_tokens = module, embed_tokens
        # No module of this one: the target's weights are packed once.
        self._target_logits = target.logits

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> MtpDrafter:
        path = config.target_path if config.draft is None else find_folder(config.draft)
        module = load_mtp(path, target, target.embed_tokens.weight.dtype)
        return cls(module, target, make_cache(module.config, first=1), len(tables.roots))

    def advance(
        self, tokens: Tensor, before: Tensor | None, positions: Tensor, attend: Attend
    ) -> Tensor:
        assert before is not None
        state: Tensor = self.module(self.embed_tokens(tokens), before, positions, attend)
        return state

    def logits(self, states: Tensor) -> Tensor:
        found: Tensor = getattr(self.module, "head", self._target_logits)(states)
        return found
