"""What ``auto`` remembers of acceptance, and what it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from overlap_spec.speculation.acceptance import (
    TREE_CHILDREN,
    TREE_SAVES,
    DepthCounts,
    children,
    expected,
    narrower,
    slopes,
    variance,
    wider,
)
from overlap_spec.tiers import Tier

# Weight that all keep at a verify that drafted nothing; the families that are not drafted, at one
# that did, since what was accepted in other text is a poor comparison; and these where the world
# has changed.
OFF_KEPT, IDLE_KEPT, STALE = 0.998, 0.98, 0.1
# Runs that another kind of text is worth where a kind is new.
FIRST_RUNS = 1.0
# Depth-1 runs of a tree and of a chain that say how many children it is worth; and what was
# thought of it before is worth.
LEARNT_RUNS, LEAN_RUNS = 6.0, 8.0


class Estimate(NamedTuple):
    """Accepted drafts of a request, and the derivatives and variances of the rates behind it."""

    accepted: float
    slopes: list[float]
    variances: list[float]


class Memory:
    """Survival of one kind of text (constrained or free) under every family of tiers.

    A family is all tiers of one width: a shorter run is a prefix of a longer one. The family with
    the most runs is the reference, and what it foretells of the others is where these begin, and
    what they return to while they are not drafted.
    """

    def __init__(self, tiers: Sequence[Tier], keep: float) -> None:
        depths = max(tier.steps for tier in tiers)
        widths = sorted({tier.top_k for tier in tiers if tier.steps})
        self._counts = {width: DepthCounts(depths, keep) for width in widths}
        self._children = {
            width: (TREE_CHILDREN, TREE_SAVES) if width > 1 else (1.0, 1.0) for width in widths
        }
        # Rates and variances of each width by depth, until something more is known.
        self._found: dict[int, tuple[list[float], list[float]]] = {}
        self._depths = depths

    def add(self, tier: Tier, runs: Sequence[int]) -> None:
        """Take in one verify."""
        self._found.clear()
        for width, other in self._counts.items():
            if width != tier.top_k:
                other.scale(IDLE_KEPT)
        counts = self._counts[tier.top_k]
        counts.fade()
        for accepted in runs:
            counts.add(tier.steps, min(accepted, tier.steps))

    def scale(self, weight: float) -> None:
        """Let all that is known weigh ``weight`` times as much."""
        self._found.clear()
        for counts in self._counts.values():
            counts.scale(weight)

    def rest(self) -> None:
        """Take in a verify that drafted nothing: all that is known is a little older."""
        self.scale(OFF_KEPT)

    def trials(self, tier: Tier) -> float:
        """Runs that are remembered of a tier's family."""
        return self._counts[tier.top_k].tried[0]

    @property
    def most_trials(self) -> float:
        """Runs that are remembered of the family that has most."""
        return max(counts.tried[0] for counts in self._counts.values())

    def restart(self, tier: Tier, other: Memory) -> None:
        """Begin anew from what another saw lately of ``tier``'s family."""
        self._found.clear()
        for width, counts in self._counts.items():
            if width == tier.top_k:
                counts.restart(other._counts[width])
            else:
                counts.scale(STALE)

    def begin_like(self, other: Memory) -> None:
        """Of text that is new here, expect at first what another kind's drafts came to."""
        self._found.clear()
        for width, counts in self._counts.items():
            theirs = other._counts[width]
            counts.restart(theirs)
            counts.scale(min(1.0, FIRST_RUNS / max(theirs.tried[0], FIRST_RUNS)))
        self._children = dict(other._children)

    def learn_children(self, width: int) -> None:
        """Compare the trees of a width with the chains drafted beside them."""
        own, chain = self._counts[width], self._counts.get(1)
        if chain is None or min(own.tried[0], chain.tried[0]) < LEARNT_RUNS:
            return
        self._found.clear()
        best = (chain.passed[0] + 1) / (chain.tried[0] + 2)
        guess = LEAN_RUNS * wider(best, *self._children[width])
        tree = (own.passed[0] + guess) / (own.tried[0] + LEAN_RUNS)
        self._children[width] = children(tree, best), 1.0

    def estimate(self, tier: Tier) -> Estimate:
        """What a run of ``tier`` accepts."""
        if not tier.steps:
            return Estimate(0.0, [], [])
        found = self._found.get(tier.top_k)
        if found is None:
            found = self._found[tier.top_k] = self._family(tier.top_k)
        rates, variances = found[0][: tier.steps], found[1][: tier.steps]
        return Estimate(expected(rates), slopes(rates), variances)

    def _family(self, width: int) -> tuple[list[float], list[float]]:
        """Rates of a width by depth, and their variances."""
        reference = max(self._counts, key=lambda width: self._counts[width].tried[0])
        lean = None
        if width != reference:
            lean, _ = self._counts[reference].rates(self._depths)
            own, other = self._children[width], self._children[reference]
            lean = [wider(narrower(rate, *other), *own) for rate in lean]
        rates, trials = self._counts[width].rates(self._depths, lean)
        return rates, [variance(r, n) for r, n in zip(rates, trials, strict=True)]
