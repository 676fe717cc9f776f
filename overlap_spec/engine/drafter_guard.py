"""What happens when a drafter raises: drafts are off for a while, and no request notices."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from overlap_spec.types import Tier

log = logging.getLogger(__name__)

OFF = Tier(0, 1, 1)
FIRST_PAUSE_STEPS = 32
LONGEST_PAUSE_STEPS = 2**14


class DraftingWorker(Protocol):
    """What the guard asks of the worker."""

    @property
    def drafter_fault(self) -> Exception | None:
        """What the drafter raised, while it is not used for that."""

    @property
    def refused_nodes(self) -> int:
        """Drafted nodes that broke the drafters' contract."""

    def retry_drafter(self) -> None:
        """Use the drafter again."""


class DrafterGuard:
    """Pauses a drafter that raised, and tries it again, each time after twice as many steps.

    A drafter that has worked for as long as its last pause is trusted as at first.

    Args:
        name: The drafter's, for the log and the snapshot.

    Attributes:
        faults: How often the drafter was paused.
    """

    def __init__(self, worker: DraftingWorker, name: str) -> None:
        self._worker, self._name = worker, name
        self._pause, self._left, self._worked = FIRST_PAUSE_STEPS, 0, 0
        self._error: str | None = None
        self.faults = 0

    def allow(self, tier: Tier) -> Tier:
        """``tier``, or none while the drafter is paused; called once for every step."""
        fault = self._worker.drafter_fault
        if fault is None:
            self._worked += 1
            if self._worked >= self._pause:
                self._pause = FIRST_PAUSE_STEPS
            return tier
        if not self._left:
            self.faults += 1
            self._error = f"{type(fault).__name__}: {fault}"
            self._left, self._worked = self._pause, 0
            self._pause = min(2 * self._pause, LONGEST_PAUSE_STEPS)
            log.warning(
                "drafter %s failed, no drafts for %d steps: %s",
                self._name,
                self._left,
                self._error,
                exc_info=fault,
            )
        self._left -= 1
        if not self._left:
            self._worker.retry_drafter()
        return OFF

    def snapshot(self) -> dict[str, Any]:
        """State as plain data: ``name``, ``paused`` (whether drafts are off), ``faults``,
        ``last_error``, None where there was none, and ``refused_nodes``: drafted nodes that broke
        the contract and were not verified."""
        return {
            "name": self._name,
            "paused": self._left > 0,
            "faults": self.faults,
            "last_error": self._error,
            "refused_nodes": self._worker.refused_nodes,
        }
