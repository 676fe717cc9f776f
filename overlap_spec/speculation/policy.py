"""The contract of length policies, and the slots of batch sizes that adaptive ones share.

A policy is asked for a tier before a step drafts and told what its verify accepted. It belongs to
the thread that plans steps, and takes no lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overlap_spec.types import Tier


class LengthPolicy(ABC):
    """Decides how much each step drafts.

    Attributes:
        tiers: Every tier that it may choose, distinct, by steps: what buffers and graphs are for.
    """

    tiers: tuple[Tier, ...]

    @abstractmethod
    def choose(self, batch_size: int) -> Tier:
        """Tier of the next step, whose trees belong to ``batch_size`` requests. Changes nothing."""

    def nodes(self, batch_size: int, tier: Tier) -> int | None:  # noqa: ARG002
        """Nodes of the whole batch that a step with ``tier`` verifies, roots included; None: all.

        At least ``batch_size``. The device takes the best by score.
        """
        return None

    @abstractmethod
    def observe(self, batch_size: int, tier: Tier, accepted: Sequence[int]) -> None:
        """Take in one verify.

        Results come in the order of their steps, each once. They may come late: the tier chosen
        for later steps may have been drafted with already, and ``tier`` may no longer be active.

        Args:
            batch_size: What ``choose`` was asked with for that step, though requests have ended
                since.
            tier: What that step drafted with. A tier that this batch size cannot be given was
                someone else's choice, and the result is passed over.
            accepted: Accepted drafts of each request that is still there: the bonus not counted,
                stop rules not yet applied, at most ``tier.steps`` each. None at all: no batch.
        """

    def clock(self, batch_size: int, tier: Tier, step_ms: float) -> None:  # noqa: ARG002
        """Take in how long a whole step of trees alone took, in milliseconds.

        A policy that does not weigh time needs none of it.
        """
        return

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """State as plain data, for ``/server_info``.

        Keys: ``policy``, ``count`` (verifies observed), ``switches`` and ``slots``, a list of
        ``min_batch_size``, ``steps``, ``top_k``, ``nodes``, ``candidate_steps``, ``ema``
        (accepted drafts a verify; None where it is not tracked), ``count``, ``switches``.
        """


class Slot(ABC):
    """One range of batch sizes: its candidate steps, the active one, and what it has seen.

    Attributes:
        candidates: Steps it may choose, ascending and distinct.
        steps: The active ones. At first the launch steps, or the middle candidate where these are
            no candidate (of an even number, the upper middle).
        count: Verifies observed.
        switches: Changes of ``steps``.
    """

    def __init__(self, candidate_steps: Sequence[int], launch_steps: int) -> None:
        self.candidates = tuple(sorted(set(candidate_steps)))
        middle = self.candidates[len(self.candidates) // 2]
        self.steps = launch_steps if launch_steps in self.candidates else middle
        self.count = 0
        self.switches = 0

    @property
    @abstractmethod
    def ema(self) -> float:
        """Smoothed count of accepted drafts a verify, bonus not counted."""

    @abstractmethod
    def observe(self, steps: int, accepted: Sequence[int]) -> None:
        """Take in a verify that drafted ``steps``, a candidate; ``accepted`` is not empty."""

    def clock(self, steps: int, step_ms: float) -> None:  # noqa: ARG002
        """Take in how long a step that drafted ``steps`` took, in milliseconds."""
        return

    def _switch(self, steps: int) -> None:
        if steps != self.steps:
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
        self._tiers = {s: tier_of(s) for s in steps}
        self.tiers = tuple(self._tiers.values())

    def choose(self, batch_size: int) -> Tier:
        return self._tiers[self._slot(batch_size).steps]

    def observe(self, batch_size: int, tier: Tier, accepted: Sequence[int]) -> None:
        slot = self._slot(batch_size)
        ours = tier.steps in slot.candidates and tier == self._tiers[tier.steps]
        if accepted and ours:
            slot.observe(tier.steps, accepted)

    def clock(self, batch_size: int, tier: Tier, step_ms: float) -> None:
        slot = self._slot(batch_size)
        if tier == self._tiers.get(tier.steps) and tier.steps in slot.candidates:
            slot.clock(tier.steps, step_ms)

    def snapshot(self) -> dict[str, Any]:
        slots = [
            slot_snapshot(bound, self._tiers[slot.steps], slot.candidates)
            | {"ema": slot.ema, "count": slot.count, "switches": slot.switches}
            for bound, slot in zip(self._bounds, self._slots, strict=True)
        ]
        totals = {key: sum(slot[key] for slot in slots) for key in ("count", "switches")}
        return {"policy": self.name, **totals, "slots": slots}

    def _slot(self, batch_size: int) -> Slot:
        return self._slots[max(0, bisect_right(self._bounds, batch_size) - 1)]


def slot_snapshot(bound: int, tier: Tier, candidates: Sequence[int]) -> dict[str, Any]:
    """What a snapshot says of a slot's choice, before its figures."""
    return {
        "min_batch_size": bound,
        "steps": tier.steps,
        "top_k": tier.top_k,
        "nodes": tier.nodes,
        "candidate_steps": list(candidates),
    }
