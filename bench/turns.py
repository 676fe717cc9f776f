"""Several length policies that take turns in one engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlap_spec.engine import Engine
from overlap_spec.engine.start_up import cost_model
from overlap_spec.speculation.cost import CostModel
from overlap_spec.speculation.policy import LengthPolicy, StepOutcome, StepView
from overlap_spec.speculation.presets import nearest_tier
from overlap_spec.tiers import Budget, Tier


class Turns(LengthPolicy):
    """One policy at a time decides, and is told of the steps that it decided.

    All of them draft, verify and record with one engine's memory: two engines of the same settings
    differ by more than policies do.

    Args:
        policies: By name; the first one begins.

    Attributes:
        steps: Of every step since :meth:`take`, for a JSON line: draft steps, branches, verified
            rows, trees, whether there was prefill beside them, accepted drafts of each request,
            and milliseconds (None where the worker was at rest before).
    """

    weighs_cost = True

    def __init__(self, policies: Mapping[str, LengthPolicy]) -> None:
        self._policies = dict(policies)
        self._now = next(iter(self._policies))
        self.tiers: tuple[Tier, ...] = tuple(
            sorted(
                {tier for policy in policies.values() for tier in policy.tiers},
                key=lambda tier: (tier.steps, tier.top_k, tier.nodes),
            )
        )
        self.steps: list[list[Any]] = []

    def take(self, name: str) -> None:
        """Let a policy decide from now on; no request may be running."""
        self._now, self.steps = name, []

    def states(self) -> dict[str, dict[str, Any]]:
        """Every policy's snapshot."""
        return {name: policy.snapshot() for name, policy in self._policies.items()}

    def calibrate(self, model: CostModel, spread: float) -> None:
        for policy in self._policies.values():
            if policy.weighs_cost:
                policy.calibrate(model, spread)

    def let_stop(self) -> None:
        for policy in self._policies.values():
            policy.let_stop()

    def largest_batch(self, tier: Tier) -> int | None:
        limits = [p.largest_batch(tier) for p in self._policies.values() if tier in p.tiers]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == len(limits) else None

    def choose(self, view: StepView) -> Budget:
        return self._policies[self._now].choose(view)

    def observe(self, outcome: StepOutcome) -> None:
        tier, view = outcome.budget.tier, outcome.view
        if view.batch:
            self.steps.append(
                [tier.steps, tier.top_k, outcome.verified_rows, view.batch,
                 bool(view.chunk_tokens), outcome.accepted, outcome.step_ms]
            )  # fmt: skip
        self._policies[self._now].observe(outcome)

    def snapshot(self) -> dict[str, Any]:
        return self._policies[self._now].snapshot()


def install(engine: Engine, policies: Mapping[str, LengthPolicy]) -> Turns:
    """Give an engine that has run nothing yet these policies, measured as a server's are.

    Args:
        engine: Its own policy drafts at least as far as any of these.
    """
    turns, core = Turns(policies), engine.core
    most = max(tier.window_tokens for tier in core.budgets.policy.tiers)
    if max(tier.window_tokens for tier in turns.tiers) > most:
        raise ValueError(f"a policy drafts more than the {most} tokens that the engine reserves")
    core.budgets.policy = turns
    # As an engine lets its own policy: what is measured is what it would do.
    if core.worker.traits.stops_drafts and not core.budgets.widens:
        turns.let_stop()
    launch = nearest_tier(core.config, turns.tiers)
    turns.calibrate(*cost_model(core.config, core.worker, launch, turns.tiers, 0.0))
    while engine.prepare_next():
        pass
    return turns
