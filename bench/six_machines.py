"""``auto`` on six simulated machines: how near it stays to the best fixed tier of each phase.

``python -m bench.six_machines [--quick] [--json PATH] [--seed S] [--policy NAME] [--verifies N]
[--batches 1,4] [--at-once]`` runs no model. A machine is a formula for a step's time, with
deviations of its own by tier and batch that no formula tells; a text is how often a draft of each
depth is accepted, and what a tree saves of what a chain is refused. Every machine lives through all
texts at batches of 1 to 64, in an order drawn by the seed, with nothing between them but new
requests: that is how text, batch and grammar change in a server. Requests differ around their text.
The policy is told coin flips and noisy times; what it comes to, and what each fixed tier would come
to over the same requests, is told in expectation. ``--at-once``: requests come with the start, when
four points are all that was measured.

Fields of the last line, beside those of every record (``bench.common``):
    machines: Name → ``worst``, ``mean``, ``whole`` (of the best fixed tier's rate: the least phase,
        the mean of all, and the whole life over the best single tier's), ``below`` (phases under
        0.97, which is the aim), ``switches``, ``off``, ``trees`` (shares of the verifies).
    worst, mean, below: Of all machines; ``phases`` is how many there are.
    choose_us: Microseconds that the policy took a verify, to choose and to observe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from math import exp, sin
from operator import mul
from random import Random
from typing import Any

from bench.common import Run, flags, mean, sizes
from overlap_spec.engine.start_up import fit_times, startup_fit, startup_points, tier_points
from overlap_spec.speculation.cost import PROFILE_SPREAD, CostModel, shape_of
from overlap_spec.speculation.policy import (
    LengthPolicy,
    RequestOutcome,
    RequestView,
    StepOutcome,
    StepView,
)
from overlap_spec.speculation.presets import load_policy
from overlap_spec.tiers import Budget, Tier
from overlap_spec.worker.pass_times import PassTimes, Point

AIM = 0.97
BATCHES = (1, 4, 16, 64)
VERIFIES, QUICK_VERIFIES = 300, 120
# Verifies that a request lives; the deviation of the logarithm of its own ease; of a machine's
# tiers, of what is measured before the first request, and points that the time is enough for.
LIFE, EASE, OWN, MEASURED, POINTS = (20, 80), 0.3, 0.04, 0.03, 10
# Chance that one step takes four times as long.
OUTLIER = 0.01


# In milliseconds: a 0.75B model on two CPU cores; an 8B model in bfloat16 with an EAGLE-3 head on
# an A100 and on an H100, which leave the memory-bound regime near 150 and 300 rows.
FORMULAS: dict[str, CostModel] = {
    "cpu": CostModel(
        verify=52.0, verify_node=0.9, verify_context=2e-3,
        draft=3.0, draft_branch=0.35, draft_context=2e-4,
        knee_nodes=16, knee_node=2.6,
    ),
    "a100": CostModel(
        verify=10.5, verify_node=0.006, verify_context=9e-5,
        draft=0.55, draft_branch=0.0006, draft_context=3e-6,
        knee_nodes=150, knee_node=0.055,
    ),
    "h100": CostModel(
        verify=6.0, verify_node=0.003, verify_context=5e-5,
        draft=0.4, draft_branch=0.0003, draft_context=2e-6,
        knee_nodes=300, knee_node=0.022, host=0.6, host_tree=0.05,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """``noise``: deviation of the logarithm of a step's time; ``load``: factor by verify."""

    cost: CostModel
    noise: float = 0.05
    load: Callable[[int], float] = lambda _: 1.0


MACHINES = {
    # Rows are next to free.
    "amx": Machine(CostModel(
        verify=26.0, verify_node=0.12, verify_context=1e-3, draft=1.2, draft_branch=0.05,
        draft_context=1e-4, knee_nodes=64, knee_node=0.3, grammar_node=0.01,
        host=1.5, host_tree=0.2,
    )),
    "gpu": Machine(FORMULAS["h100"]),
    # A row costs a sixth of a pass.
    "one core": Machine(CostModel(
        verify=9.0, verify_node=1.5, verify_context=1e-3, draft=0.6, draft_branch=0.15,
        draft_context=1e-4, grammar_node=0.02, host=2.0, host_tree=0.4,
    )),
    "draft dear": Machine(CostModel(
        verify=20.0, verify_node=0.2, verify_context=1e-3, draft=5.0, draft_branch=0.3,
        draft_context=2e-4, knee_nodes=32, knee_node=0.4,
    )),
    "grammar dear": Machine(CostModel(
        verify=10.0, verify_node=0.1, verify_context=1e-3, draft=0.6, draft_branch=0.02,
        draft_context=1e-4, knee_nodes=64, knee_node=0.1, grammar_node=0.6,
        host=0.8, host_tree=0.15,
    )),
    # The load doubles and falls, slowly, and at once in the middle.
    "noisy": Machine(
        FORMULAS["cpu"], 0.2, lambda n: (1.5 + 0.5 * sin(n / 150)) * (1.6 if n % 2000 > 1000 else 1)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """``rates``: of a chain's depths, given that the draft before was accepted; the last goes on.
    ``saves``: share of what a chain is refused that a tree accepts."""

    rates: tuple[float, ...]
    saves: float
    constrained: bool = False


TEXTS = {
    "copied": Text((0.95,), 0.4),
    "code": Text((0.8, 0.8, 0.78, 0.75, 0.7), 0.35),
    "prose": Text((0.6, 0.55, 0.5, 0.45, 0.4), 0.4),
    "foreign": Text((0.15,), 0.1),
    "forms": Text((0.5, 0.9, 0.95), 0.2, True),
    "many words": Text((0.5,), 0.7, True),
}  # fmt: skip


class Request:
    """One request: its text, how easy it is, and the verifies that are left of it."""

    def __init__(self, number: int, text: Text, rng: Random) -> None:
        self.number, self.text, self.left = number, text, rng.randint(*LIFE)
        self._ease = exp(rng.gauss(0.0, EASE))
        self._shares: dict[Tier, list[float]] = {}

    def rates(self, tier: Tier) -> list[float]:
        """Conditional acceptance by depth."""
        known = self.text.rates
        rates = [known[min(d, len(known) - 1)] ** self._ease for d in range(tier.steps)]
        saves = self.text.saves if tier.top_k > 1 else 0.0
        return [rate + (1 - rate) * saves for rate in rates]

    def shares(self, tier: Tier) -> list[float]:
        """Of the runs, those that reach each depth."""
        found = self._shares.get(tier)
        if found is None:
            found = self._shares[tier] = list(accumulate(self.rates(tier), mul))
        return found

    def verify(self, tier: Tier, rng: Random) -> RequestOutcome:
        """Draw what one verify accepts."""
        self.left -= 1
        coin = rng.random()
        accepted = sum(coin < share for share in self.shares(tier))
        return RequestOutcome(self.number, accepted, tier.nodes - 1, self.text.constrained)


@dataclass
class Lived:
    """What a policy came to: of each phase, and as a whole, the share of the best fixed tier's."""

    phases: list[dict[str, Any]]
    whole: float
    tiers: list[Tier]
    policy_s: float
    snapshot: dict[str, Any]

    def figures(self) -> dict[str, Any]:
        """See ``machines`` above."""
        shares = [phase["of_best"] for phase in self.phases]
        return {
            "worst": min(shares),
            "mean": mean(shares),
            "whole": self.whole,
            "below": sum(share < AIM for share in shares),
            "switches": sum(a != b for a, b in zip(self.tiers, self.tiers[1:], strict=False)),
            "off": mean([not tier.steps for tier in self.tiers]),
            "trees": mean([tier.top_k > 1 for tier in self.tiers]),
        }


def phases_of(seed: int, batches: Sequence[int] = BATCHES) -> list[tuple[str, int]]:
    """Every text at every batch, in an order of the seed's."""
    cells = [(text, batch) for text in TEXTS for batch in batches]
    return Random(f"order {seed}").sample(cells, len(cells))


class Times:
    """A machine's, with deviations of its own by tier and batch that no formula tells."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine, self._seed = machine, seed
        self._own: dict[tuple[Tier, int], float] = {}

    def step_ms(self, budget: Budget, view: StepView, cost: CostModel | None = None) -> float:
        """A step's; ``cost``: the machine's or a part of it."""
        key = budget.tier, view.batch.bit_length()
        if key not in self._own:
            self._own[key] = exp(Random(f"own {self._seed} {key}").gauss(0.0, OWN))
        shape = shape_of(budget, view.batch, view.context_tokens, view.constrained)
        return self._own[key] * (cost or self.machine.cost).step_ms(shape)

    def measured(self, points: Sequence[Point], rng: Random) -> Iterator[PassTimes]:
        """What a start measures of passes alone."""
        passes = replace(self.machine.cost, host=0.0, host_tree=0.0)
        for point in points:
            draft_ms = passes.draft_ms(point.batch, point.tier.steps, point.tier.top_k, 0)
            view = StepView(tuple(RequestView(n, 0) for n in range(point.batch)))
            rest_ms = self.step_ms(Budget(point.tier), view, passes) - draft_ms
            noises = (exp(rng.gauss(0.0, MEASURED)) for _ in range(2))
            yield PassTimes(point, draft_ms * next(noises), rest_ms * next(noises))


def calibrate(policy: LengthPolicy, times: Times, rng: Random, at_once: bool) -> None:
    """Tell a policy that weighs costs what a start measures."""
    launch = Tier(5, 1, 6)
    if policy.weighs_cost and at_once:
        found = times.measured(startup_points(launch, policy.tiers, max(BATCHES)), rng)
        policy.calibrate(*startup_fit([*found]))
    elif policy.weighs_cost:
        points = tier_points(policy.tiers, launch, max(BATCHES))[:POINTS]
        model = fit_times([*times.measured(points, rng)], "start-up fit")
        policy.calibrate(model, max(PROFILE_SPREAD, model.error or 0.0))


class Sum:
    """Expected tokens and milliseconds."""

    tokens = ms = rate = 0.0

    def add(self, tier: Tier, requests: Sequence[Request], ms: float) -> None:
        self.tokens += sum(1 + sum(request.shares(tier)) for request in requests)
        self.ms += ms
        self.rate = self.tokens / self.ms


def live(
    policy: LengthPolicy,
    machine: Machine,
    phases: Sequence[tuple[str, int]],
    verifies: int,
    seed: int,
    at_once: bool = False,
) -> Lived:
    """Let a policy plan every verify of a machine's life; it is calibrated before.

    Args:
        at_once: The first request comes with the start: no tiers were measured before it.
    """
    rng, numbers, times = Random(f"life {seed}"), count(), Times(machine, seed)
    calibrate(policy, times, rng, at_once)
    told, chosen, requests = list[dict[str, Any]](), list[Tier](), list[Request]()
    # Of as many tokens of each phase.
    mine_ms, fixed_ms, policy_s = 0.0, dict.fromkeys(policy.tiers, 0.0), 0.0
    for name, batch in phases:
        mine, fixed = Sum(), {tier: Sum() for tier in policy.tiers}
        requests = requests[:batch]
        for request in requests:
            # Those under way end soon, one after the other.
            request.left = min(request.left, rng.randint(1, 10))
        for _ in range(verifies):
            requests = [request for request in requests if request.left]
            missing = range(batch - len(requests))
            requests += [Request(next(numbers), TEXTS[name], rng) for _ in missing]
            view = StepView(tuple(RequestView(r.number, 512, r.text.constrained) for r in requests))
            start = time.process_time()
            budget = policy.choose(view)
            policy_s += time.process_time() - start
            tier, ms = budget.tier, times.step_ms(budget, view)
            mine.add(tier, requests, ms)
            for each, its in fixed.items():
                its.add(each, requests, times.step_ms(Budget(each), view))
            seen_ms = ms * machine.load(len(chosen)) * rng.lognormvariate(0.0, machine.noise)
            seen_ms *= 4 if rng.random() < OUTLIER else 1
            outcomes = [request.verify(tier, rng) for request in requests]
            chosen.append(tier)
            start = time.process_time()
            policy.observe(StepOutcome(view, budget, outcomes, seen_ms, batch * tier.nodes))
            policy_s += time.process_time() - start
        best = max(fixed, key=lambda each: fixed[each].rate)
        share = mine.rate / fixed[best].rate
        of = {"best": [best.steps, best.top_k], "of_best": share}
        told.append({"text": name, "batch": batch, **of})
        mine_ms += 1 / mine.rate
        fixed_ms = {each: ms + 1 / fixed[each].rate for each, ms in fixed_ms.items()}
    return Lived(told, min(fixed_ms.values()) / mine_ms, chosen, policy_s, policy.snapshot())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("six_machines", "Adaptive draft lengths on simulated machines.")
    parser.add_argument("--policy", default="auto", help="as --adaptive takes it (default auto)")
    parser.add_argument("--verifies", type=int, help="of a phase (default 300, quick 120)")
    parser.add_argument("--batches", type=sizes, default=BATCHES, help="default 1,4,16,64")
    parser.add_argument("--at-once", action="store_true", help="the first request comes at once")
    options = parser.parse_args(arguments)
    run = Run("six_machines", options, arguments)
    verifies = options.verifies or (QUICK_VERIFIES if options.quick else VERIFIES)
    found, took_s, steps = {}, 0.0, 0
    with run.progress() as progress:
        for name in progress.track(MACHINES, description="machines"):
            policy = load_policy(options.policy, 5, 1, None)
            phases, seed = phases_of(options.seed, options.batches), options.seed
            lived = live(policy, MACHINES[name], phases, verifies, seed, options.at_once)
            for phase in lived.phases:
                run.sample(machine=name, **phase)
            found[name] = lived.figures()
            took_s, steps = took_s + lived.policy_s, steps + len(lived.tiers)
    shares = [sample["of_best"] for sample in run.samples]
    run.finish(
        1,
        machines=found,
        worst=min(shares),
        mean=mean(shares),
        below=sum(share < AIM for share in shares),
        phases=len(shares),
        choose_us=1e6 * took_s / steps,
    )


if __name__ == "__main__":
    main()
