"""The simulated cluster against what queueing theory says, and its own books."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cluster_model import Demand, FrontCost, Machine, Simulation
from bench.cluster_sim import fronts_for, h100, rows_of

FREE = FrontCost(0.0, 0.0, 0.0)
# One request at a time, whose tokens take 1 ms each and whose prompt takes nothing.
ONE = Machine(1.0, 0.0, 0.0, 1.0, running=1, kv_tokens=10**9, chunk_tokens=10**9)


def run(machine: Machine, demand: Demand, replicas: int = 1, routing: str = "load", **more: object):  # type: ignore[no-untyped-def]
    cost = more.get("cost", FREE)
    assert isinstance(cost, FrontCost)
    fronts = more.get("fronts", 1)
    assert isinstance(fronts, int)
    return Simulation([machine] * replicas, demand, routing, fronts, cost, seed=1).run()


def test_one_engine_is_the_queue_that_theory_knows() -> None:
    # M/M/1: Poisson arrivals, exponential work with a mean of 20 ms, half busy: 20 / (1 - 0.5) ms.
    found = run(ONE, Demand(20_000, 1, 1, 1, 20, rate=25.0))
    assert found["e2e_ms"]["mean"] == pytest.approx(40.0, rel=0.08)
    assert found["requests_per_second"] == pytest.approx(25.0, rel=0.03)


def test_a_front_is_a_queue_too() -> None:
    # M/D/1 at 0.8: a wait of 0.8 / (2 · 0.2) of the work, and the work of 4 ms itself; the answer
    # waits for what came meanwhile, 0.8 of that.
    quick = replace(ONE, base_ms=1e-6, running=1000)
    found = run(quick, Demand(20_000, 1, 1, 1, 1, rate=200.0), cost=FrontCost(4.0, 0.0, 0.0))
    assert found["e2e_ms"]["mean"] == pytest.approx(1.8 * (4.0 + 8.0), rel=0.1)
    assert found["front_busy"] == pytest.approx(0.8, rel=0.03)


def test_a_closed_loop_is_bound_by_its_clients() -> None:
    demand = Demand(2000, 1, 1, 1, 20, clients=1)
    assert run(ONE, demand)["e2e_ms"]["mean"] == pytest.approx(20.0, rel=0.08)
    # Two clients and two engines that take one request at a time: nobody waits.
    both = run(ONE, replace(demand, clients=2), replicas=2)
    assert both["e2e_ms"]["mean"] == pytest.approx(20.0, rel=0.08)


def test_hits_are_those_of_the_cache() -> None:
    machine = Machine(1.0, 0.1, 0.01, 2.0, running=4, kv_tokens=5 * 1000 + 4 * 60)
    demand = Demand(4000, 8, 1000, 30, 20, clients=4)
    everything = run(replace(machine, kv_tokens=10**6), demand)
    # The first fifth is not counted.
    assert everything["hit_rate"] == 1.0
    # Five of eight that are alike: at least 5/8 of the time, and where a batch is not full, six.
    assert 5 / 8 - 0.04 <= run(machine, demand)["hit_rate"] <= 6 / 8
    tight = replace(machine, kv_tokens=4 * 1000 + 4 * 60)
    in_turn = run(tight, demand, replicas=2, routing="round-robin")["hit_rate"]
    by_prefix = run(tight, demand, replicas=2, routing="prefix")["hit_rate"]
    assert 4 / 8 - 0.04 <= in_turn <= 5 / 8
    assert by_prefix > 0.95


def test_all_that_came_went() -> None:
    machine = Machine(5.0, 0.1, 0.01, 3.0, running=4, kv_tokens=20_000)
    demand = Demand(500, 8, 1000, 100, 50, skew=1.0, rate=30.0)
    simulation = Simulation([machine] * 3, demand, "prefix", 2, FrontCost(1.0, 0.1, 1.0), seed=2)
    simulation.run()
    assert len(simulation.done) == 500
    assert all(job.arrived < job.first <= job.ended for job in simulation.done)
    assert not any(replica.running or replica.waiting for replica in simulation.replicas)
    assert all(set(router.loads.values()) == {0} for router in simulation.routers)


def test_the_sizes_have_their_rows() -> None:
    machine = h100()
    assert 7 < machine.step_ms(1, 0) < machine.step_ms(64, 0) < 40
    cost = FrontCost(4.0, 0.5, 1.0)
    assert fronts_for(1.0, cost, 8, 60) == 1
    assert fronts_for(1000.0, cost, 8, 60) == 49
    assert ("prefix", 1) in rows_of(64, 5)
    assert ("prefix", 20) in rows_of(64, 5)
