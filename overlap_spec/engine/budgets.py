"""How much steps draft: the length policy, asked before each step and told after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from overlap_spec.engine.grammar_drafts import GrammarDrafts, widened
from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.speculation.policy import (
    LengthPolicy,
    RequestOutcome,
    RequestView,
    StaticPolicy,
    StepOutcome,
    StepView,
)
from overlap_spec.steps import HostTrees, StepResult
from overlap_spec.tiers import Budget, Tier
from overlap_spec.worker.drafter_guard import DrafterGuard

log = logging.getLogger(__name__)
T = TypeVar("T")
# Weight of a new step.
ALPHA = 0.05


class Budgets:
    """What each step may draft and verify, and what came of it.

    Args:
        policy: The length policy; where it raises, ``fixed``, one of its tiers, takes its place
            from then on, and no request notices.
        guard: A drafter that is paused drafts nothing.
        widens: Whether there may be wide tiers, for what the grammar tells (``config.tries``).
        tpot_slo_ms: Target of the requests that have none.
    """

    def __init__(
        self,
        policy: LengthPolicy,
        fixed: Tier,
        guard: DrafterGuard,
        drafts: GrammarDrafts,
        widens: bool,
        tpot_slo_ms: float | None,
    ) -> None:
        self.policy, self.widens, self._fixed = policy, widens, fixed
        # What the policy raised.
        self._error: str | None = None
        self._guard, self._drafts, self._tpot_slo_ms = guard, drafts, tpot_slo_ms
        # What the steps under way were planned for, the newest last.
        self._views: dict[int, StepView] = {}
        # Smoothed, the time of steps that prefilled nothing; of requests with a TPOT target, that
        # have ended, how many there were and kept it.
        self._observed: dict[str, Any] = {
            "observed_accept_length": None,
            "observed_step_ms": None,
            "tpot_requests": 0,
            "tpot_attained": 0,
        }

    def choose(self, trees: list[SequenceState], index: int, chunk_tokens: int) -> Budget:
        """What step ``index`` over ``trees`` may draft and verify."""
        view = StepView(tuple([self._view(s) for s in trees]), chunk_tokens)
        self._views[index] = view
        budget = self._ask(lambda policy: _chosen(policy, view))
        tier = self._guard.allow(budget.tier)
        if tier != budget.tier:
            budget = Budget(tier)
        if self.widens:
            budget = widened(budget, self._drafts.sizes(trees, tier))
        tier = budget.tier
        if tier.nodes == 1 or all(r.speculate for r in view.requests):
            return budget
        most = budget.most or (tier.nodes,) * view.batch
        each = zip(view.requests, most, strict=True)
        most = tuple(nodes if request.speculate else 1 for request, nodes in each)
        nodes = sum(most) if budget.nodes is None else min(budget.nodes, sum(most))
        return replace(budget, nodes=nodes, most=most)

    def drop(self, index: int) -> None:
        """Nothing comes of a step."""
        del self._views[index]

    def note(self, request_ids: Sequence[int], trees: HostTrees) -> None:
        """Take in what the lane told of a step's trees: see :meth:`GrammarDrafts.note`."""
        if self.widens:
            self._drafts.note(request_ids, trees)

    def observe(self, result: StepResult) -> None:
        """Tell the length policy what a step's trees got, and how long they took."""
        plan, view = result.plan, self._views[result.plan.index]
        self._views = {i: v for i, v in self._views.items() if i > plan.index}
        whole = plan.budget.nodes is None
        requests = [
            RequestOutcome(
                asked.request_id, r.accepted, r.drafted, asked.constrained, r.confidences
            )
            for asked, r in zip(view.requests, result.rows, strict=False)
            # Drafts of a request that takes none say nothing of acceptance, nor do those that the
            # budget left out. A drafter that finds nothing to draft has had nothing accepted.
            if r.tokens and (r.drafted or not plan.tier.steps or (whole and asked.speculate))
        ]
        outcome = StepOutcome(view, plan.budget, requests, result.step_ms, result.verified_rows)
        # A wide tier is none of the policy's, and its trees are the grammar's too.
        if plan.tier.base is None:
            self._ask(lambda policy: policy.observe(outcome))
        if requests:
            self._smooth("observed_accept_length", 1 + sum(outcome.accepted) / len(requests))
        if outcome.step_ms is not None and not view.chunk_tokens and view.batch:
            self._smooth("observed_step_ms", outcome.step_ms)

    def _smooth(self, name: str, now: float) -> None:
        before = self._observed[name]
        self._observed[name] = now if before is None else before + ALPHA * (now - before)

    def end(self, sequences: Sequence[SequenceState]) -> None:
        """Take in requests that have ended: whether they kept their targets."""
        for sequence in sequences:
            self._drafts.leave(sequence.request.id)
            target_ms = self._target_ms(sequence)
            if target_ms is not None:
                self._observed["tpot_requests"] += 1
                self._observed["tpot_attained"] += sequence.stats.tpot_ms <= target_ms

    def snapshot(self) -> dict[str, Any]:
        """State as plain data: the policy's, ``error`` (what made it give way, else None), and what
        was observed."""
        told = self._ask(lambda policy: policy.snapshot())
        return told | {"error": self._error} | self._observed

    def _ask(self, ask: Callable[[LengthPolicy], T]) -> T:
        try:
            return ask(self.policy)
        except Exception as error:  # a policy's fault costs no request
            if self._error is not None:
                raise
            self._error, name = f"{type(error).__name__}: {error}", type(self.policy).__name__
            told = "length policy %s failed, static from now on: %s"
            log.warning(told, name, self._error, exc_info=error)
            self.policy = StaticPolicy(self._fixed, reason="the policy failed")
            return ask(self.policy)

    def _target_ms(self, sequence: SequenceState) -> float | None:
        own = sequence.request.sampling.tpot_slo_ms
        return self._tpot_slo_ms if own is None else own

    def _view(self, sequence: SequenceState) -> RequestView:
        request, constrained = sequence.request, sequence.matcher is not None
        tokens = len(request.prompt_ids) + len(sequence.output_ids)
        asked = request.sampling.speculate, self._target_ms(sequence)
        return RequestView(request.id, tokens, constrained, *asked, sequence.confidences)


def _chosen(policy: LengthPolicy, view: StepView) -> Budget:
    budget = policy.choose(view)
    if budget.tier not in policy.tiers:
        raise ValueError(f"{budget.tier} is none of the policy's tiers")
    return budget
