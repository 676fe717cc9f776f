"""EAGLE-3 drafting (arXiv 2503.01840)."""

from __future__ import annotations

from pathlib import Path

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.head_drafter import FusingDrafter
from overlap_spec.models.weights import load_eagle3


class Eagle3Drafter(FusingDrafter):
    """A head over features of the target; its state is what a draft step hands to the next."""

    load_head = staticmethod(load_eagle3)

    @classmethod
    def folder(cls, config: EngineConfig) -> Path:
        # That of the embedded model is there.
        return config.draft_path or super().folder(config)
