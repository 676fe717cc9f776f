"""What ``auto`` remembers of acceptance in one kind of text, and what it makes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from overlap_spec.speculation.acceptance import (
    DepthCounts,
    expected,
    run_variance,
    slopes,
    variance,
)
from overlap_spec.speculation.cost import Vector
from overlap_spec.tiers import Tier

# Runs that what is known of a width is worth at most, since text changes; and the weight that it
# keeps at a verify that drafts another width, or nothing, since what was accepted in other text is
# a poor comparison.
MOST_RUNS, IDLE_KEPT = 64.0, 0.98
# The text is another one where the mean surprise of the last verifies, each weighing so much, is so
# many of its standard deviations. Of all that was seen these last verifies are kept.
SURPRISE, CHANGED, RECENT = 0.12, 5.0, 8
# A tree saves this share of what a chain is refused, until it is known: where drafts are good, what
# fails often fails for all of a node's children.
TREE_SAVES = 0.25


class Memory:
    """Survival of one kind of text (constrained or free) by width and depth.

    A shorter run is a prefix of a longer one. The width of most runs foretells the others: there
    these begin, and return to while they are not drafted. ``like``: another kind, whose drafts tell
    what to expect at first.
    """

    def __init__(self, tiers: Sequence[Tier], like: Memory | None = None) -> None:
        self._tiers, depths = tiers, max(tier.steps for tier in tiers)
        self._counts = {tier.top_k: DepthCounts(depths) for tier in tiers if tier.steps}
        # Rates and deviations of each width by depth, until something more is known.
        self._found: dict[int, tuple[list[float], list[float]]] = {}
        self._surprise = 0.0
        self._recent: deque[tuple[Tier, Sequence[int]]] = deque(maxlen=RECENT)
        if like is not None:
            for width, theirs in like._counts.items():
                self._counts[width].take(theirs, 1.0)

    def add(self, tier: Tier, runs: Sequence[int]) -> bool:
        """Take in one verify; whether it says that the text is another one."""
        changed = bool(tier.steps) and self._surprises(tier, runs)
        self._found.clear()
        for width, counts in self._counts.items():
            if changed:
                counts.scale(0.0)
            elif tier.steps and width == tier.top_k:
                counts.scale(min(1.0, MOST_RUNS / max(counts.tried[0], 1.0)))
            else:
                counts.scale(IDLE_KEPT)
        if not tier.steps:
            return False
        self._recent.append((tier, runs))
        for drafted, accepted in self._recent if changed else [(tier, runs)]:
            for run in accepted:
                self._counts[drafted.top_k].add(drafted.steps, min(run, drafted.steps))
        return changed

    def weigh(self) -> tuple[Vector, Vector]:
        """Accepted drafts of a run of each tier, ``(tiers,)``, and what one standard deviation of
        each width's and depth's rate would change of it, ``(tiers, rates)``."""
        widths, depths = list(self._counts), max(tier.steps for tier in self._tiers)
        accepted = np.zeros(len(self._tiers))
        by_rate = np.zeros((len(self._tiers), len(widths), depths))
        for n, (steps, width) in enumerate((t.steps, t.top_k) for t in self._tiers):
            if steps:
                rates, deviations = (each[:steps] for each in self._family(width))
                accepted[n] = expected(rates)
                by_rate[n, widths.index(width), :steps] = np.multiply(slopes(rates), deviations)
        return accepted, by_rate.reshape(len(self._tiers), -1)

    def _surprises(self, tier: Tier, runs: Sequence[int]) -> bool:
        """Whether the last verifies were too far from what was expected of them."""
        rates = self._family(tier.top_k)[0][: tier.steps]
        beyond = sum(runs) - len(runs) * expected(rates)
        now = beyond / (len(runs) * run_variance(rates)) ** 0.5
        self._surprise += SURPRISE * (now - self._surprise)
        if self._surprise**2 <= CHANGED**2 * SURPRISE / (2 - SURPRISE):
            return False
        self._surprise = 0.0
        return True

    def _family(self, width: int) -> tuple[list[float], list[float]]:
        """Rates of a width by depth, and their standard deviations."""
        if width not in self._found:
            most = max(self._counts, key=lambda width: self._counts[width].tried[0])
            lean = None
            if (width > 1) != (most > 1):
                refused = 1 - TREE_SAVES if width > 1 else 1 / (1 - TREE_SAVES)
                rates, _ = self._counts[most].rates()
                lean = [max(0.0, 1 - refused * (1 - rate)) for rate in rates]
            elif width != most:
                lean, _ = self._counts[most].rates()
            rates, trials = self._counts[width].rates(lean)
            deviations = [variance(rate, n) ** 0.5 for rate, n in zip(rates, trials, strict=True)]
            self._found[width] = rates, deviations
        return self._found[width]
