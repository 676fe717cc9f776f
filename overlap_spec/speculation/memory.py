"""What ``auto`` remembers of acceptance in one kind of text, and what it makes of it.

AdaSpec (SoCC 2025), Eq. 6 and 7: a draft is accepted if all before it are, so its chance is the
product of theirs; the bonus token counts one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from overlap_spec.speculation.cost import Vector
from overlap_spec.tiers import Tier

# Share accepted of a depth that has not been drafted yet.
PRIOR_RATE = 0.7
# Trials that the rate of the depth before is worth, or what a chain says of a tree.
LEAN_TRIALS = 4.0
# Of a run's accepted drafts, where the rates leave none.
LEAST_VARIANCE = 0.05
# Runs that what is known of a width is worth at most, since text changes; and the weight that it
# keeps at a verify that drafts another width, or nothing, since what was accepted in other text is
# a poor comparison.
MOST_RUNS, IDLE_KEPT = 64.0, 0.98
# The text is another one where what is beyond so many deviations of each verify adds up to so many;
# so many verifies are kept of those that said so.
USUAL, CHANGED, KEPT = 0.5, 8.0, 64
# A verify's tier, and how many drafts of each request were accepted.
Verify = tuple[Tier, Sequence[int]]
# A tree saves this share of what a chain is refused, until it is known: where drafts are good, what
# fails often fails for all of a node's children.
TREE_SAVES = 0.25


class DepthCounts:
    """Decayed counts of one family of tiers: how often each depth was reached, and passed.

    A run of a accepted drafts out of s tried depths 1 … min(a + 1, s) and passed 1 … a. Depths
    that it did not try say nothing, so the run's own limit biases none. ``depths``: the deepest.
    """

    def __init__(self, depths: int) -> None:
        self.tried = [0.0] * depths
        self.passed = [0.0] * depths

    def add(self, steps: int, accepted: int) -> None:
        """Take in one run."""
        for depth in range(min(accepted + 1, steps)):
            self.tried[depth] += 1
            self.passed[depth] += accepted > depth

    def scale(self, weight: float) -> None:
        """Let all that was seen weigh ``weight`` times as much."""
        self.tried = [tried * weight for tried in self.tried]
        self.passed = [passed * weight for passed in self.passed]

    def take(self, other: DepthCounts, runs: float) -> None:
        """Begin with what another saw, as if it were so many runs at most."""
        self.tried, self.passed = other.tried, other.passed
        self.scale(min(1.0, runs / max(other.tried[0], runs)))

    def rates(self, lean: Sequence[float] | None = None) -> tuple[list[float], list[float]]:
        """Conditional acceptance of each depth, and how many trials each is worth; ``lean``: rates
        that another family foretells; None: each depth leans on the one before."""
        rates, trials, before = [], [], PRIOR_RATE
        for depth, tried in enumerate(self.tried):
            guess = before if lean is None else lean[depth]
            trials.append(tried + LEAN_TRIALS)
            before = (self.passed[depth] + LEAN_TRIALS * guess) / trials[-1]
            rates.append(before)
        return rates, trials


def sums(rates: Sequence[float]) -> list[float]:
    """Accepted drafts of a run of each length, from 0 on, by each depth's rate given that the one
    before it was accepted."""
    return [0.0, *accumulate(accumulate(rates, mul))]


def expected(rates: Sequence[float]) -> float:
    """Accepted drafts of a run as long as ``rates``, see :func:`sums`."""
    return sums(rates)[-1]


def slopes(rates: Sequence[float]) -> list[float]:
    """Derivatives of :func:`expected` by each rate."""
    found = sums(rates)
    return [(found[-1] - found[n]) / max(rate, 1e-6) for n, rate in enumerate(rates)]


def variance(rate: float, trials: float) -> float:
    """Of a rate that is known from ``trials``; never 0, however one-sided they were."""
    smooth = (rate * trials + 0.5) / (trials + 1)
    return smooth * (1 - smooth) / (trials + 1)


def run_variance(rates: Sequence[float]) -> float:
    """Of a run's accepted drafts; never 0, however sure the rates are."""
    share, accepted, squares = 1.0, 0.0, LEAST_VARIANCE
    for depth, rate in enumerate(rates):
        share *= rate
        accepted += share
        squares += (2 * depth + 1) * share
    return squares - accepted**2


class Drift:
    """Whether the text drafts better than it did (``sign`` 1) or worse (-1), and since when: Page's
    cumulative sum (1954).

    Attributes:
        since: The verifies since the sum was 0 for the last time.
    """

    def __init__(self, sign: int) -> None:
        self._sign, self._sum = sign, 0.0
        self.since: deque[Verify] = deque(maxlen=KEPT)

    def add(self, verify: Verify, surprise: float) -> bool:
        """Take in one verify, so many deviations better than expected; whether that is enough."""
        self._sum = max(0.0, self._sum + self._sign * surprise - USUAL)
        if self._sum:
            self.since.append(verify)
        else:
            self.since.clear()
        return self._sum > CHANGED


class Memory:
    """Survival of one kind of text (constrained or free) by width and depth.

    A shorter run is a prefix of a longer one. The width of most runs foretells the others: there
    these begin, and return to while they are not drafted. ``like``: another kind, whose drafts tell
    what to expect at first.
    """

    def __init__(self, tiers: Sequence[Tier], like: Memory | None = None) -> None:
        self._tiers, self._depths = tiers, max(tier.steps for tier in tiers)
        # By width: each tier's place and depth, and what was seen.
        self._steps: dict[int, list[tuple[int, int]]] = {}
        for n, tier in enumerate(tiers):
            if tier.steps:
                self._steps.setdefault(tier.top_k, []).append((n, tier.steps))
        self._counts = {width: DepthCounts(self._depths) for width in self._steps}
        # Rates and deviations of each width by depth, until something more is known.
        self._found: dict[int, tuple[list[float], list[float]]] = {}
        self._drifts = Drift(1), Drift(-1)
        if like is not None:
            for width, theirs in like._counts.items():
                self._counts[width].take(theirs, 1.0)

    def add(self, tier: Tier, runs: Sequence[int]) -> bool:
        """Take in one verify; whether it says that the text is another one."""
        change = self._change(tier, runs) if tier.steps else None
        self._found.clear()
        for width, counts in self._counts.items():
            if change is not None:
                counts.scale(0.0)
            elif tier.steps and width == tier.top_k:
                counts.scale(min(1.0, MOST_RUNS / max(counts.tried[0], 1.0)))
            else:
                counts.scale(IDLE_KEPT)
        for drafted, accepted in change or [(tier, runs)]:
            for run in accepted if drafted.steps else ():
                self._counts[drafted.top_k].add(drafted.steps, min(run, drafted.steps))
        return change is not None

    def weigh(self) -> tuple[Vector, Vector]:
        """Accepted drafts of a run of each tier, ``(tiers,)``, and what one standard deviation of
        each width's and depth's rate would change of it, ``(tiers, rates)``."""
        accepted = np.zeros(len(self._tiers))
        by_rate = np.zeros((len(self._tiers), len(self._counts), self._depths))
        for w, width in enumerate(self._counts):
            rates, deviations = self._family(width)
            # As :func:`slopes` of each depth, whose runs begin alike.
            found = sums(rates)
            units = [each / max(rate, 1e-6) for each, rate in zip(deviations, rates, strict=True)]
            for n, steps in self._steps[width]:
                accepted[n] = total = found[steps]
                by_rate[n, w, :steps] = [(total - found[d]) * units[d] for d in range(steps)]
        return accepted, by_rate.reshape(len(self._tiers), -1)

    def _change(self, tier: Tier, runs: Sequence[int]) -> Iterable[Verify] | None:
        """Where the text is another one, the verifies that say so."""
        rates, deviations = (each[: tier.steps] for each in self._family(tier.top_k))
        unsure = np.multiply(slopes(rates), deviations) * len(runs)
        spread = (len(runs) * run_variance(rates) + float(unsure @ unsure)) ** 0.5
        surprise = (sum(runs) - len(runs) * expected(rates)) / spread
        told = [drift.since for drift in self._drifts if drift.add((tier, runs), surprise)]
        if told:
            self._drifts = Drift(1), Drift(-1)
        return told[0] if told else None

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
