"""Slots: ranges of batch sizes, each with a ladder of steps of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overlap_spec.speculation.policy import (
    LengthPolicy,
    StepOutcome,
    StepView,
    active_snapshot,
    slot_snapshot,
)
from overlap_spec.types import Budget, Tier


class Slot(ABC):
    """One range of batch sizes: its candidate steps, the active one, and what it has seen.

    Attributes:
        candidates: Steps it may choose, ascending and distinct.
        steps: The active ones. At first the launch steps, or the middle candidate where these are
            no candidate (of an even number, the upper middle).
        count: Verifies observed.
        switches: Changes of ``steps``.
        reason: Of the last change.
    """

    def __init__(self, candidate_steps: Sequence[int], launch_steps: int) -> None:
        self.candidates = tuple(sorted(set(candidate_steps)))
        middle = self.candidates[len(self.candidates) // 2]
        self.steps = launch_steps if launch_steps in self.candidates else middle
        self.count = 0
        self.switches = 0
        self.reason = "launch"

    @property
    @abstractmethod
    def ema(self) -> float:
        """Smoothed count of accepted drafts a verify, bonus not counted."""

    @abstractmethod
    def observe(self, steps: int, accepted: Sequence[int]) -> None:
        """Take in a verify that drafted ``steps``, a candidate; ``accepted`` is not empty."""

    def clock(self, steps: int, step_ms: float) -> None:  # noqa: ARG002
        """Take in how long a step that drafted ``steps`` and prefilled nothing took."""
        return

    def _switch(self, steps: int) -> None:
        if steps != self.steps:
            self.reason = f"{self.ema:.2f} accepted drafts a verify at {self.steps} steps"
            self.steps = steps
            self.switches += 1


class SlotPolicy(LengthPolicy):
    """A policy with a slot for each range of batch sizes; no slot learns from another's batches.

    Args:
        name: What the policy is called in its snapshot.
        slots: Least batch size of a slot → the slot. Batches below the first bound use the first.
        tier_of: Tier of a number of steps.
    """

    def __init__(
        self, name: str, slots: Mapping[int, Slot], tier_of: Callable[[int], Tier]
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
        if outcome.step_ms is not None and not outcome.view.chunk_tokens:
            slot.clock(tier.steps, outcome.step_ms)

    def snapshot(self) -> dict[str, Any]:
        slots = [
            slot_snapshot(bound, self._budgets[slot.steps].tier, slot.candidates)
            | {"ema": slot.ema, "count": slot.count, "switches": slot.switches}
            for bound, slot in zip(self._bounds, self._slots, strict=True)
        ]
        totals = {key: sum(slot[key] for slot in slots) for key in ("count", "switches")}
        slot = self._slot(self._last_batch)
        active = active_snapshot(self._budgets[slot.steps].tier, slot.reason, 1 + slot.ema)
        return {"policy": self.name, **totals, "active": active, "slots": slots}

    def _slot(self, batch_size: int) -> Slot:
        return self._slots[max(0, bisect_right(self._bounds, batch_size) - 1)]
