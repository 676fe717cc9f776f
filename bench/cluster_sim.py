"""Clusters that are larger than this machine: a simulation, and how it was checked.

``python -m bench.cluster_sim [--quick] [--check RECORD] [--plot SVG] [--json PATH] [--seed S]``
runs ``bench.cluster_model`` for 8, 64 and 1,024 GPUs: each has an 8B model as a formula (the
``h100`` of ``bench.simulated``: assumed, not measured), requests at 0.7 of what the engines could
do if every prefix were computed once, eight shared prefixes a GPU whose popularity falls as 1/k,
and the front's costs (assumed too). Rows differ in the routing and the number of fronts.

``--check`` takes a record of ``bench.cluster``, and simulates that instead. It measures what the
embedded model's steps cost here in one engine alone, simulates each row with these costs and its
fronts' processor time, and tells both side by side. All of it shared the cores of one machine: how
many a busy engine takes is what the engine of the row with one replica spent over what its
simulated steps take, and what all else of a row took is not there for engines. Run it while the
machine is as busy as it was for the record.

Fields of the last line: ``rows`` (``gpus``, ``routing``, ``fronts``, ``requests_per_second``,
``hit_rate``, ``ttft_ms``, ``e2e_ms``, ``front_busy``) and ``route_us`` (of the router for each
replica, measured now); with ``--check`` only ``checked``, each with the ``costs``, what was
``measured`` and ``simulated``, and ``ratios``, simulated over measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from bench.cluster import RUNNING as RUNNING_HERE
from bench.cluster import asks_of
from bench.cluster_model import BLOCKS, Demand, FrontCost, Machine, Simulation
from bench.common import Run, flags, mean, rounded
from bench.simulated import MACHINES
from overlap_spec.cluster.prefixes import PrefixMap
from overlap_spec.engine.core import CPU_CHUNK_TOKENS

GPUS = (8, 64, 1024)
QUICK_GPUS = (8, 64)
PREFIXES_PER_GPU = 8
SHARE = 0.7
# Processor time of a front and its proxy: assumed. `bench.cluster` measures what they take here.
FRONT = FrontCost(request_ms=4.0, piece_ms=0.5, route_us=0.0)
# An 8B model: 16 GFLOP a prompt token at 400 TFLOP/s, and 128 KiB of keys and values a token in the
# 50 GiB that weights leave of 80. Accept length: a chain of five drafts.
PREFILL_MS, KV_TOKENS, ACCEPT_LENGTH, STEPS, RUNNING = 0.04, 400_000, 3.0, 5, 64
PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 6000, 200, 200
MEAN_CONTEXT = PREFIX_TOKENS + OWN_TOKENS + OUTPUT_TOKENS // 2
BATCHES = (1, 2, 4)
# Tokens of a question of bench.cluster.
OWN_QUESTION = 45


def h100() -> Machine:
    """An engine's costs, from the formulas of ``bench.simulated``."""
    costs = MACHINES["h100"]
    nodes = STEPS + 1
    each = nodes * costs.verify_node + STEPS * costs.draft_branch
    context = MEAN_CONTEXT * (costs.verify_context + STEPS * costs.draft_context)
    return Machine(
        base_ms=costs.verify + STEPS * costs.draft,
        request_ms=each + context,
        prefill_ms=PREFILL_MS,
        accept_length=ACCEPT_LENGTH,
        running=RUNNING,
        kv_tokens=KV_TOKENS,
        chunk_tokens=2048,
        knee=costs.knee_nodes // nodes,
        knee_ms=nodes * costs.knee_node,
    )


def capacity(machine: Machine, demand: Demand) -> float:
    """Requests a second that an engine can do whose prefixes are all computed."""
    steps = demand.output_tokens / machine.accept_length
    step_ms = machine.step_ms(machine.running, 0)
    each_ms = steps * step_ms / machine.running + machine.prefill_ms * demand.own_tokens
    return 1e3 / each_ms


def measure_route_us(replicas: int = 256) -> float:
    """Microseconds that ranking takes for each replica."""
    known, rng = PrefixMap(1 << 16, 8), Random("route")
    loads = {str(index): rng.randrange(8) for index in range(replicas)}
    for index in range(8 * replicas):
        blocks = tuple(range(index * BLOCKS, (index + 1) * BLOCKS))
        known.insert(str(rng.randrange(replicas)), blocks)
    times = []
    for index in range(200):
        blocks = tuple(range(index * BLOCKS, (index + 1) * BLOCKS))
        start = time.perf_counter_ns()
        known.rank(blocks, loads)
        times.append((time.perf_counter_ns() - start) / 1e3 / replicas)
    return median(times)


def rows_of(gpus: int, needed: int) -> list[tuple[str, int]]:
    """Routing and number of fronts of each row."""
    rows = [("round-robin", needed), ("load", needed), ("prefix", needed)]
    fewer = [("prefix", 1)] if needed > 1 else []
    return rows + fewer + [("prefix", 4 * needed)] * (gpus > QUICK_GPUS[0])


def fronts_for(rate: float, cost: FrontCost, gpus: int, pieces: float) -> int:
    """Fronts that are at most 0.7 busy."""
    busy = rate * 1e-3 * (cost.of_request(gpus) + pieces * cost.piece_ms)
    return max(1, -int(-busy // SHARE))


def simulate(run: Run, gpus: int, per_gpu: int, cost: FrontCost) -> list[dict[str, Any]]:
    """All rows of one size."""
    machine = h100()
    demand = Demand(
        requests=per_gpu * gpus,
        prefixes=PREFIXES_PER_GPU * gpus,
        prefix_tokens=PREFIX_TOKENS,
        own_tokens=OWN_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        skew=1.0,
    )
    rate = SHARE * gpus * capacity(machine, demand)
    demand = Demand(**{**vars(demand), "rate": rate})
    needed = fronts_for(rate, cost, gpus, OUTPUT_TOKENS / ACCEPT_LENGTH)
    rows = []
    for routing, fronts in rows_of(gpus, needed):
        # In turn and by load alone no replica is looked at for what it holds.
        own = cost if routing == "prefix" else FrontCost(cost.request_ms, cost.piece_ms, 0.0)
        seed = run.head["seed"]
        simulation = Simulation([machine] * gpus, demand, routing, fronts, own, seed, warm=True)
        found = {"gpus": gpus, "routing": routing, "fronts": fronts, **simulation.run()}
        found["offered_per_second"] = rate
        rows.append(run.sample(**found))
        run.console.print(
            f"{gpus:5} GPUs {routing:12} {fronts:4} fronts "
            f"{found['requests_per_second']:8.1f} of {rate:8.1f} req/s  "
            f"hits {found['hit_rate']:.3f}  TTFT p99 {found['ttft_ms']['p99']:9.0f} ms  "
            f"front {found['front_busy']:.2f}"
        )
    return rows


def measure_costs() -> dict[str, float]:
    """What the embedded model's steps cost in this process, by the names of a `Machine`."""
    from overlap_spec import Engine, SamplingParams

    asks = asks_of(max(BATCHES), 48, 240, 0)
    sampling = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    steps: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    prefill, accepted = list[float](), list[float]()
    with Engine(mask_deadline_ms=None, max_running_requests=max(BATCHES)) as engine:
        # Twice: a cold engine records its passes.
        for is_counted in (False, True):
            for batch in BATCHES:
                prompts = [ask.prompt for ask in asks[:batch]]
                engine.flush_cache()
                begun = time.perf_counter()
                first = engine.generate(prompts, None, replace(sampling, max_tokens=1))
                spent_ms = 1e3 * (time.perf_counter() - begun)
                if is_counted:
                    prefill.append(spent_ms / sum(each.stats.prompt_tokens for each in first))
                # Their prompts are computed now, so that nearly all steps are decodes alone.
                handles = [engine.submit(prompt, None, sampling) for prompt in prompts]
                while any(handle.output is None for handle in handles):
                    begun = time.perf_counter()
                    engine.step()
                    if is_counted:
                        steps[batch].append(1e3 * (time.perf_counter() - begun))
                for handle in handles:
                    assert handle.output is not None
                    stats = handle.output.stats
                    accepted.append(stats.verified_tokens / max(1, stats.verifies))
                engine.release(handles)
    typical = {batch: median(times) for batch, times in steps.items()}
    low, high = min(BATCHES), max(BATCHES)
    slope = max(0.0, (typical[high] - typical[low]) / (high - low))
    return {
        "base_ms": max(0.0, typical[low] - slope * low),
        "request_ms": slope,
        "prefill_ms": median(prefill),
        "accept_length": mean(accepted),
    }


def check(record: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Simulate a record's rows; the costs and both sides of each."""
    costs, engine_cores, cores = measure_costs(), 0.0, record["machine"]["cores"]
    checked = []
    for row in (row for row in record["rows"] if row["replicas"]):
        replicas, spent = row["replicas"], row["cpu_ms"]
        tokens = row["output_tokens_per_second"] / row["requests_per_second"]
        others_ms = sum(each for role, each in spent.items() if role != "engines")
        left = cores - 1e-3 * others_ms * row["requests_per_second"]
        machine = Machine(
            base_ms=costs["base_ms"],
            request_ms=costs["request_ms"],
            prefill_ms=costs["prefill_ms"],
            accept_length=costs["accept_length"],
            running=RUNNING_HERE,
            kv_tokens=record["kv_tokens"],
            chunk_tokens=CPU_CHUNK_TOKENS,
            cores=engine_cores,
        )
        pieces = row["pieces"] / row["requests"]
        # What fronts and proxies spend, told apart as the front's cost is.
        front_ms = spent["fronts"] + spent["proxies"]
        share = FRONT.request_ms / (FRONT.request_ms + pieces * FRONT.piece_ms)
        cost = FrontCost(share * front_ms, (1 - share) * front_ms / pieces, 0.0)
        demand = Demand(
            requests=2000,
            prefixes=record["prefixes"],
            prefix_tokens=record["prefix_tokens"],
            own_tokens=OWN_QUESTION,
            output_tokens=max(1, round(tokens)),
            clients=record["clients"],
        )
        given = ([machine] * replicas, demand, row["routing"], 1, cost, seed)
        found = Simulation(*given, cores=left).run()
        if not engine_cores:
            assert replicas == 1, "the row with one replica comes first"
            engine_cores = spent["engines"] / found["engine_ms"]
        names = ("requests_per_second", "hit_rate", "ttft_ms", "e2e_ms")
        # Of a prompt's tokens, as it was measured.
        share = record["prefix_tokens"] / (record["prefix_tokens"] + OWN_QUESTION)
        found["hit_rate"] *= share
        sides = {"measured": row, "simulated": found}
        told = {side: {name: of[name] for name in names} for side, of in sides.items()}
        ratios = {
            "requests_per_second": found["requests_per_second"] / row["requests_per_second"],
            "e2e_p50": found["e2e_ms"]["p50"] / row["e2e_ms"]["p50"],
            "e2e_p99": found["e2e_ms"]["p99"] / row["e2e_ms"]["p99"],
        }
        head = {"replicas": replicas, "routing": row["routing"]}
        own = {"costs": costs, "engine_cores": engine_cores, "cores_left": left}
        checked.append({**head, **own, **told, "ratios": ratios})
    return checked


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time to the first token and hits by size, a line a routing."""
    from bench.plots import COLOURS, new_figure, write_svg

    figure = new_figure(9, 3.4)
    axes = figure.subplots(1, 3)
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        best.setdefault((row["routing"], row["gpus"]), row)
    for colour, routing in zip(COLOURS, ("prefix", "load", "round-robin"), strict=False):
        found = [row for (name, _), row in sorted(best.items()) if name == routing]
        gpus = [row["gpus"] for row in found]
        values = (
            [row["ttft_ms"]["p99"] for row in found],
            [row["hit_rate"] for row in found],
            [row["requests_per_second"] / row["offered_per_second"] for row in found],
        )
        for axis, value in zip(axes, values, strict=True):
            axis.plot(gpus, value, "o-", color=colour, label=routing)
    titles = ("TTFT p99 (ms)", "prefixes found computed", "done / offered")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [f"{count:,}" for count in GPUS])
        axis.set_xlabel("GPUs")
        axis.set_title(title)
    axes[0].set_yscale("log")
    axes[0].legend()
    write_svg(figure, path)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("cluster_sim", "Simulated clusters of 8 to 1,024 GPUs.")
    parser.add_argument("--check", type=Path, metavar="RECORD", help="of bench.cluster")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="write the curves there")
    parser.add_argument("--per-gpu", type=int, help="requests a GPU; 100, or 40 with --quick")
    options = parser.parse_args(arguments)
    options.per_gpu = options.per_gpu or (40 if options.quick else 100)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("cluster_sim", options, arguments)
    if options.check is not None:
        record = json.loads(options.check.read_text(encoding="utf-8"))
        run.finish(1, checked=rounded(check(record, options.seed)))
        return
    route_us = measure_route_us()
    cost = FrontCost(FRONT.request_ms, FRONT.piece_ms, route_us)
    sizes = QUICK_GPUS if options.quick else GPUS
    rows = [row for n in sizes for row in simulate(run, n, options.per_gpu, cost)]
    if options.plot is not None:
        plot(rows, options.plot)
    run.finish(1, rows=rounded(rows), route_us=round(route_us, 4))


if __name__ == "__main__":
    main()
