"""Our own adaptive policy: the published one's frame, with guards against needless switches.

The published EMA is censored: a tier of s steps never shows more than s accepted drafts, so its
thresholds compare figures of different tiers, and where the walk up and the walk down disagree it
switches at every decision. Here acceptance is kept by depth (``Survival``), which means the same
at every tier, and a tier is worth the tokens it brings a unit of time:

    rate(s) = (1 + E[accepted | s]) / (1 + draft_cost · s)

For tiers below the active one E is measured (a shorter run is a prefix of a longer one). For tiers
above it is a guess, until a probe has drafted that deep. The guards are in ``GuardedSlot``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from overlap_spec.speculation.slots import Slot

# Share accepted of a depth that has not been drafted yet, in trials of weight one.
PRIOR_RATE = 0.7
# Weight that evidence keeps when the world has changed since.
FADED = 0.25
# Steps on each side of a switch whose median times are compared.
CLOCKED_STEPS = 12
# Factor by which a measured cost may differ from the assumed one.
CREDIBLE = 3.0
# Standard deviations, in natural logarithms: of costs around the assumed one, and of a measured
# ratio on a busy machine.
COST_SPREAD, RATIO_SPREAD = 0.7, 0.12
# Weight that a switch keeps as evidence when the next one is seen.
EVIDENCE_KEPT = 0.9


@dataclass(frozen=True)
class GuardedSettings:
    """One slot of the guarded policy. Margins are shares of the active tier's rate.

    Attributes:
        candidate_steps: Draft steps to choose from; 0 is speculation off.
        draft_cost: Time of one more draft step, and of verifying its token, over that of a step
            that drafts nothing; assumed until it has been measured.
        quick_alpha: Weight of a new verify in the evidence that clear moves need.
        slow_alpha: The same for all other moves.
        update_interval: Verifies between decisions.
        warmup_batches: Verifies before the first interval begins.
        dwell_batches: Verifies that a tier is kept at least.
        hold_batches: Verifies before a move up that is not clear, a probe; at first.
        hold_growth: Factor of the hold after a failed probe or a move down that is not clear.
        hold_most: The longest hold, in verifies.
        proven_batches: A tier kept that long, in verifies, was no failed probe.
        clear_up, clear_down: Gain that moves up without the hold, and down at once.
        up_margin, down_margin: Gain that other moves need.
    """

    candidate_steps: tuple[int, ...]
    draft_cost: float
    quick_alpha: float = 0.05
    slow_alpha: float = 0.01
    update_interval: int = 5
    warmup_batches: int = 10
    dwell_batches: int = 15
    hold_batches: int = 50
    hold_growth: int = 3
    hold_most: int = 1024
    proven_batches: int = 256
    clear_up: float = 0.25
    clear_down: float = 0.15
    up_margin: float = 0.01
    down_margin: float = 0.02


# At batch 1 even one draft that nearly always fails costs little, and keeps the slot seeing: off
# is a choice for larger batches only, where each wasted draft costs more.
GUARDED: dict[int, GuardedSettings] = {
    1: GuardedSettings((1, 3, 5, 7), draft_cost=0.15),
    8: GuardedSettings((0, 1, 3), draft_cost=0.25),
    32: GuardedSettings((0, 1), draft_cost=0.4),
}


class Survival:
    """How often a draft at each depth is accepted, given that the one before it was.

    Decayed counts: a run of a accepted drafts out of s tried depths 1 … min(a + 1, s) and was
    accepted at 1 … a. Depths that it did not try say nothing, so the run's own limit biases none.
    """

    def __init__(self, depths: int, alpha: float) -> None:
        self._keep = 1 - alpha
        self._tried = [0.0] * depths
        self._passed = [0.0] * depths

    def add(self, steps: int, accepted: Sequence[int]) -> None:
        """Take in the runs of one batch, drafted ``steps`` deep; a batch weighs one."""
        self.scale(self._keep)
        reached = [sum(run >= d for run in accepted) / len(accepted) for d in range(steps + 1)]
        for depth in range(steps):
            self._tried[depth] += reached[depth]
            self._passed[depth] += reached[depth + 1]

    def expect(self, steps: int) -> tuple[float, float]:
        """Accepted drafts of a run ``steps`` deep, and the share of runs accepted to the end.

        A depth leans on the one before it, with the weight of one trial.
        """
        share, accepted, rate = 1.0, 0.0, PRIOR_RATE
        for tried, passed in zip(self._tried[:steps], self._passed[:steps], strict=True):
            rate = (passed + rate) / (tried + 1)
            share *= rate
            accepted += share
        return accepted, share

    def scale(self, weight: float) -> None:
        """Let all that was seen weigh ``weight`` times as much."""
        self._tried = [tried * weight for tried in self._tried]
        self._passed = [passed * weight for passed in self._passed]

    def restart(self, other: Survival, weight: float) -> None:
        """Begin anew from what another saw, at ``weight`` of its weight."""
        self._tried = [tried * weight for tried in other._tried]
        self._passed = [passed * weight for passed in other._passed]


class StepClock:
    """Time of a step by how much it drafts, from steps that ran one after the other.

    The load of a machine changes what a step takes, so times are compared across a switch alone:
    the last steps of one tier with the first of the next. If a draft step costs c, a switch from
    a to b steps multiplies the time by ``(1 + c·b) / (1 + c·a)``; each switch is evidence for the
    costs that foretell its ratio, weighed against the assumed cost.

    Args:
        assumed: Cost of a draft step over that of a step that drafts nothing.
    """

    def __init__(self, assumed: float) -> None:
        self.draft_cost = assumed
        self._costs = [assumed * CREDIBLE ** (i / 16) for i in range(-16, 17)]
        self._prior = [-(log(c / assumed) ** 2) / (2 * COST_SPREAD**2) for c in self._costs]
        self._evidence = [0.0] * len(self._costs)
        self._recent: deque[float] = deque(maxlen=CLOCKED_STEPS)
        self._steps = self._from = -1
        self._before_ms = 0.0

    def add(self, steps: int, step_ms: float) -> None:
        """Take in one step."""
        if steps != self._steps:
            full = len(self._recent) == CLOCKED_STEPS
            self._from = self._steps if full else -1
            self._before_ms = median(self._recent) if full else 0.0
            self._recent.clear()
            self._steps = steps
        self._recent.append(step_ms)
        if self._from >= 0 and len(self._recent) == CLOCKED_STEPS:
            self._compare(self._from, steps, log(median(self._recent) / self._before_ms))
            self._from = -1

    def _compare(self, before: int, after: int, seen: float) -> None:
        for i, cost in enumerate(self._costs):
            off = (seen - log((1 + cost * after) / (1 + cost * before))) / RATIO_SPREAD
            # A ratio that no cost explains tells of the load, and moves nothing.
            self._evidence[i] = self._evidence[i] * EVIDENCE_KEPT - min(off**2, 9.0) / 2
        belief = [p + e for p, e in zip(self._prior, self._evidence, strict=True)]
        weights = [exp(b - max(belief)) for b in belief]
        mean = sum(w * log(c) for w, c in zip(weights, self._costs, strict=True)) / sum(weights)
        self.draft_cost = exp(mean)


class GuardedSlot(Slot):
    """Chooses the tier of the best rate, reluctantly.

    - Two memories. The quick one acts on clear gains alone; it then restarts the slow one, since
      what the slow one knew no longer holds. The slow one decides everything else.
    - Dwell: no move before the active tier has had ``dwell_batches`` results of its own.
    - Hold: a move up that is not clear waits longer, and each one that fails, or is taken back on
      slow evidence, makes the next wait ``hold_growth`` times as long. Only a clear change of
      acceptance shortens it. After a failed move up even a clear one must show more accepted
      drafts than there were at the return, by ``clear_up``.
    - Probe: when the hold is over the slot goes one tier up, even where the guess is against it:
      acceptance may rise with depth, which no lower tier can see. The tier then stays if its
      measured rate is not below a lower one's.
    - Ceiling: no move up, probe or not, to a tier that would not pay even if every deeper draft
      of a fully accepted run were accepted too.

    A late result counts in the memories by the tier it drafted with, and not towards the dwell: a
    new tier is not judged by what another one did. A result that drafted nothing says nothing of
    acceptance, but counts towards the hold; on leaving off the memories are faded, being as old
    as the last draft.
    """

    def __init__(self, settings: GuardedSettings, launch_steps: int) -> None:
        super().__init__(settings.candidate_steps, launch_steps)
        self.settings = settings
        depths = self.candidates[-1]
        self._quick = Survival(depths, settings.quick_alpha)
        self._slow = Survival(depths, settings.slow_alpha)
        self._clock = StepClock(settings.draft_cost)
        self._hold = settings.hold_batches
        self._since = 0
        self._rose = False
        self._refuted = 0.0

    @property
    def ema(self) -> float:
        """Accepted drafts a verify that the quick memory expects of the active tier."""
        return self._quick.expect(self.steps)[0]

    @property
    def hold(self) -> int:
        """Verifies that the next probe waits for, counted from the last switch."""
        return self._hold

    def observe(self, steps: int, accepted: Sequence[int]) -> None:
        settings = self.settings
        if steps > 0:
            self._quick.add(steps, accepted)
            self._slow.add(steps, accepted)
        self.count += 1
        self._since += steps == self.steps
        settled = self.count - settings.warmup_batches
        due = settled > 0 and settled % settings.update_interval == 0
        if due and self._since >= settings.dwell_batches:
            self._decide()

    def clock(self, steps: int, step_ms: float) -> None:
        self._clock.add(steps, step_ms)

    def _decide(self) -> None:
        settings = self.settings
        best, gain = self._best(self._quick)
        clear = settings.clear_up if best > self.steps else settings.clear_down
        # Off, nothing new can be known, and the quick memory would repeat an old answer.
        known = self.steps > 0 and (best < self.steps or self.ema > self._refuted)
        if known and best != self.steps and gain > clear:
            self._move(best, clear=True)
            return
        best, gain = self._best(self._slow)
        rested = self._since >= self._hold
        rises = best > self.steps
        if gain > (settings.up_margin if rises else settings.down_margin) and (rested or not rises):
            self._move(best, clear=False)
        elif rested and self._may_probe():
            self._move(self._next(), clear=False)

    def _rate(self, accepted: float, steps: int) -> float:
        return (1 + accepted) / (1 + self._clock.draft_cost * steps)

    def _best(self, memory: Survival) -> tuple[int, float]:
        """Steps of the best rate by this memory, and their gain over the active ones."""
        rates = {s: self._rate(memory.expect(s)[0], s) for s in self.candidates}
        best = max(rates, key=rates.__getitem__)
        return best, rates[best] / rates[self.steps] - 1

    def _next(self) -> int:
        index = self.candidates.index(self.steps) + 1
        return self.candidates[min(index, len(self.candidates) - 1)]

    def _may_probe(self) -> bool:
        """Whether the ceiling lets the slot go one tier up.

        A guess is never above the ceiling's bound, so moves by rate need no check of their own.
        """
        up = self._next()
        accepted, share = self._slow.expect(self.steps)
        most = accepted + share * (up - self.steps)
        return up > self.steps and self._rate(most, up) > self._rate(accepted, self.steps)

    def _move(self, steps: int, clear: bool) -> None:
        settings = self.settings
        rises = steps > self.steps
        failed = self._rose and not rises and self._since < settings.proven_batches
        if clear and not failed:
            self._slow.restart(self._quick, FADED)
            # Probes that failed, failed in another world.
            if rises:
                self._hold = settings.hold_batches
        elif not rises:
            self._hold = min(settings.hold_most, self._hold * settings.hold_growth)
        if self.steps == 0:
            self._quick.scale(FADED)
            self._slow.scale(FADED)
        self._rose = rises
        self._since = 0
        self._switch(steps)
        # The same acceptance down here would raise the same false hope again.
        self._refuted = self.ema * (1 + settings.clear_up) if failed else 0.0
