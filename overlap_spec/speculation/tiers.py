"""The published adaptive policy: an EMA of accepted drafts walks a ladder of candidate steps.

As in SGLang's adaptive speculative decoding (``--speculative-adaptive-config``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from overlap_spec.speculation.policy import (
    LengthPolicy,
    StepOutcome,
    StepView,
    slot_snapshot,
    snapshot_of,
)
from overlap_spec.tiers import Budget, Tier

Count = Annotated[int, Meta(ge=0)]
Number = Annotated[float, Meta(gt=-1e9, lt=1e9)]


class SlotSettings(msgspec.Struct, frozen=True):
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

    candidate_steps: Annotated[tuple[Count, ...], Meta(min_length=1)]
    ema_alpha: Annotated[float, Meta(gt=0, le=1)] = 0.2
    update_interval: Annotated[int, Meta(ge=1)] = 5
    warmup_batches: Count = 10
    down_hysteresis: Number = -0.25
    up_hysteresis: Number = 0.0
    ceiling_coeff: Annotated[float, Meta(ge=0, lt=1e9)] = 0.0


class EmaSlot:
    """One range of batch sizes: its candidate steps, the active one, and what it has seen.

    ``ema = (1 - α) ema + α mean(accepted)``, from steps - 1; every interval, a walk by it.

    The EMA belongs to the slot and is carried from tier to tier, so a late result counts in full
    whichever tier is active by then, as in the published policy: the tier that travels with it
    decides. What drafted counts, though the slot is off by now; a step that was off only counts as
    a batch, though the slot is probing by now.

    A slot that is off probes one tier up at its next decision, every time, for one interval, until
    the probe's EMA says to stay. The probe starts from the EMA that led to off, or, where the slot
    never drafted, from the probed tier's steps - 1.

    Attributes:
        candidates: Steps it may choose, ascending and distinct.
        steps: The active ones. At first the launch steps, or the middle candidate where these are
            no candidate (of an even number, the upper middle).
        ema: Smoothed count of accepted drafts a verify, bonus not counted.
        count, switches: Verifies observed; changes of ``steps``, the last for ``reason``.
    """

    def __init__(self, settings: SlotSettings, launch_steps: int) -> None:
        self.settings = settings
        self.candidates = tuple(sorted(set(settings.candidate_steps)))
        middle = self.candidates[len(self.candidates) // 2]
        self.steps = launch_steps if launch_steps in self.candidates else middle
        self.ema = self.steps - 1.0
        self.count = self.switches = 0
        self.reason = "launch"

    def observe(self, steps: int, accepted: Sequence[int]) -> None:
        """Take in a verify that drafted ``steps``, a candidate; ``accepted`` is not empty."""
        settings = self.settings
        if steps > 0:
            mean = sum(accepted) / len(accepted)
            self.ema = (1 - settings.ema_alpha) * self.ema + settings.ema_alpha * mean
        self.count += 1
        settled = self.count - settings.warmup_batches
        if settled > 0 and settled % settings.update_interval == 0:
            index = self.candidates.index(self.steps)
            target = self.candidates[self._probe() if self.steps == 0 else self._walk(index)]
            if target != self.steps:
                self.reason = f"{self.ema:.2f} accepted drafts a verify at {self.steps} steps"
                self.steps = target
                self.switches += 1

    def _probe(self) -> int:
        target = min(1, len(self.candidates) - 1)
        if target > 0 and self.ema < 0:
            self.ema = self.candidates[target] - 1.0
        return target

    def _walk(self, start: int) -> int:
        """Index of the candidate that the EMA asks for, from the active one at ``start``."""
        index = start
        while index > 0 and self.ema <= self._down_threshold(index):
            index -= 1
        if index == start:
            last = len(self.candidates) - 1
            rise = self.settings.up_hysteresis - 0.5
            while index < last and self.ema > self.candidates[index] + rise:
                index += 1
        if index <= start and self.settings.ceiling_coeff > 0:
            ceiling = max(1, math.ceil(self.ema * self.settings.ceiling_coeff))
            while index > 0 and self.candidates[index] > ceiling:
                index -= 1
        return index

    def _down_threshold(self, index: int) -> float:
        previous = self.candidates[index - 1]
        # No EMA is below 0, so the rule of the other tiers would never turn speculation off.
        base = 0.5 if previous == 0 else previous - 0.5
        return base + self.settings.down_hysteresis


class SlotPolicy(LengthPolicy):
    """A policy with a slot for each range of batch sizes; no slot learns from another's batches.
    ``slots``: by the least batch size; batches below the first bound use the first."""

    def __init__(
        self, name: str, slots: Mapping[int, EmaSlot], tier_of: Callable[[int], Tier]
    ) -> None:
        self.name = name
        self._bounds = sorted(slots)
        self._slots = [slots[bound] for bound in self._bounds]
        steps = sorted({s for slot in self._slots for s in slot.candidates})
        self._budgets = {s: Budget(tier_of(s)) for s in steps}
        self.tiers = tuple(budget.tier for budget in self._budgets.values())
        self._last_batch = 1

    def largest_batch(self, tier: Tier) -> int | None:
        ends: list[int | None] = [*(bound - 1 for bound in self._bounds[1:]), None]
        takes = [tier.steps in slot.candidates for slot in self._slots]
        return ends[max(number for number, taken in enumerate(takes) if taken)]

    def choose(self, view: StepView) -> Budget:
        return self._budgets[self._slot(view.batch).steps]

    def observe(self, outcome: StepOutcome) -> None:
        self._last_batch = outcome.view.batch
        slot, tier = self._slot(self._last_batch), outcome.budget.tier
        if tier.steps not in slot.candidates or tier != self._budgets[tier.steps].tier:
            return
        if outcome.requests:
            slot.observe(tier.steps, outcome.accepted)

    def snapshot(self) -> dict[str, Any]:
        tiers = [self._budgets[slot.steps].tier for slot in self._slots]
        slots = [
            slot_snapshot(bound, tier, s.candidates, s.ema, s.count, s.switches)
            for bound, tier, s in zip(self._bounds, tiers, self._slots, strict=True)
        ]
        slot = self._slot(self._last_batch)
        tier = self._budgets[slot.steps].tier
        return snapshot_of(self.name, slots, tier, slot.reason, 1 + slot.ema)

    def _slot(self, batch_size: int) -> EmaSlot:
        return self._slots[max(0, bisect_right(self._bounds, batch_size) - 1)]
