"""The published adaptive policy: an EMA of accepted drafts walks a ladder of candidate steps.

As in SGLang's adaptive speculative decoding (``--speculative-adaptive-config``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_spec.speculation.slots import Slot


@dataclass(frozen=True)
class SlotSettings:
    """One slot of the published policy, with its published defaults.

    Attributes:
        candidate_steps: Draft steps to choose from; 0 is speculation off.
        ema_alpha: Weight of a new batch in the EMA, in (0, 1].
        update_interval: Batches between decisions.
        warmup_batches: Batches before the first interval begins.
        down_hysteresis: Drafts added to the threshold of a move down; below 0 delays it.
        up_hysteresis: Drafts added to the threshold of a move up; above 0 delays it.
        ceiling_coeff: Steps allowed per accepted draft; 0 is no ceiling.
    """

    candidate_steps: tuple[int, ...]
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0
    ceiling_coeff: float = 0.0


class EmaSlot(Slot):
    """``ema = (1 - α) ema + α mean(accepted)``, from steps - 1; every interval, a walk by it.

    The EMA belongs to the slot and is carried from tier to tier, so a late result counts in full
    whichever tier is active by then; it moved the EMA of the published policy too. What decides
    is the tier that travels with the result: what drafted counts, though the slot is off by now;
    a step that was off only counts as a batch, though the slot is probing by now. That batch
    shortens the first interval of a probe, and no more.

    A slot that is off probes one tier up at its next decision, every time: off for one interval,
    on for one, until the probe's EMA says to stay. The probe starts from the EMA that led to
    off; a slot that never drafted has none, and starts from the probed tier's steps - 1.
    """

    def __init__(self, settings: SlotSettings, launch_steps: int) -> None:
        super().__init__(settings.candidate_steps, launch_steps)
        self.settings = settings
        self._ema = self.steps - 1.0

    @property
    def ema(self) -> float:
        return self._ema

    def observe(self, steps: int, accepted: Sequence[int]) -> None:
        settings = self.settings
        if steps > 0:
            mean = sum(accepted) / len(accepted)
            self._ema = (1 - settings.ema_alpha) * self._ema + settings.ema_alpha * mean
        self.count += 1
        settled = self.count - settings.warmup_batches
        if settled > 0 and settled % settings.update_interval == 0:
            index = self.candidates.index(self.steps)
            target = self._probe() if self.steps == 0 else self._walk(index)
            self._switch(self.candidates[target])

    def _probe(self) -> int:
        target = min(1, len(self.candidates) - 1)
        if target > 0 and self._ema < 0:
            self._ema = self.candidates[target] - 1.0
        return target

    def _walk(self, start: int) -> int:
        """Index of the candidate that the EMA asks for, from the active one at ``start``."""
        index = start
        while index > 0 and self._ema <= self._down_threshold(index):
            index -= 1
        if index == start:
            last = len(self.candidates) - 1
            rise = self.settings.up_hysteresis - 0.5
            while index < last and self._ema > self.candidates[index] + rise:
                index += 1
        if index <= start and self.settings.ceiling_coeff > 0:
            ceiling = max(1, math.ceil(self._ema * self.settings.ceiling_coeff))
            while index > 0 and self.candidates[index] > ceiling:
                index -= 1
        return index

    def _down_threshold(self, index: int) -> float:
        previous = self.candidates[index - 1]
        # No EMA is below 0, so the rule of the other tiers would never turn speculation off.
        base = 0.5 if previous == 0 else previous - 0.5
        return base + self.settings.down_hysteresis
