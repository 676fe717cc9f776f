"""What an engine does between requests, so that later ones need not wait for it."""

from __future__ import annotations

from overlap_spec.config import EngineConfig
from overlap_spec.engine.budgets import Budgets
from overlap_spec.engine.cost_model import tier_costs
from overlap_spec.scheduler.scheduler import Scheduler
from overlap_spec.speculation.presets import nearest_tier
from overlap_spec.worker.jobs import prepare_next
from overlap_spec.worker.worker import Worker


class Preparation:
    """Records what tiers lack, lest their first step wait for that (0.1 s and more), and measures
    them all before the first request."""

    def __init__(
        self, config: EngineConfig, worker: Worker, scheduler: Scheduler, budgets: Budgets
    ) -> None:
        self._config, self._worker, self._scheduler = config, worker, scheduler
        self._budgets, self._measures = budgets, budgets.policy.weighs_cost

    def next(self) -> bool:
        """Do one thing; False where nothing is left to do. No request may be running."""
        worker, policy = self._worker, self._budgets.policy
        made = worker.do(prepare_next, policy.tiers)
        worker.rest()
        if made.get():
            return True
        # To measure is to write to pages.
        if not self._measures or self._scheduler.allocator.touched:
            return False
        self._measures = False
        launch = nearest_tier(self._config, policy.tiers)
        found = tier_costs(self._config, worker, launch, policy.tiers)
        if found is not None:
            policy.calibrate(*found)
        return True
