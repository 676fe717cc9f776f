"""The contract of length policies.

A policy is asked for a budget before a step drafts and told what its verify accepted and how long
the step took. It belongs to the thread that plans steps, and takes no lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from overlap_spec.speculation.cost import CostModel, StepShape, shape_of
from overlap_spec.tiers import OFF, Budget, Tier

# The settings that make the launch tier.
LAUNCH = ("num_steps", "eagle_topk", "num_draft_tokens")


class RequestView(NamedTuple):
    """One request that a step drafts for.

    ``context_tokens``: prompt and output, as far as the host knows. ``speculate``: whether it
    takes drafts. ``tpot_slo_ms``: its target of time per output token. ``confidences``: of the
    drafts that its last verify reached, see :class:`overlap_spec.steps.RowResult`.
    """

    request_id: int
    context_tokens: int
    constrained: bool = False
    speculate: bool = True
    tpot_slo_ms: float | None = None
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepView:
    """What a step is planned for: the ``requests`` that get a tree, in the order of the plan's
    decode rows, and the ``chunk_tokens`` of prompts that it computes beside these."""

    requests: tuple[RequestView, ...]
    chunk_tokens: int = 0

    @property
    def batch(self) -> int:
        """Trees of the step."""
        return len(self.requests)

    @cached_property
    def context_tokens(self) -> int:
        """Tokens of all requests together."""
        return sum(request.context_tokens for request in self.requests)

    @cached_property
    def constrained(self) -> int:
        """Requests that have a grammar."""
        return sum(request.constrained for request in self.requests)

    @cached_property
    def tpot_slo_ms(self) -> float | None:
        """The strictest target of all requests."""
        targets = [r.tpot_slo_ms for r in self.requests if r.tpot_slo_ms is not None]
        return min(targets, default=None)

    def shape(self, budget: Budget) -> StepShape:
        """What its time depends on with a budget."""
        tokens, constrained = self.context_tokens, self.constrained
        return shape_of(budget, self.batch, tokens, constrained, self.chunk_tokens)


class RequestOutcome(NamedTuple):
    """What a verify brought one request.

    ``accepted``: drafts, the bonus not counted, stop rules not yet applied. ``drafted``: verified
    drafts. ``confidences``: of the accepted drafts and of the one that was refused after them.
    """

    request_id: int
    accepted: int
    drafted: int
    constrained: bool = False
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepOutcome:
    """What a step brought.

    Attributes:
        view: What the policy was asked with for that step.
        budget: What the step drafted and verified; where a drafter was paused, not the policy's.
        requests: Those that are still there and took drafts.
        step_ms: Time from the accept of the step before to this step's; None where the worker was
            at rest in between.
        verified_rows: Rows that the target computed for the trees.
    """

    view: StepView
    budget: Budget
    requests: Sequence[RequestOutcome]
    step_ms: float | None = None
    verified_rows: int = 0

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each request."""
        return [request.accepted for request in self.requests]


class LengthPolicy(ABC):
    """Decides how much each step drafts.

    Attributes:
        tiers: Every tier that it may choose, distinct, by steps: what buffers and graphs are for.
        weighs_cost: Whether :meth:`calibrate` is called before the first step.
        ignores: Settings of :data:`LAUNCH` that play no part in it: an engine refuses them.
    """

    tiers: tuple[Tier, ...]
    weighs_cost: bool = False
    ignores: tuple[str, ...] = ()

    def calibrate(self, model: CostModel, spread: float) -> None:  # noqa: B027
        """Take in what was measured of the machine; ``spread``: standard deviation of the
        coefficients' logarithms."""

    def tell_waits(self, wait_ms: Callable[[Tier], float]) -> None:  # noqa: B027
        """Called before the first step: about how many milliseconds a step of a tier would wait for
        passes that are not recorded yet, 0 once they are."""

    def let_stop(self) -> None:  # noqa: B027
        """Called before the first step where budgets may have a :attr:`Budget.stop`. A stopped step
        is observed as one of the shorter tier, which must be one of :attr:`tiers`."""

    def largest_batch(self, tier: Tier) -> int | None:  # noqa: ARG002
        """Trees of the largest step that may take one of :attr:`tiers`; None: there is no limit."""
        return None

    @abstractmethod
    def choose(self, view: StepView) -> Budget:
        """Budget of the next step, whose tier is one of :attr:`tiers`."""

    @abstractmethod
    def observe(self, outcome: StepOutcome) -> None:
        """Take in one step.

        Outcomes come in the order of their steps, each once, and maybe after budgets of later steps
        were chosen. What a tier accepted that the policy cannot choose is passed over. An outcome
        without requests is no verify; its time may still count.
        """

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """State as plain data, for ``/server_info``.

        Keys: ``policy``, ``count`` (verifies observed), ``switches``, ``active`` (of the batch
        size seen last: ``steps``, ``top_k``, ``nodes``, ``reason``: of the last change, and
        ``estimated_accept_length`` and ``estimated_step_ms``, None where the policy estimates
        none) and ``slots``, a list of ``min_batch_size``, ``steps``, ``top_k``, ``nodes``,
        ``candidate_steps``, ``ema`` (accepted drafts a verify; None where it is not tracked),
        ``count``, ``switches``.
        """


def _sizes(tier: Tier) -> dict[str, Any]:
    return {"steps": tier.steps, "top_k": tier.top_k, "nodes": tier.nodes}


def slot_snapshot(
    bound: int, tier: Tier, candidates: Sequence[int], ema: float | None, count: int, switches: int
) -> dict[str, Any]:
    """What a snapshot says of one range of batch sizes."""
    counts = {"ema": ema, "count": count, "switches": switches}
    sizes = {"min_batch_size": bound} | _sizes(tier)
    return sizes | {"candidate_steps": list(candidates)} | counts


def snapshot_of(
    name: str,
    slots: Sequence[dict[str, Any]],
    tier: Tier,
    reason: str,
    accept_length: float | None = None,
    step_ms: float | None = None,
) -> dict[str, Any]:
    """A snapshot: of the slots, and of the active tier, what it is expected to bring and take."""
    return {
        "policy": name,
        "count": sum(slot["count"] for slot in slots),
        "switches": sum(slot["switches"] for slot in slots),
        "active": _sizes(tier)
        | {
            "reason": reason,
            "estimated_accept_length": accept_length,
            "estimated_step_ms": step_ms,
        },
        "slots": slots,
    }


def static_tier(steps: int, top_k: int, nodes: int | None) -> Tier:
    """Tier of fixed settings; ``nodes``: verified ones, root included; None: all of a chain, 16 of
    a tree. They never exceed what can be drafted: steps + 1, or 1 + k + (steps - 1) k²."""
    if steps == 0:
        return OFF
    most = steps + 1 if top_k == 1 else 1 + top_k + (steps - 1) * top_k * top_k
    if nodes is None:
        nodes = most if top_k == 1 else 16
    return Tier(steps, top_k, min(nodes, most))


class StaticPolicy(LengthPolicy):
    """One tier, whatever is accepted; ``name`` and ``reason`` (why that tier) are for the
    snapshot."""

    def __init__(self, tier: Tier, name: str = "static", reason: str = "launch") -> None:
        self.tiers, self.ignores = (tier,), LAUNCH if name == "off" else ()
        self._name, self._reason = name, reason
        self._budget = Budget(tier)
        self._count = 0

    def choose(self, view: StepView) -> Budget:  # noqa: ARG002
        return self._budget

    def observe(self, outcome: StepOutcome) -> None:
        self._count += bool(outcome.requests) and outcome.budget.tier == self._budget.tier

    def snapshot(self) -> dict[str, Any]:
        tier = self._budget.tier
        slot = slot_snapshot(1, tier, [tier.steps], None, self._count, 0)
        return snapshot_of(self._name, [slot], tier, self._reason)
