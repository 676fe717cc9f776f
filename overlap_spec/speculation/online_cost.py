"""A cost model that goes on learning while steps run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from statistics import median

import numpy as np

from overlap_spec.speculation.cost import CostModel, StepShape, Vector
from overlap_spec.tiers import Budget, RowTimes, Tier

# Steps of one kind whose median time is one observation.
BLOCK_STEPS = 4
# Steps over which those of one block may lie.
RECENT_STEPS = 32
# Standard deviations of natural logarithms, at least: a block's time around the model's, the
# machine's load from one block to the next, and each coefficient's own change meanwhile.
BLOCK_SPREAD, LOAD_SPREAD, DRIFT_SPREAD = 0.04, 0.02, 0.002
# The load's at first, since what was measured was measured under another one; and of a tier's own
# deviation from one block to the next, so that what was found once is looked at again.
FIRST_LOAD_SPREAD, OFFSET_DRIFT_SPREAD = 0.5, 0.005
# The same as a share of that of the steps within blocks, where these vary more.
BLOCK_SHARE = 0.6
# Weight of a block in what is known of that and of the load; a mean absolute deviation's factor to
# a standard one.
SCATTER_ALPHA, TO_STANDARD = 0.1, 1.25
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
    lot. Observations are medians of blocks of steps. How much the load changes is learnt from
    blocks of one kind that follow each other; what no deviation explains is mostly the load's.

    Args:
        spread: Standard deviation of each coefficient's logarithm at first, around ``model``.
    """

    def __init__(self, model: CostModel, spread: float) -> None:
        self.start, self._knee, self.blocks = model, model.knee_nodes, 0
        least = FLOOR * (model.step_ms(StepShape(1, 256, 0, 1, 1)) or 1.0)
        known = [(getattr(model, name), part) for name, (part, _) in COEFFICIENTS.items()]
        self._log = np.array([log(max(value, least / part)) for value, part in known])
        self._first_offset = count = len(self._log)
        self._offset_spread = min(OFFSET_SHARE * spread, OFFSET_MOST)
        self._offsets: dict[tuple[Tier, bool, int], int] = {}
        vague = np.array([vague for _, vague in COEFFICIENTS.values()])
        self._spread = np.diag((vague + spread) ** 2) + FIRST_LOAD_SPREAD**2
        self._noise = np.diag([DRIFT_SPREAD**2] * count) + LOAD_SPREAD**2
        self._scatter, self._load, self._wanders = 0.0, LOAD_SPREAD, False
        self._kind: tuple[Tier, bool, int] | None = None
        self._blocks: dict[tuple[Tier, bool, int], list[tuple[int, StepShape, float]]] = {}
        self._steps = 0

    def step_ms(self, shape: StepShape, budget: Budget) -> float:
        """A step's time as it is known now."""
        return float(exp(self._gradient(shape, budget)[0]))

    def compare(self, asked: Sequence[tuple[StepShape, Budget]]) -> tuple[Vector, Vector]:
        """The logarithms of several steps' times, and their covariance."""
        found = [self._gradient(*each) for each in asked]
        at = np.zeros((len(asked), len(self._log)))
        for row, (_, gradient) in enumerate(found):
            at[row, : len(gradient)] = gradient
        return np.array([log_ms for log_ms, _ in found]), at @ self._spread @ at.T

    def observe(self, shape: StepShape, budget: Budget, step_ms: float) -> None:
        """Take in one step that came right after another."""
        self._steps += 1
        kind = budget.tier, budget.nodes is not None, shape.batch.bit_length()
        if kind != self._kind:
            # The first step of a kind may have been recorded, and overlaps with another kind's.
            self._kind, self._wanders = kind, False
            return
        # Where answers are short the batch changes all the time: a block goes on when its kind
        # comes back.
        block = self._blocks.setdefault(kind, [])
        if block and self._steps - block[0][0] > RECENT_STEPS:
            block.clear()
        block.append((self._steps, shape, log(step_ms)))
        if len(block) == BLOCK_STEPS:
            errors = [log_ms - self._gradient(each, budget)[0] for _, each, log_ms in block]
            block.clear()
            seen = median(errors)
            apart = sum(abs(error - seen) for error in errors) / BLOCK_STEPS
            # One slow step in a block is what the median is for, and no sign of a noisy machine.
            self._scatter += SCATTER_ALPHA * (min(apart, 1.0) * TO_STANDARD - self._scatter)
            if self._wanders:
                moved = min(abs(seen), 1.0) * TO_STANDARD
                self._load += SCATTER_ALPHA * (moved - self._load)
            self._wanders = True
            self._update(self._gradient(shape, budget)[1], seen)

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
        source = self.start.source + (", refitted" if self.blocks else "")
        return replace(self.start, **numbers, source=source, tiers=())

    def _update(self, at: Vector, seen: float) -> None:
        self._spread += self._noise
        first = self._first_offset
        self._spread[:first, :first] += max(0.0, self._load**2 - LOAD_SPREAD**2)
        block = max(BLOCK_SPREAD, BLOCK_SHARE * self._scatter)
        toward = self._spread @ at
        variance = float(at @ toward) + block**2
        if seen**2 > CREDIBLE**2 * variance:
            # The coefficients' shares of a step add up to one: they take it all together.
            self._spread[:first, :first] += seen**2
            toward = self._spread @ at
            variance += seen**2
        self._log += toward * (seen / variance)
        self._spread -= np.outer(toward, toward) / variance
        self.blocks += 1

    def _gradient(self, shape: StepShape, budget: Budget) -> tuple[float, Vector]:
        """Logarithm of a step's time, and its derivatives."""
        first, offset = self._first_offset, self._offset(shape, budget)
        parts = np.exp(self._log[:first]) * self._counts(shape)
        total = float(parts.sum())
        at = np.zeros(len(self._log))
        at[:first] = parts / total
        at[offset] = 1.0
        return log(total) + float(self._log[offset]), at

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
