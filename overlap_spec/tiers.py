"""How much a step drafts, and where its drafts end. Frozen values; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# A ragged verify must gain this much, being a recording of its own.
RAGGED_GAIN = 0.02


@dataclass(frozen=True)
class Tier:
    """How much is drafted a step: ``steps`` deep, ``top_k`` wide, ``nodes`` verified (root too).

    Tier(0, 1, 1) is speculation off. ``base``: of a tier with room for what the grammar tells, what
    the drafter is asked for; None: this tier itself.
    """

    steps: int
    top_k: int
    nodes: int
    base: Tier | None = None

    @property
    def is_chain(self) -> bool:
        """Whether its trees are the drafter's chains, and nothing else."""
        return self.top_k == 1 and self.base is None

    @property
    def own(self) -> Tier:
        """What the drafter is asked for."""
        return self.base or self

    @property
    def window_tokens(self) -> int:
        """Slots behind the committed length that a step may write."""
        return max(self.own.steps * self.own.top_k, self.nodes)


OFF = Tier(0, 1, 1)


class RowTimes(NamedTuple):
    """What a verified row takes, in ms: ``each`` one, and ``beyond`` more each from row ``knee`` on
    (0: there is none)."""

    each: float
    knee: int
    beyond: float

    def ms(self, rows: int) -> float:
        """What so many take together."""
        return self.each * rows + self.beyond * (max(0, rows - self.knee) if self.knee else 0)


def kept_nodes(
    shares: Sequence[float], trees: int, worth: Callable[[float, int], float]
) -> tuple[int, float]:
    """AdaSpec's verifier (SoCC 2025, Algorithm 2): how many nodes of a batch are worth verifying,
    roots included. Drafts go by the chance that they are accepted, the least first, while the
    step's worth grows, or where that is below 0.

    Args:
        shares: Of each draft, that it is accepted with all before it.
        worth: Of a step, by its expected tokens and its nodes.

    Returns:
        The number, and the worth over that of verifying all.
    """
    rates = sorted(shares)
    nodes, tokens = trees + len(rates), trees + sum(rates)
    full = best = worth(tokens, nodes)
    for share in rates:
        tokens -= share
        found = worth(tokens, nodes - 1)
        if found <= best and best >= 0:
            break
        best, nodes = found, nodes - 1
    return nodes, best / full if full > 0 else float("inf")


@dataclass(frozen=True, eq=False)
class DraftStop:
    """When a step has drafted enough, and what of it is verified: AdaSpec's correction, and its
    verifier (SoCC 2025, Algorithms 1 and 2).

    The drafts end at the length from which on the step's goodput, its expected tokens over its
    time, does not grow. What is drafted counts with what the drafter says of it, what would come
    next with what is expected of the request. It is asked by the device, between two draft steps.

    Attributes:
        costs_ms: By draft steps, from 0 on, at most the tier's: what a step takes that drafts and
            verifies as many. 0 is a length at which the drafts do not end, infinity one at which
            the step would break a target.
        expected: float32 ``(trees,)``, in the order of the plan's decode rows: what a request's
            next draft will be accepted with, given that the one before it was.
        curves: float32 ``(trees, B)``: how often a draft is accepted to which the drafter gives
            the probability (n + 0.5) / B; straight in between. Zeros of who takes no drafts.
        rows: With it the drafts that are worth least are not verified, while the step's goodput
            grows; None: all that is drafted is verified.
    """

    costs_ms: tuple[float, ...]
    expected: Floats
    curves: Floats
    rows: RowTimes | None = None


@dataclass(frozen=True)
class Budget:
    """How much a step drafts and verifies.

    Attributes:
        tier: What is drafted; with a ``stop``, at most.
        nodes: Nodes of the whole batch that are verified, roots included: the best by score. None
            verifies every node.
        most: Of each request, in the order of the plan's decode rows: none of its nodes beyond its
            ``most`` best is verified. Empty where ``nodes`` is None.
        stop: Ends a chain before its tier does; None: nothing does.
    """

    tier: Tier
    nodes: int | None = None
    most: tuple[int, ...] = ()
    stop: DraftStop | None = None

    def stopped(self, tier: Tier, nodes: int | None = None) -> Budget:
        """The same of a step whose drafts were stopped at a shorter ``tier``, of which ``nodes``
        are verified; None: as many as before, or all."""
        if self.nodes is None and nodes is None:
            return Budget(tier)
        trees = len(self.most) if self.stop is None else len(self.stop.expected)
        most = tuple(min(n, tier.nodes) for n in self.most) or (tier.nodes,) * trees
        kept = self.nodes if nodes is None else nodes
        assert kept is not None
        return Budget(tier, min(kept, sum(most)), most)
