"""How many drafts will be accepted: observed survival by depth, and calibrated confidence.

AdaSpec (SoCC 2025), Eq. 6 and 7: a draft is accepted if all before it are, so its chance is the
product of theirs; the bonus token counts one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Share accepted of a depth that has not been drafted yet.
PRIOR_RATE = 0.7
# Trials that the rate of the depth before is worth, or what a chain says of a tree.
LEAN_TRIALS = 4.0
# Of a run's accepted drafts, where the rates leave none.
LEAST_VARIANCE = 0.05
BINS = 10
BIN_TRIALS = 4.0
BIN_KEPT = 0.995


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


def expected(rates: Sequence[float]) -> float:
    """Accepted drafts of a run, by each depth's rate given that the one before it was accepted."""
    share, accepted = 1.0, 0.0
    for rate in rates:
        share *= rate
        accepted += share
    return accepted


def slopes(rates: Sequence[float]) -> list[float]:
    """Derivatives of :func:`expected` by each rate."""
    shares, share = [], 1.0
    for rate in rates:
        share *= rate
        shares.append(share)
    found, behind = [], 0.0
    for rate, share in zip(reversed(rates), reversed(shares), strict=True):
        behind += share
        found.append(behind / max(rate, 1e-6))
    return found[::-1]


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
