"""What happens when a drafter raises: drafts are off for a while, and no request notices."""

from __future__ import annotations

import logging
from typing import Any

from overlap_spec.tiers import OFF, Tier

log = logging.getLogger(__name__)

FIRST_PAUSE_STEPS = 32
LONGEST_PAUSE_STEPS = 2**14


class DrafterGuard:
    """A ``with`` block around what a drafter does: where it raises, it pauses, and is tried again,
    each time after twice as many steps. One that has worked for as long as its last pause is
    trusted as at first.

    Args:
        name: The drafter's, for the log and the snapshot.
        fatal: Whether the block raises RuntimeError instead: where all ranks draft, since the
            others may have drafted, and compute without meaning from then on.

    Attributes:
        fault: What the drafter raised, while it is not used for that.
        faults: How often the drafter was paused.
    """

    def __init__(self, name: str, fatal: bool = False) -> None:
        self._name, self._fatal = name, fatal
        self._pause, self._left, self._worked = FIRST_PAUSE_STEPS, 0, 0
        self._error: str | None = None
        self.fault: Exception | None = None
        self.faults = 0

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._fatal:
            text = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"the drafter failed in one of several ranks: {text}") from error
        self.fault = error
        return True

    def allow(self, tier: Tier) -> Tier:
        """``tier``, or none while the drafter is paused; called once for every step."""
        fault = self.fault
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
            told = "drafter %s failed, no drafts for %d steps: %s"
            log.warning(told, self._name, self._left, self._error, exc_info=fault)
        self._left -= 1
        if not self._left:
            self.fault = None
        return OFF

    def snapshot(self) -> dict[str, Any]:
        """State as plain data."""
        return {
            "name": self._name,
            "paused": self._left > 0,
            "faults": self.faults,
            "last_error": self._error,
        }
