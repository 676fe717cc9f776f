"""What a step costs: linear in contexts and batch tokens, with a knee; and its fit.

AdaSpec (SoCC 2025), Eq. 1 to 4: draft and verify passes take ``α·N_context + γ·N_batch + δ``. A
pass leaves the memory-bound regime at some batch, so verify has a second slope from a knee on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_spec.caches import cache_folder
from overlap_spec.tiers import Budget

log = logging.getLogger(__name__)
Vector = NDArray[np.float64]
# What planning, uploads, acceptance and results take, until whole steps tell: measured are passes.
HOST_MS, HOST_TREE_MS = 0.8, 0.15
# A knee must make the fit's error this much smaller.
KNEE_GAIN = 0.8
FITTED = ("verify", "verify_node", "verify_context", "draft", "draft_branch", "draft_context")


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
    masks = round(share * nodes)
    return StepShape(batch, context_tokens, tier.steps, tier.top_k, nodes, masks, chunk_tokens)


class TierTime(NamedTuple):
    """A tier whose passes were measured by themselves: ``over`` is their time over the model's."""

    steps: int
    branches: int
    batch: int
    over: float


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
        host, host_tree: What a step takes beside its passes; for each tree.
        most_nodes: The most rows that were measured; 0: nothing was.
        source: Where it comes from, in words.
        error: Median relative error of the fit, None where nothing was fitted.
        worst_error: The largest.
        tiers: What straight lines do not tell of the tiers that were measured.
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
    host: float = 0.0
    host_tree: float = 0.0
    most_nodes: int = 0
    source: str = "assumed"
    error: float | None = None
    worst_error: float | None = None
    tiers: tuple[TierTime, ...] = ()

    def verify_ms(self, nodes: int, context_tokens: int) -> float:
        """A verify pass over ``nodes`` rows."""
        beyond = max(0, nodes - self.knee_nodes) if self.knee_nodes else 0
        by_nodes = self.verify + self.verify_node * nodes + self.knee_node * beyond
        return by_nodes + self.verify_context * context_tokens

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
            + self.host
            + self.host_tree * shape.batch
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes."""
        return asdict(self) | {"tiers": [list(each) for each in self.tiers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Raises TypeError, ValueError where a coefficient is missing, unknown or no number."""
        tiers = tuple(TierTime(*each) for each in data.get("tiers", ()))
        model = cls(**{**data, "tiers": tiers})
        numbers = [value for name, value in data.items() if name not in ("source", "tiers")]
        numbers += [number for each in tiers for number in each]
        if not all(isinstance(n, int | float) and 0 <= n < 1e12 for n in numbers if n is not None):
            raise ValueError("coefficients must be numbers >= 0")
        if any(each.over <= 0 for each in tiers):
            raise ValueError("a tier's time over the model's must be > 0")
        return model


# In units of a step that drafts nothing: what a policy starts from where nothing was measured.
ASSUMED = CostModel(
    verify=0.9, verify_node=0.02, verify_context=2e-5,
    draft=0.08, draft_branch=0.005, draft_context=2e-6,
    grammar_node=0.002, prefill=0.1, prefill_token=0.02,
)  # fmt: skip
# Standard deviations of the coefficients' logarithms, by where they come from.
ASSUMED_SPREAD, STARTUP_SPREAD, PROFILE_SPREAD = 0.6, 0.25, 0.1


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
    """The model of least relative squares with coefficients >= 0 of one verify at least; a knee
    where it helps."""
    wanted, nodes = np.array([v.ms for v in verifies]), np.array([v.nodes for v in verifies])
    # What never varies cannot be fitted: it is taken to be what is assumed of a pass as long.
    unit = median(v.ms / ASSUMED.verify_ms(v.nodes, v.context_tokens) for v in verifies)
    varies = [len({v[n] for v in verifies}) > 1 for n in (0, 1)]
    rows = [[1.0, v.nodes * varies[0], v.context_tokens * varies[1], 0] for v in verifies]
    (best, error), knee = _relative(np.array(rows), wanted), 0
    for at in sorted({v.nodes for v in verifies})[1:-1]:
        bent = np.array(rows)
        bent[:, 3] = np.maximum(0.0, nodes - at)
        found, bent_error = _relative(bent, wanted)
        if bent_error < error * KNEE_GAIN:
            best, knee, error = found, at, bent_error
    if not varies[0]:
        best[1] = unit * ASSUMED.verify_node
        best[0] = max(best[0] - best[1] * verifies[0].nodes, 0.0)
    if not varies[1]:
        best[2] = unit * ASSUMED.verify_context
    draft = unit * np.array([ASSUMED.draft, ASSUMED.draft_branch, ASSUMED.draft_context])
    if drafts:
        took = np.array([d.ms for d in drafts])
        per_step = np.array([(1.0, d.batch * d.branches, d.context_tokens) for d in drafts])
        per_step[:, np.ptp(per_step, axis=0) == 0] = 0.0
        per_step[:, 0] = 1.0
        found, _ = _relative(per_step * np.array([[d.steps] for d in drafts]), took)
        draft = np.where(per_step.any(axis=0), found, draft)
    known: dict[str, Any] = dict(zip(FITTED, [*best[:3].tolist(), *draft.tolist()], strict=True))
    unmeasured = ("grammar_node", "prefill", "prefill_token")
    model = CostModel(
        **known,
        **{name: unit * getattr(ASSUMED, name) for name in unmeasured},
        host=HOST_MS,
        host_tree=HOST_TREE_MS,
        knee_nodes=knee,
        knee_node=float(best[3]) if knee else 0.0,
        most_nodes=max(v.nodes for v in verifies),
        source=source,
    )
    errors = [abs(model.verify_ms(v.nodes, v.context_tokens) / v.ms - 1) for v in verifies]
    errors += [
        abs(model.draft_ms(d.batch, d.steps, d.branches, d.context_tokens) / d.ms - 1)
        for d in drafts
    ]
    return replace(model, error=median(errors), worst_error=max(errors))


def _relative(rows: Vector, wanted: Vector) -> tuple[Vector, float]:
    """The x >= 0 for which ``rows x`` is closest to ``wanted``, relative to that; its squares."""
    found = nonnegative(rows / wanted[:, None], np.ones(len(wanted)))
    return found, float(np.sum((rows @ found / wanted - 1) ** 2))


def nonnegative(rows: Vector, wanted: Vector) -> Vector:
    """The x >= 0, ``(m,)``, of least ``|rows x - wanted|²``, by Lawson and Hanson's active sets;
    ``rows``: ``(n, m)``, ``wanted``: ``(n,)``."""
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


def profile_path(key: Mapping[str, Any]) -> Path:
    """The file of a profile; ``key``: model, drafter, device, dtype, threads, as plain data."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "profiles" / f"{name}.json"


def save_profile(key: Mapping[str, Any], model: CostModel) -> Path:
    """Write a profile, in place of an older one; its file. OSError: it cannot be written."""
    path = profile_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"key": dict(key), "cost": model.to_dict()}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def load_profile(key: Mapping[str, Any]) -> CostModel | None:
    """The profile of a key; None where there is none, or one that cannot be read."""
    path = profile_path(key)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, RuntimeError):
        return None
    try:
        return CostModel.from_dict(json.loads(text)["cost"])
    except (ValueError, TypeError, KeyError) as error:
        log.warning("profile %s is passed over: %s; run overlap-spec profile again", path, error)
        return None
