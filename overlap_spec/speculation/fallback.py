"""What happens when a length policy raises: a fixed tier from then on, and no request notices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from overlap_spec.speculation.cost import CostModel
from overlap_spec.speculation.policy import LengthPolicy, StepOutcome, StepView
from overlap_spec.tiers import Budget, Tier

log = logging.getLogger(__name__)


class FallbackPolicy(LengthPolicy):
    """A policy until it raises, another one after that.

    Args:
        policy: May raise in any method.
        static: Takes its place; must not raise.

    Attributes:
        error: What it raised first, None while it has not.
    """

    def __init__(self, policy: LengthPolicy, static: LengthPolicy) -> None:
        self.policy, self._static = policy, static
        self.error: str | None = None
        self.tiers = tuple(dict.fromkeys((*policy.tiers, *static.tiers)))

    @property
    def weighs_cost(self) -> bool:  # type: ignore[override]
        return self.policy.weighs_cost

    def calibrate(self, model: CostModel, spread: float) -> None:
        self.policy.calibrate(model, spread)

    def tell_waits(self, wait_ms: Callable[[Tier], float]) -> None:
        self.policy.tell_waits(wait_ms)

    def let_stop(self) -> None:
        self.policy.let_stop()

    def largest_batch(self, tier: Tier) -> int | None:
        if tier in self._static.tiers:
            return self._static.largest_batch(tier)
        return self.policy.largest_batch(tier)

    def choose(self, view: StepView) -> Budget:
        try:
            budget = self.policy.choose(view)
            if budget.tier not in self.tiers:
                raise ValueError(f"{budget.tier} is none of the policy's tiers")
            return budget
        except Exception as error:  # a policy's fault costs no request
            self._fall_back(error)
            return self.policy.choose(view)

    def observe(self, outcome: StepOutcome) -> None:
        try:
            self.policy.observe(outcome)
        except Exception as error:  # a policy's fault costs no request
            self._fall_back(error)

    def snapshot(self) -> dict[str, Any]:
        """The policy's, and ``error``: what made it give way."""
        try:
            return self.policy.snapshot() | {"error": self.error}
        except Exception as error:  # a policy's fault costs no request
            self._fall_back(error)
            return self.policy.snapshot() | {"error": self.error}

    def _fall_back(self, error: Exception) -> None:
        if self.policy is self._static:
            raise error
        self.error = f"{type(error).__name__}: {error}"
        log.warning(
            "length policy %s failed, static from now on: %s",
            type(self.policy).__name__,
            self.error,
            exc_info=error,
        )
        self.policy = self._static
