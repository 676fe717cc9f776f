"""``auto`` on simulated machines: nearly as good as the best static tier."""

import itertools

import pytest

from bench import six_machines
from overlap_spec.engine.budgets import Budgets
from overlap_spec.speculation.auto import AutoPolicy
from overlap_spec.speculation.cost import PROFILE_SPREAD, STARTUP_SPREAD, CostModel, shape_of
from overlap_spec.speculation.memory import Memory
from overlap_spec.speculation.online_cost import OnlineCost
from overlap_spec.speculation.policy import (
    OFF,
    RequestOutcome,
    RequestView,
    StaticPolicy,
    StepOutcome,
    StepView,
    static_tier,
)
from overlap_spec.speculation.presets import AUTO_CHAINS, AUTO_TREES, load_policy
from overlap_spec.steps import StepPlan, StepResult
from overlap_spec.tiers import Budget, Tier
from overlap_spec.worker.drafter_guard import DrafterGuard
from tests.support.policies import told, view
from tests.support.simulated import MACHINES, best_static, profiled, quick, run
from tests.support.tiers import few

TIERS = (*(static_tier(steps, 1, None) for steps in AUTO_CHAINS), *AUTO_TREES)
LAUNCH = static_tier(5, 1, None)
VERIFIES = 2000


def make(machine: CostModel, seed: int = 1) -> AutoPolicy:
    return AutoPolicy(TIERS, LAUNCH, OnlineCost(profiled(machine, seed), PROFILE_SPREAD))


@pytest.mark.parametrize("name", few(sorted(MACHINES), "cpu"))
def test_near_the_best_static_tier(name: str) -> None:
    """Most decisions keep the tier."""
    machine, found = MACHINES[name], []
    for acceptance, batch in itertools.product((0.1, 0.5, 0.85), (1, 16)):
        ran = run(make(machine), machine, [(acceptance, batch, VERIFIES)], batch)
        assert ran.switches() <= VERIFIES // 10, (acceptance, batch)
        found.append(ran.rate / best_static(TIERS, machine, acceptance, batch)[1])
    assert min(found) > 0.96
    assert sum(share < 0.98 for share in found) <= 4
    assert sum(found) / len(found) > 0.98


def test_near_the_best_of_each_phase_on_six_machines() -> None:
    """Text, batch and grammar change; a third of the phases of ``bench.six_machines``."""
    shares = []
    for name, machine in six_machines.MACHINES.items():
        phases = six_machines.phases_of(0, (1, 16))[:8]
        lived = six_machines.live(load_policy("auto", 5, 1, None), machine, phases, 120, 0)
        shares += [phase["of_best"] for phase in lived.phases]
        told = lived.snapshot["active"]["reason"]
        assert "over" in told or "as at batch" in told or told == "launch", name
    assert min(shares) > 0.6
    assert sum(shares) / len(shares) > 0.94


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_the_first_verifies_after_a_quick_fit(name: str) -> None:
    """What costs little to find out before the first request is enough to begin well."""
    machine, found = MACHINES[name], []
    for acceptance, batch in itertools.product((0.2, 0.5, 0.7, 0.85, 0.95), (1, 8)):
        policy = AutoPolicy(TIERS, LAUNCH, OnlineCost(quick(machine, 1), STARTUP_SPREAD))
        ran = run(policy, machine, [(acceptance, batch, 60)], 1)
        found.append(ran.rate / best_static(TIERS, machine, acceptance, batch)[1])
    assert min(found) > 0.75
    assert sum(found) / len(found) > 0.95


def test_it_starts_with_the_launch_tier_unless_another_should_gain() -> None:
    """What a row costs decides: 5 of 50 ms on a processor, next to nothing on a GPU."""
    dear = CostModel(50.7, 5.0, 2e-3, 6.0, 0.5, 2e-4)
    wanted = (dear, Tier(3, 1, 4)), (MACHINES["a100"], Tier(5, 4, 16))
    for machine, tier in wanted:
        policy = AutoPolicy(TIERS, LAUNCH, OnlineCost(quick(machine, 1), STARTUP_SPREAD))
        assert policy.choose(view(1)).tier == tier


def test_off_waits_for_a_draft_to_be_refused() -> None:
    """A fit beside other work may say that drafts cost more than they ever bring."""
    dear = CostModel(2.0, 0.1, 0.0, 40.0, 0.0, 0.0)
    policy = AutoPolicy(TIERS, LAUNCH, OnlineCost(dear, STARTUP_SPREAD))
    assert policy.choose(view(1)).tier.steps
    off = AutoPolicy(TIERS, OFF, OnlineCost(dear, STARTUP_SPREAD))
    assert off.choose(view(1)).tier == OFF


def test_a_text_that_surprises_makes_all_before_it_forgotten() -> None:
    """Once; and a single odd run in many is no surprise."""
    memory = Memory(TIERS)
    for _ in range(200):
        memory.add(LAUNCH, [5])
    assert not memory.add(LAUNCH, [0])
    for _ in range(10):
        memory.add(LAUNCH, [5])
    assert memory.weigh()[0][TIERS.index(LAUNCH)] > 4.5
    assert sum(memory.add(LAUNCH, [0]) for _ in range(30)) == 1
    assert memory.weigh()[0][TIERS.index(LAUNCH)] < 0.8


def test_a_text_that_came_while_nothing_was_drafted_is_known_by_itself() -> None:
    """What was seen of the text before says nothing of it."""
    memory, short = Memory(TIERS), next(tier for tier in TIERS if tier.steps == 1)
    for _ in range(20):
        memory.add(short, [0] * 16)
    for _ in range(50):
        memory.add(OFF, [0] * 16)
    assert memory.add(short, [1] * 16)
    assert memory.weigh()[0][TIERS.index(short)] > 0.8


def test_follows_text_and_batch() -> None:
    """Easy, hard, easy, each at batch 1, 16 and 1, as many tokens of each."""
    machine = MACHINES["cpu"]
    phases = [(a, b, 250) for a in (0.9, 0.2, 0.9) for b in (1, 16, 1)]
    took = sum(run(make(machine), machine, phases, 3).phase_ms)
    for tier in TIERS:
        assert took < 0.95 * sum(run(StaticPolicy(tier), machine, phases, 3).phase_ms)
    ideal = sum(1e3 / best_static(TIERS, machine, a, b)[1] for a, b, _ in phases)
    assert took < 1.08 * ideal


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_probes_cost_little(name: str) -> None:
    """Soon after the start, where most is unknown; in easy text they would cost 0.03 unbounded."""
    for acceptance in (0.5, 0.9):
        policy = make(MACHINES[name])
        run(policy, MACHINES[name], [(acceptance, 1, 300)], 7)
        assert policy.snapshot()["probe_share"] <= 0.02


@pytest.mark.parametrize("acceptance", [0.65, 0.8])
def test_a_tier_that_is_not_recorded_waits_until_that_pays(acceptance: float) -> None:
    """Until its gain, of less than half here, or a tenth of all time makes up for the wait."""
    machine, wait_ms = MACHINES["cpu"], 2000.0
    before_ms = []
    for told_ms in (0.0, wait_ms):
        policy = AutoPolicy(TIERS, LAUNCH, OnlineCost(quick(machine, 2), STARTUP_SPREAD))
        policy.tell_waits(lambda tier, ms=told_ms: 0.0 if tier.is_chain else ms)
        ran = run(policy, machine, [(acceptance, 1, VERIFIES)], 5)
        first = next((n for n, t in enumerate(ran.tiers) if not t.is_chain), VERIFIES)
        shapes = (shape_of(Budget(tier), 1, 512) for tier in ran.tiers[:first])
        before_ms.append(sum(machine.step_ms(shape) for shape in shapes))
    assert before_ms[0] < 2 * wait_ms < before_ms[1] < 15 * wait_ms


def test_a_target_is_kept_where_it_can_be() -> None:
    machine = MACHINES["cpu"]
    policy = make(machine)
    free = policy.choose(view(1))
    step_ms = [machine.step_ms(shape_of(b, 1, 100)) for b in (free, Budget(OFF))]
    asked = StepView((RequestView(0, 100, tpot_slo_ms=sum(step_ms) / 2),))
    kept = policy.choose(asked)
    assert machine.step_ms(shape_of(kept, 1, 100)) < 1.1 * sum(step_ms) / 2 < step_ms[0]
    assert kept.tier.steps > 0
    # None keeps a millisecond: the best of all, then.
    hopeless = StepView((RequestView(0, 100, tpot_slo_ms=1.0),))
    assert policy.choose(hopeless).tier == free.tier


def test_a_new_kind_of_text_is_expected_to_be_like_the_other() -> None:
    """Until its own drafts say otherwise, which takes a few."""
    chain = LAUNCH
    policy = AutoPolicy(TIERS, chain)
    free, constrained = (StepView((RequestView(0, 100, kind),)) for kind in (False, True))
    for asked, verifies in ((free, 40), (constrained, 1)):
        for _ in range(verifies):
            policy.choose(asked)
            runs = [RequestOutcome(0, 5, 5, asked is constrained)]
            policy.observe(StepOutcome(asked, Budget(chain), runs))
    assert policy.snapshot()["active"]["estimated_accept_length"] > 4.5


def test_constrained_and_free_text_are_apart() -> None:
    machine, lengths = MACHINES["a100"], {}
    policy = make(machine)
    for _ in range(300):
        for constrained, accepted in ((True, 99), (False, 0)):
            asked = StepView((RequestView(0, 100, constrained),))
            tier = policy.choose(asked).tier
            took = machine.step_ms(shape_of(Budget(tier), 1, 100))
            seen = told(1, tier, [min(accepted, tier.steps)], took)
            requests = [seen.requests[0]._replace(constrained=constrained)]
            policy.observe(StepOutcome(asked, seen.budget, requests, took, tier.nodes))
            lengths[constrained] = policy.snapshot()["active"]["estimated_accept_length"]
    assert lengths[True] > 5
    assert lengths[False] < 1.5


def test_its_snapshot_tells_what_it_expects_and_why() -> None:
    machine = MACHINES["h100"]
    policy = make(machine)
    assert policy.snapshot()["active"]["reason"] == "nothing has run yet"
    run(policy, machine, [(0.6, 2, 300)], 1)
    data = policy.snapshot()
    active, slot = data["active"], data["slots"][0]
    assert active["steps"] == slot["steps"]
    assert slot["min_batch_size"] == 2
    assert 1 < active["estimated_accept_length"] < active["steps"] + 1
    tier = Tier(active["steps"], active["top_k"], active["nodes"])
    wanted = machine.step_ms(shape_of(Budget(tier), 2, 1024))
    assert active["estimated_step_ms"] == pytest.approx(wanted, rel=0.1)
    assert active["reason"]
    assert data["cost"]["source"] == "profile, refitted"


# A policy that raises


class Broken(StaticPolicy):
    """Raises in a method from its third verify on, or chooses what it has not named."""

    def __init__(self, method: str) -> None:
        super().__init__(static_tier(3, 1, None))
        self._method, self._left = method, 2

    def choose(self, view: StepView) -> Budget:
        self._fail("choose")
        beyond = self._left <= 0 and self._method == "beyond"
        return Budget(static_tier(9, 1, None)) if beyond else super().choose(view)

    def observe(self, outcome: StepOutcome) -> None:
        self._left -= 1
        self._fail("observe")
        super().observe(outcome)

    def _fail(self, method: str) -> None:
        if self._left <= 0 and method == self._method:
            raise ZeroDivisionError("no such rate")


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("choose", "ZeroDivisionError: no such rate"),
        ("observe", "ZeroDivisionError: no such rate"),
        ("beyond", f"ValueError: {Tier(9, 1, 10)} is none of the policy's tiers"),
    ],
)
def test_a_policy_that_fails_gives_way(
    method: str, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    budgets = Budgets(Broken(method), Tier(1, 1, 2), DrafterGuard("none"), None, False, None)
    chosen = []
    for index in range(5):
        budget = budgets.choose([], index, 0)
        chosen.append(budget.tier.steps)
        budgets.observe(StepResult(StepPlan(index, budget, (), (), (), (), 0, ()), ()))
    assert chosen == [3, 3, 1, 1, 1]
    assert caplog.text.count(f"static from now on: {error}") == 1
    data = budgets.snapshot()
    assert data["error"] == error
    assert data["active"]["reason"] == "the policy failed"


def test_auto_has_the_launch_tier_too() -> None:
    assert Tier(4, 2, 8) in load_policy("auto", 4, 2, 8).tiers
    assert all(tier.top_k == 1 for tier in load_policy("auto", 5, 1, None, trees=False).tiers)
