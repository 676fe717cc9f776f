"""What a step costs: linear in contexts and batch tokens, with a knee, and learnt while it runs.

AdaSpec (SoCC 2025), Eq. 1 to 4: draft and verify passes take ``α·N_context + γ·N_batch + δ``. A
pass leaves the memory-bound regime at some batch, so verify has a second slope from a knee on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from math import exp, log
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_spec.types import Budget, Tier

Vector = NDArray[np.float64]

# Steps of one kind whose median time is one observation.
BLOCK_STEPS = 4
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
# The load's at first, since what was measured was measured under another one; and of a tier's own
# deviation from one block to the next, so that what was found once is looked at again.
FIRST_LOAD_SPREAD, OFFSET_DRIFT_SPREAD = 0.5, 0.005
# The same as shares of that of the steps within blocks, on a machine where these vary more.
BLOCK_SHARE, LOAD_SHARE = 0.6, 0.3
# Weight of a block in what is known of that; a mean absolute deviation's factor to a standard one.
SCATTER_ALPHA, TO_STANDARD = 0.1, 1.25
# A tier's own deviation from the straight lines, as a share of the coefficients' at first, and at
# most.
OFFSET_SHARE, OFFSET_MOST = 0.6, 0.15
# What is added to that by the logarithm of how far a step is beyond all that was measured.
BEYOND_SPREAD = 0.2
# An observation more deviations away than this tells mostly of the machine's load.
CREDIBLE = 2.5
# A coefficient that a fit found to be 0 still takes this share of a pass's time, so that it can
# be learnt.
FLOOR = 1e-3
# A knee must make the fit's error this much smaller.
KNEE_GAIN = 0.8


class StepShape(NamedTuple):
    """What a step's time depends on.

    ``batch``: trees; ``context_tokens``: of all their requests; ``steps`` and ``branches``: draft
    steps and tokens a tree of each; ``nodes``: verified rows, of which ``grammar_nodes`` need
    masks; ``chunk_tokens``: prefilled beside them.
    """

    batch: int
    context_tokens: int
    steps: int
    branches: int
    nodes: int
    grammar_nodes: int = 0
    chunk_tokens: int = 0


def shape_of(
    budget: Budget, batch: int, context_tokens: int, constrained: int = 0, chunk_tokens: int = 0
) -> StepShape:
    """The shape of a step with ``budget``, ``constrained`` of whose requests have a grammar."""
    tier = budget.tier
    nodes = batch * tier.nodes if budget.nodes is None else budget.nodes
    share = constrained / batch if batch else 0.0
    return StepShape(
        batch,
        context_tokens,
        tier.steps,
        tier.top_k,
        nodes,
        round(share * nodes),
        chunk_tokens,
    )


@dataclass(frozen=True)
class CostModel:
    """Coefficients in milliseconds; a name is what one more of it costs.

    Attributes:
        verify: A verify pass by itself.
        verify_node, verify_context: A verified row; a token of context.
        knee_nodes: Rows from which on ``knee_node`` is added for each; 0: there is no knee.
        draft, draft_branch, draft_context: A draft step; a token of it; a token of context.
        grammar_node: What is exposed of a row's mask.
        prefill, prefill_token: Prefill beside the trees; a token of it.
        most_nodes: The most rows that were measured; 0: nothing was.
        source: Where it comes from, in words.
        error: Median relative error of the fit, None where nothing was fitted.
        worst_error: The largest.
    """

    verify: float
    verify_node: float
    verify_context: float
    draft: float
    draft_branch: float
    draft_context: float
    knee_nodes: int = 0
    knee_node: float = 0.0
    grammar_node: float = 0.0
    prefill: float = 0.0
    prefill_token: float = 0.0
    most_nodes: int = 0
    source: str = "assumed"
    error: float | None = None
    worst_error: float | None = None

    def verify_ms(self, nodes: int, context_tokens: int) -> float:
        """A verify pass over ``nodes`` rows."""
        beyond = max(0, nodes - self.knee_nodes) if self.knee_nodes else 0
        return (
            self.verify
            + self.verify_node * nodes
            + self.knee_node * beyond
            + self.verify_context * context_tokens
        )

    def draft_ms(self, batch: int, steps: int, branches: int, context_tokens: int) -> float:
        """All draft steps."""
        each = self.draft + self.draft_branch * batch * branches
        return steps * (each + self.draft_context * context_tokens)

    def step_ms(self, shape: StepShape) -> float:
        """A whole step."""
        return (
            self.verify_ms(shape.nodes, shape.context_tokens)
            + self.draft_ms(shape.batch, shape.steps, shape.branches, shape.context_tokens)
            + self.grammar_node * shape.grammar_nodes
            + self.prefill * (shape.chunk_tokens > 0)
            + self.prefill_token * shape.chunk_tokens
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Raises TypeError, ValueError where a coefficient is missing, unknown or no number."""
        model = cls(**data)
        numbers = [value for name, value in data.items() if name not in ("source", "error")]
        if not all(isinstance(n, int | float) and 0 <= n < 1e12 for n in numbers if n is not None):
            raise ValueError("coefficients must be numbers >= 0")
        return model


# In units of a step that drafts nothing: what a policy starts from where nothing was measured.
ASSUMED = CostModel(
    verify=0.9,
    verify_node=0.02,
    verify_context=2e-5,
    draft=0.08,
    draft_branch=0.005,
    draft_context=2e-6,
    grammar_node=0.002,
    prefill=0.1,
    prefill_token=0.02,
)

# Standard deviations of the coefficients' logarithms, by where they come from.
ASSUMED_SPREAD, STARTUP_SPREAD, PROFILE_SPREAD = 0.6, 0.25, 0.1


def scaled(model: CostModel, factor: float) -> CostModel:
    """``model`` on a machine that takes ``factor`` times as long."""
    names = [f.name for f in fields(model) if f.default is MISSING]
    names += ["knee_node", "grammar_node", "prefill", "prefill_token"]
    return replace(model, **{name: factor * getattr(model, name) for name in names})


class VerifyTime(NamedTuple):
    """A measured verify pass."""

    nodes: int
    context_tokens: int
    ms: float


class DraftTime(NamedTuple):
    """Measured draft steps, all together."""

    batch: int
    context_tokens: int
    steps: int
    branches: int
    ms: float


def fit(verifies: Sequence[VerifyTime], drafts: Sequence[DraftTime], source: str) -> CostModel:
    """The model of least relative squares with coefficients >= 0; a knee where it helps.

    Args:
        verifies: At least one.
        drafts: May be empty.
    """
    wanted = np.array([v.ms for v in verifies])
    # What never varies cannot be fitted: it is taken to be what is assumed of a pass as long.
    unit = float(np.median(wanted)) / ASSUMED.verify_ms(1, 0)
    varies = [len({v[n] for v in verifies}) > 1 for n in (0, 1)]
    lines = np.array(
        [[1.0, v.nodes * varies[0], v.context_tokens * varies[1], 0] for v in verifies]
    )
    best, knee = nonnegative(lines / wanted[:, None], np.ones(len(wanted))), 0
    error = _squares(lines @ best, wanted)
    for at in sorted({v.nodes for v in verifies})[1:-1]:
        bent = lines.copy()
        bent[:, 3] = np.maximum(0.0, np.array([v.nodes for v in verifies]) - at)
        found = nonnegative(bent / wanted[:, None], np.ones(len(wanted)))
        bent_error = _squares(bent @ found, wanted)
        if bent_error < error * KNEE_GAIN and len(wanted) > 4:
            best, knee, error = found, at, bent_error
    if not varies[0]:
        best[1] = unit * ASSUMED.verify_node
        best[0] = max(best[0] - best[1] * verifies[0].nodes, 0.0)
    if not varies[1]:
        best[2] = unit * ASSUMED.verify_context
    draft = unit * np.array([ASSUMED.draft, ASSUMED.draft_branch, ASSUMED.draft_context])
    if drafts:
        took = np.array([d.ms for d in drafts])
        columns = [(1.0, d.batch * d.branches, d.context_tokens) for d in drafts]
        per_step = np.array(columns)
        per_step[:, np.ptp(per_step, axis=0) == 0] = 0.0
        per_step[:, 0] = 1.0
        rows = per_step * np.array([[d.steps] for d in drafts])
        found = nonnegative(rows / took[:, None], np.ones(len(took)))
        draft = np.where(per_step.any(axis=0), found, draft)
    model = CostModel(
        verify=float(best[0]),
        verify_node=float(best[1]),
        verify_context=float(best[2]),
        knee_nodes=knee,
        knee_node=float(best[3]) if knee else 0.0,
        draft=float(draft[0]),
        draft_branch=float(draft[1]),
        draft_context=float(draft[2]),
        most_nodes=max(v.nodes for v in verifies),
        source=source,
    )
    errors = [abs(model.verify_ms(v.nodes, v.context_tokens) / v.ms - 1) for v in verifies]
    errors += [
        abs(model.draft_ms(d.batch, d.steps, d.branches, d.context_tokens) / d.ms - 1)
        for d in drafts
    ]
    return replace(model, error=median(errors), worst_error=max(errors))


def _squares(found: Vector, wanted: Vector) -> float:
    return float(np.sum((found / wanted - 1) ** 2))


def nonnegative(rows: Vector, wanted: Vector) -> Vector:
    """The x >= 0 of least ``|rows x - wanted|²``, by Lawson and Hanson's active sets.

    Args:
        rows: ``(n, m)``. ``wanted``: ``(n,)``.
    """
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = np.inf
    rows = rows / scale
    x = np.zeros(rows.shape[1])
    free = np.zeros(rows.shape[1], bool)
    for _ in range(10 * rows.shape[1]):
        slope = rows.T @ (wanted - rows @ x)
        slope[free] = 0.0
        if slope.max() <= 1e-10:
            break
        free[int(slope.argmax())] = True
        while True:
            guess = np.zeros_like(x)
            guess[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
            if (guess[free] > 0).all():
                break
            low = free & (guess <= 0)
            step = (x[low] / (x[low] - guess[low])).min()
            x = x + step * (guess - x)
            free &= x > 1e-12
            x[~free] = 0.0
        x = guess
    return np.asarray(x / scale)


class OnlineCost:
    """A cost model that goes on learning from the times of whole steps.

    An extended Kalman filter over the logarithms of the coefficients, so that none turns negative,
    and of each tier's own deviation from the straight lines, at each power of 2 of the batch. A
    machine's load multiplies all coefficients alike: that is where the process noise lies, so a
    slower machine says little of what one tier costs over another, and a switch between them a
    lot. Observations are medians of blocks of steps. How much the load changes is learnt from
    blocks of one kind that follow each other; what no deviation explains is mostly the load's.

    Args:
        model: Where to start.
        spread: Standard deviation of each coefficient's logarithm at first.
    """

    def __init__(self, model: CostModel, spread: float) -> None:
        self.start = model
        self._knee = model.knee_nodes
        reference = model.step_ms(StepShape(1, 256, 0, 1, 1)) or 1.0
        least = FLOOR * reference
        self._log = np.array(
            [
                log(max(model.verify, least)),
                log(max(model.verify_node, least / 4)),
                log(max(model.knee_node, least / 4)),
                log(max(model.verify_context, least / 256)),
                log(max(model.draft, least)),
                log(max(model.draft_branch, least / 4)),
                log(max(model.draft_context, least / 256)),
                log(max(model.grammar_node, least / 4)),
                log(max(model.prefill, least)),
                log(max(model.prefill_token, least / 4)),
            ]
        )
        self._first_offset = count = len(self._log)
        self._offset_spread = min(OFFSET_SHARE * spread, OFFSET_MOST)
        self._most_nodes = model.most_nodes
        self._offsets: dict[tuple[Tier, bool, int], int] = {}
        # Contexts, masks and prefill are not measured at the start.
        vague = [0.0, 0.0, 0.0, 0.7, 0.0, 0.0, 0.7, 1.5, 1.5, 1.5]
        self._spread = np.diag((np.array(vague) + spread) ** 2)
        self._spread += FIRST_LOAD_SPREAD**2
        self._noise = np.full((count, count), LOAD_SPREAD**2)
        self._noise += np.diag([DRIFT_SPREAD**2] * count)
        self._scatter, self._load, self._wanders = 0.0, LOAD_SPREAD, False
        self._block: list[float] = []
        self._block_key: tuple[Tier, bool, int] | None = None
        self.blocks = 0

    def step_ms(self, shape: StepShape, budget: Budget) -> float:
        """A step's time as it is known now."""
        return float(exp(self._gradient(shape, budget)[0]))

    def compare(
        self, shape: StepShape, budget: Budget, other: StepShape, other_budget: Budget
    ) -> tuple[float, float]:
        """The logarithm of a step's time over another's, and its variance."""
        for known, asked in ((shape, budget), (other, other_budget)):
            self._offset(known, asked)
        mine, at = self._gradient(shape, budget)
        its, other_at = self._gradient(other, other_budget)
        difference = at - other_at
        return mine - its, float(difference @ self._spread @ difference)

    def observe(self, shape: StepShape, budget: Budget, step_ms: float) -> None:
        """Take in one step that came right after another."""
        key = budget.tier, budget.nodes is not None, shape.batch
        if key != self._block_key:
            # The first step of a kind may have been recorded, and overlaps with another kind's.
            self._block_key, self._block, self._wanders = key, [], False
            return
        self._block.append(log(step_ms) - self._gradient(shape, budget)[0])
        if len(self._block) == BLOCK_STEPS:
            seen = median(self._block)
            apart = sum(abs(log_ms - seen) for log_ms in self._block) / BLOCK_STEPS
            # One slow step in a block is what the median is for, and no sign of a noisy machine.
            self._scatter += SCATTER_ALPHA * (min(apart, 1.0) * TO_STANDARD - self._scatter)
            self._block = []
            if self._wanders:
                moved = min(abs(seen), 1.0) * TO_STANDARD
                self._load += SCATTER_ALPHA * (moved - self._load)
            self._wanders = True
            self._update(self._gradient(shape, budget)[1], seen)

    def model(self) -> CostModel:
        """The coefficients as they are known now."""
        numbers = np.exp(self._log[: self._first_offset]).tolist()
        return CostModel(
            verify=numbers[0],
            verify_node=numbers[1],
            knee_nodes=self._knee,
            knee_node=numbers[2] if self._knee else 0.0,
            verify_context=numbers[3],
            draft=numbers[4],
            draft_branch=numbers[5],
            draft_context=numbers[6],
            grammar_node=numbers[7],
            prefill=numbers[8],
            prefill_token=numbers[9],
            most_nodes=self.start.most_nodes,
            source=self.start.source + (", refitted" if self.blocks else ""),
            error=self.start.error,
            worst_error=self.start.worst_error,
        )

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
        batch, context, steps, branches, nodes, masks, chunk = shape
        beyond = max(0, nodes - self._knee) if self._knee else 0
        counts = (
            1.0,
            nodes,
            beyond,
            context,
            steps,
            steps * batch * branches,
            steps * context,
            masks,
            float(chunk > 0),
            chunk,
        )
        first, offset = self._first_offset, self._offset(shape, budget)
        parts = np.exp(self._log[:first]) * counts
        total = float(parts.sum())
        at = np.zeros(len(self._log))
        at[:first] = parts / total
        at[offset] = 1.0
        return log(total) + float(self._log[offset]), at

    def _offset(self, shape: StepShape, budget: Budget) -> int:
        """Where a tier's own deviation stands; it is entered when it is first asked for."""
        key = budget.tier, budget.nodes is not None, shape.batch.bit_length()
        found = self._offsets.get(key)
        if found is None:
            found = self._offsets[key] = len(self._log)
            self._log = np.append(self._log, 0.0)
            self._spread = np.pad(self._spread, (0, 1))
            beyond = max(1.0, shape.nodes / self._most_nodes) if self._most_nodes else 1.0
            self._spread[-1, -1] = (self._offset_spread + BEYOND_SPREAD * log(beyond)) ** 2
            self._noise = np.pad(self._noise, (0, 1))
            self._noise[-1, -1] = OFFSET_DRIFT_SPREAD**2
        return found
