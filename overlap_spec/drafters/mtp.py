"""Drafting with the target's own next-token module (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.head_drafter import HeadDrafter
from overlap_spec.hub import find_folder
from overlap_spec.models.decoder import NORMED_OUTPUT
from overlap_spec.models.weights import load_mtp


class MtpDrafter(HeadDrafter):
    """A module that predicts the target's normed output, which is its state; it reads its own
    output at every later depth.
    """

    feature_layers = (NORMED_OUTPUT,)
    load_head = staticmethod(load_mtp)

    @classmethod
    def folder(cls, config: EngineConfig) -> Path:
        return config.target_path if config.draft is None else find_folder(config.draft)

    def logits(self, states: Tensor) -> Tensor:
        found: Tensor = getattr(self.head, "head", self._target_logits)(states)
        return found
