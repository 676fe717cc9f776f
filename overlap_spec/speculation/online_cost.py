"""A cost model that goes on learning while steps run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np

from overlap_spec.speculation.cost import CostModel, StepShape, Vector
from overlap_spec.tiers import Budget, RowTimes, Tier

# Standard deviations of natural logarithms, at least: a step's time around the model's, the
# machine's load from one step to the next, and each coefficient's own change meanwhile.
STEP_SPREAD, LOAD_SPREAD, DRIFT_SPREAD = 0.06, 0.01, 0.001
# The load's at first, since what was measured was measured under another one; and of a tier's own
# deviation from one step to the next, so that what was found once is looked at again.
FIRST_LOAD_SPREAD, OFFSET_DRIFT_SPREAD = 0.5, 0.0025
# Weight of a step in what is known of how much steps vary; a mean absolute deviation's factor to a
# standard one.
SCATTER_ALPHA, TO_STANDARD = 0.02, 1.25
# A tier's own deviation from the straight lines, as a share of the coefficients' at first, and at
# most.
OFFSET_SHARE, OFFSET_MOST = 0.3, 0.15
# What is added to that by the logarithm of how far a step is beyond all that was measured.
BEYOND_SPREAD = 0.1
# An observation more deviations away than this tells mostly of the machine's load.
CREDIBLE = 2.5
# A coefficient that a fit found to be 0 still takes this share of a pass's time, so that it can
# be learnt.
FLOOR = 1e-3
# The coefficients: by what that is divided, and how vague each is at first beside the others, since
# contexts, masks, prefill and what is beside passes are not measured at the start.
COEFFICIENTS = {
    "verify": (1, 0.0), "verify_node": (4, 0.0), "knee_node": (4, 0.0),
    "verify_context": (256, 0.7),
    "draft": (1, 0.0), "draft_branch": (4, 0.0), "draft_context": (256, 0.7),
    "grammar_node": (4, 1.5), "prefill": (1, 1.5), "prefill_token": (4, 1.5),
    "host": (1, 1.0), "host_tree": (4, 1.0),
}  # fmt: skip


class OnlineCost:
    """A cost model that goes on learning from the times of whole steps.

    An extended Kalman filter over the logarithms of the coefficients, so that none turns negative,
    and of each tier's own deviation from the straight lines, at each power of 2 of the batch. A
    machine's load multiplies all coefficients alike: that is where the process noise lies, so a
    slower machine says little of what one tier costs over another, and a switch between them a
    lot. How much steps vary is learnt from what was not foretold of them; what no deviation
    explains is mostly the load's.

    Args:
        spread: Standard deviation of each coefficient's logarithm at first, around ``model``.
    """

    def __init__(self, model: CostModel, spread: float) -> None:
        self.start, self._knee, self.steps = model, model.knee_nodes, 0
        least = FLOOR * (model.step_ms(StepShape(1, 256, 0, 1, 1)) or 1.0)
        known = [(getattr(model, name), part) for name, (part, _) in COEFFICIENTS.items()]
        self._log = np.array([log(max(value, least / part)) for value, part in known])
        self._first_offset = count = len(self._log)
        self._offset_spread = min(OFFSET_SHARE * spread, OFFSET_MOST)
        self._offsets: dict[tuple[Tier, bool, int], int] = {}
        vague = np.array([vague for _, vague in COEFFICIENTS.values()])
        self._spread = np.diag((vague + spread) ** 2) + FIRST_LOAD_SPREAD**2
        self._noise = np.diag([DRIFT_SPREAD**2] * count) + LOAD_SPREAD**2
        self._scatter = 0.0
        self._kind: tuple[Tier, bool, int] | None = None

    def step_ms(self, shape: StepShape, budget: Budget) -> float:
        """A step's time as it is known now."""
        return float(np.exp(self._gradients([(shape, budget)])[0][0]))

    def compare(self, asked: Sequence[tuple[StepShape, Budget]]) -> tuple[Vector, Vector]:
        """The logarithms of several steps' times, and their covariance."""
        log_ms, at = self._gradients(asked)
        return log_ms, at @ self._spread @ at.T

    def observe(self, shape: StepShape, budget: Budget, step_ms: float) -> None:
        """Take in one step that came right after another."""
        kind = budget.tier, budget.nodes is not None, shape.batch.bit_length()
        if kind != self._kind:
            # The first step of a kind may have been recorded, and overlaps with another kind's.
            self._kind = kind
            return
        (log_ms,), (at,) = self._gradients([(shape, budget)])
        self._update(at, log(step_ms) - float(log_ms))

    def row_times(self) -> RowTimes:
        """What a verified row takes, as it is known now."""
        _, each, beyond = np.exp(self._log[:3]).tolist()
        return RowTimes(each, self._knee, beyond if self._knee else 0.0)

    def model(self) -> CostModel:
        """The coefficients as they are known now."""
        known = np.exp(self._log[: self._first_offset]).tolist()
        numbers = dict(zip(COEFFICIENTS, known, strict=True))
        if not self._knee:
            numbers["knee_node"] = 0.0
        source = self.start.source + (", refitted" if self.steps else "")
        return replace(self.start, **numbers, source=source, tiers=())

    def _update(self, at: Vector, seen: float) -> None:
        self._spread += self._noise
        first = self._first_offset
        toward = self._spread @ at
        noise = max(STEP_SPREAD, self._scatter) ** 2
        variance = float(at @ toward) + noise
        if seen**2 > CREDIBLE**2 * variance:
            # The coefficients' shares of a step add up to one: they take it all together.
            self._spread[:first, :first] += seen**2
            toward = self._spread @ at
            variance += seen**2
        self._log += toward * (seen / variance)
        self._spread -= np.outer(toward, toward) / variance
        self._scatter += SCATTER_ALPHA * (min(abs(seen), 1.0) * TO_STANDARD - self._scatter)
        self.steps += 1

    def _gradients(self, asked: Sequence[tuple[StepShape, Budget]]) -> tuple[Vector, Vector]:
        """Logarithms of steps' times, ``(steps,)``, and their derivatives, a row each."""
        first, offsets = self._first_offset, [self._offset(*each) for each in asked]
        parts = np.exp(self._log[:first]) * [self._counts(shape) for shape, _ in asked]
        totals, at = parts.sum(1), np.zeros((len(asked), len(self._log)))
        at[:, :first] = parts / totals[:, None]
        at[range(len(asked)), offsets] = 1.0
        return np.log(totals) + self._log[offsets], at

    def _counts(self, shape: StepShape) -> tuple[float, ...]:
        """How often a step has what each coefficient is the time of."""
        batch, context, steps, branches, nodes, masks, chunk = shape
        beyond = max(0, nodes - self._knee) if self._knee else 0
        drafts = steps, steps * batch * branches, steps * context
        return (1.0, nodes, beyond, context, *drafts, masks, float(chunk > 0), chunk, 1.0, batch)

    def _offset(self, shape: StepShape, budget: Budget) -> int:
        """Where a tier's own deviation stands; it is entered when it is first asked for."""
        key = budget.tier, budget.nodes is not None, shape.batch.bit_length()
        found = self._offsets.get(key)
        if found is None:
            found = self._offsets[key] = len(self._log)
            self._log = np.append(self._log, self._measured(budget.tier, shape.batch))
            self._spread = np.pad(self._spread, (0, 1))
            most = self.start.most_nodes
            beyond = max(1.0, shape.nodes / most) if most else 1.0
            spread = self._offset_spread + BEYOND_SPREAD * log(beyond)
            self._spread[-1, -1] = spread**2
            self._noise = np.pad(self._noise, (0, 1))
            self._noise[-1, -1] = OFFSET_DRIFT_SPREAD**2
        return found

    def _measured(self, tier: Tier, batch: int) -> float:
        """The deviation that was measured at the nearest batch, between the depths that were."""
        family = [t for t in self.start.tiers if t.branches == tier.top_k]
        if not family:
            return 0.0
        nearest = min((t.batch for t in family), key=lambda b: abs(log(b / batch)))
        known = sorted((t.steps, log(t.over)) for t in family if t.batch == nearest)
        depths, logs = [float(steps) for steps, _ in known], [over for _, over in known]
        return float(np.interp(float(tier.steps), depths, logs))
