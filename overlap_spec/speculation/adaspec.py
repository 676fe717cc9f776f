"""AdaSpec (SoCC 2025): length by the drafter's own confidence and a fitted cost model.

Algorithm 1 grows the length while the estimated goodput grows: before a step it predicts whether to
draft at all, and after each draft step it corrects: by what the drafter was sure of, does another
one pay (:class:`overlap_spec.tiers.DraftStop`)? Algorithm 2 then removes the drafts of least
acceptance from the whole batch while the goodput grows. Where a step cannot be stopped, since the
host plans it before the draft's confidences are there (on a GPU), it predicts the length, and how
many drafts stay; the device keeps that many, by the scores that it has drafted by then.
Algorithm 3 makes a plan that takes longer than a TPOT target worth -1. The bonus counts as in Eq. 6
(Algorithm 3 as printed forgets it, and could never turn speculation off).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from overlap_spec.speculation.cost import ASSUMED, ASSUMED_SPREAD, CostModel
from overlap_spec.speculation.memory import PRIOR_RATE
from overlap_spec.speculation.online_cost import OnlineCost
from overlap_spec.speculation.policy import (
    LAUNCH,
    LengthPolicy,
    StepOutcome,
    StepView,
    slot_snapshot,
    snapshot_of,
)
from overlap_spec.tiers import RAGGED_GAIN, Budget, DraftStop, Tier, kept_nodes

# Of a calibration; what a bin starts with, and what it keeps at each new draft.
BINS, BIN_TRIALS, BIN_KEPT = 10, 4.0, 0.995
# Weight of a request's last verify in what is expected of its next one.
ALPHA = 0.2
# Verifies without drafts after which one drafts, since nothing else tells that drafts pay again.
PROBE_EVERY = 128


class Calibration:
    """The drafter's confidence → how often a draft of that confidence is accepted.

    Equal bins, interpolated between their means; a bin starts with trials that take the
    confidence at its word.
    """

    def __init__(self) -> None:
        self._mass = [BIN_TRIALS * (n + 0.5) / BINS for n in range(BINS)]
        self._passed = list(self._mass)
        self._tried = [BIN_TRIALS] * BINS

    def add(self, confidence: float, accepted: bool) -> None:
        """Take in one draft that was reached."""
        n = min(BINS - 1, int(confidence * BINS))
        for sums, new in ((self._mass, confidence), (self._passed, accepted), (self._tried, 1)):
            sums[n] = sums[n] * BIN_KEPT + new

    def add_run(self, confidences: Sequence[float], accepted: int) -> None:
        """Take in one verify: ``accepted`` confidences that were, and the next, which was not."""
        for n, confidence in enumerate(confidences[: accepted + 1]):
            self.add(confidence, n < accepted)

    def rate(self, confidence: float) -> float:
        """How often drafts of ``confidence`` are accepted."""
        at = min(max(confidence, 0.0), 1.0) * BINS - 0.5
        low = min(max(int(at), 0), BINS - 2)
        share = min(max(at - low, 0.0), 1.0)
        left, right = (self._passed[n] / self._tried[n] for n in (low, low + 1))
        return left + share * (right - left)

    def curve(self) -> list[float]:
        """:meth:`rate` at the bins' middles, between which it is straight."""
        return [passed / tried for passed, tried in zip(self._passed, self._tried, strict=True)]

    def snapshot(self) -> list[dict[str, Any]]:
        """Each bin that saw drafts: mean ``confidence``, ``accepted`` share, ``trials``."""
        return [
            {"confidence": m / t, "accepted": p / t, "trials": t - BIN_TRIALS}
            for m, p, t in zip(self._mass, self._passed, self._tried, strict=True)
            if t > BIN_TRIALS
        ]


class Confidences:
    """What each request's next draft will be accepted with, given that the one before it was.

    A smoothed mean of its own confidences, calibrated against what was accepted, for constrained
    and free text apart. A drafter that tells no confidences is known by what was accepted. A
    request without a verify gets the mean of all.
    """

    def __init__(self) -> None:
        self.calibrations = {False: Calibration(), True: Calibration()}
        self._requests: dict[int, float] = {}
        self._mean = {False: PRIOR_RATE, True: PRIOR_RATE}

    def observe(self, outcome: StepOutcome) -> None:
        """Take in one verify."""
        tier = outcome.budget.tier
        if tier.steps:
            for request in outcome.requests:
                kind, seen = request.constrained, request.confidences
                calibration = self.calibrations[kind]
                if seen:
                    if tier.top_k == 1:
                        calibration.add_run(seen, request.accepted)
                    now = sum(calibration.rate(c) for c in seen) / len(seen)
                elif request.drafted:
                    now = request.accepted / min(request.accepted + 1, tier.steps)
                else:
                    continue
                before = self._requests.get(request.request_id, self._mean[kind])
                self._requests[request.request_id] = before + ALPHA * (now - before)
                self._mean[kind] += ALPHA / len(outcome.requests) * (now - self._mean[kind])
        if len(self._requests) > 2 * outcome.view.batch + 64:
            alive = {request.request_id for request in outcome.view.requests}
            self._requests = {i: c for i, c in self._requests.items() if i in alive}

    def of(self, view: StepView) -> list[float]:
        """Of each request; 0 of those that take no drafts."""
        return [
            self._requests.get(r.request_id, self._mean[r.constrained]) if r.speculate else 0.0
            for r in view.requests
        ]


def goodput(tokens: float, step_ms: float, tpot_slo_ms: float | None) -> float:
    """Algorithm 3: tokens per millisecond, -1 where the step breaks the target."""
    if tpot_slo_ms is not None and step_ms > tpot_slo_ms:
        return -1.0
    return tokens / step_ms


def predicted_steps(
    confidences: Sequence[float], costs: Mapping[int, float], tpot_slo_ms: float | None
) -> int:
    """Algorithm 1: the length at which the goodput stops to grow; ``costs``: steps → milliseconds
    of a step that drafts and verifies as many, ascending from 0."""
    shares, tokens = [1.0] * len(confidences), float(len(confidences))
    first, *_, last = costs
    best, best_steps = goodput(tokens, costs[first], tpot_slo_ms), first
    for depth in range(1, last + 1):
        shares = [s * c for s, c in zip(shares, confidences, strict=True)]
        tokens += sum(shares)
        if depth in costs:
            found = goodput(tokens, costs[depth], tpot_slo_ms)
            if found <= best:
                break
            best, best_steps = found, depth
    return best_steps


class AdaSpecPolicy(LengthPolicy):
    """AdaSpec over chains; without ``verifier``, which removes drafts before the verify (Algorithm
    2), the paper's AdaSpec− (Table 2).

    Args:
        tiers: Chains, and off.
        cost: What is known of their time; None: nothing yet.
    """

    weighs_cost = True
    ignores = LAUNCH

    def __init__(
        self, tiers: Sequence[Tier], cost: OnlineCost | None = None, verifier: bool = True
    ) -> None:
        self.tiers = tuple(sorted(tiers, key=lambda t: t.steps))
        self._by_steps = {tier.steps: tier for tier in self.tiers}
        self._least = next(steps for steps in self._by_steps if steps)
        self._budgets = {tier: Budget(tier) for tier in self.tiers}
        self.cost = cost or OnlineCost(ASSUMED, ASSUMED_SPREAD)
        self.confidences, self.verifier, self._corrects = Confidences(), verifier, False
        self._active, self._last = self.tiers[0], StepView(())
        self.count = self.switches = self._off = 0

    def calibrate(self, model: CostModel, spread: float) -> None:
        self.cost = OnlineCost(model, spread)

    def let_stop(self) -> None:
        self._corrects = True

    def choose(self, view: StepView) -> Budget:
        if not view.batch:
            return self._budgets[self.tiers[0]]
        confidences, target = self.confidences.of(view), self._target_ms(view)
        costs = {s: self._ms(view, s, view.batch * (s + 1)) for s in self._by_steps}
        steps = predicted_steps(confidences, costs, target)
        if steps and self._corrects:
            return Budget(self.tiers[-1], stop=self._stop(view, confidences, costs, target))
        if not steps and self._off >= PROBE_EVERY and goodput(1, costs[self._least], target) > 0:
            # What is not drafted is not seen either.
            steps = self._least
        return self._kept(view, confidences, steps, target)

    def _stop(
        self,
        view: StepView,
        confidences: Sequence[float],
        costs: Mapping[int, float],
        target: float | None,
    ) -> DraftStop:
        """Where the step's drafts end, and which are verified."""
        in_time = [0.0] * (self.tiers[-1].steps + 1)
        for steps, ms in costs.items():
            in_time[steps] = ms if target is None or ms <= target else inf
        curves = {kind: known.curve() for kind, known in self.confidences.calibrations.items()}
        told = [curves[r.constrained] if r.speculate else [0.0] * BINS for r in view.requests]
        rows = self.cost.row_times() if self.verifier and view.batch > 1 else None
        each = np.array(confidences, np.float32), np.array(told, np.float32)
        return DraftStop(tuple(in_time), *each, rows)

    def _target_ms(self, view: StepView) -> float | None:
        """What a step may take: its target, and what it prefills, which no draft can change."""
        if view.tpot_slo_ms is None or not view.chunk_tokens:
            return view.tpot_slo_ms
        alone = replace(view, chunk_tokens=0)
        prefill_ms = self._ms(view, 0, view.batch) - self._ms(alone, 0, view.batch)
        return view.tpot_slo_ms + prefill_ms

    def _kept(
        self, view: StepView, confidences: Sequence[float], steps: int, target: float | None
    ) -> Budget:
        """What is verified of a step that drafts so many."""
        tier = self._by_steps[steps]
        if not self.verifier or not steps or view.batch == 1:
            return self._budgets[tier]
        shares = [c ** (d + 1) for c in confidences for d in range(steps)]
        nodes, gain = kept_nodes(
            shares, view.batch, lambda n, rows: goodput(n, self._ms(view, steps, rows), target)
        )
        if gain < 1 + RAGGED_GAIN or nodes == view.batch:
            return self._budgets[tier]
        return Budget(tier, nodes, (tier.nodes,) * view.batch)

    def observe(self, outcome: StepOutcome) -> None:
        view, tier = outcome.view, outcome.budget.tier
        if not view.batch or tier not in self._budgets:
            return
        if outcome.step_ms is not None:
            self.cost.observe(view.shape(outcome.budget), outcome.budget, outcome.step_ms)
        if not outcome.requests:
            return
        self._last = view
        self.count += 1
        self.switches += tier != self._active
        self._active = tier
        self._off = 0 if tier.steps else self._off + 1
        self.confidences.observe(outcome)

    def snapshot(self) -> dict[str, Any]:
        tier, view = self._active, self._last
        ema = accept_length = step_ms = None
        if view.batch:
            confidences = self.confidences.of(view)
            ema = sum(c ** (d + 1) for c in confidences for d in range(tier.steps)) / view.batch
            accept_length, step_ms = 1 + ema, self._ms(view, tier.steps, view.batch * tier.nodes)
        slot = slot_snapshot(1, tier, [*self._by_steps], ema, self.count, self.switches)
        reason = "greatest estimated goodput" if self.count else "nothing has run yet"
        name = "adaspec" if self.verifier else "adaspec_minus"
        return snapshot_of(name, [slot], tier, reason, accept_length, step_ms) | {
            "cost": self.cost.model().to_dict(),
            "calibration": {
                "constrained" if kind else "free": calibration.snapshot()
                for kind, calibration in self.confidences.calibrations.items()
            },
        }

    def _ms(self, view: StepView, steps: int, nodes: int) -> float:
        tier = self._by_steps[steps]
        ragged = nodes != view.batch * tier.nodes
        shape = view.shape(self._budgets[tier])._replace(nodes=nodes)
        return self.cost.step_ms(shape, Budget(tier, nodes) if ragged else self._budgets[tier])
