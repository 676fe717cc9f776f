"""EAGLE-1 and EAGLE-2 drafting (arXiv 2401.15077, 2406.16858)."""

from __future__ import annotations

from torch import Tensor

from overlap_spec.drafters.head_drafter import HeadDrafter
from overlap_spec.models.decoder import NORMED_OUTPUT
from overlap_spec.models.weights import load_eagle


class EagleDrafter(HeadDrafter):
    """A head that predicts the target's normed output, which is its state; the target's head reads
    it.
    """

    feature_layers = (NORMED_OUTPUT,)
    load_head = staticmethod(load_eagle)

    def logits(self, states: Tensor) -> Tensor:
        return self._target_logits(states)
