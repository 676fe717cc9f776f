"""Draft lengths under arrivals as they are in production, on a machine that is a formula.

``python -m bench.traces [--quick] [--json PATH] [--seed S]`` plays ``bursty`` and ``periodic``
arrivals against each policy on a simulated machine (a 7B model with a draft model of 68M on an A100
as in AdaSpec, SoCC 2025, by its bandwidth and knee, not measured). Prompts and outputs have the
lengths of the paper's mix, and each request its own acceptance; a draft of confidence c is accepted
with probability c. No model runs.

``adaspec``, ``adaspec-minus`` (without Algorithm 2) and ``threshold`` stop their drafts within a
step, by what the engine asks on a CPU. ``adaspec planned`` is AdaSpec as the engine has it on a
GPU: length and verified rows are planned from each request's mean confidence.

``row_costs`` is the same with dearer rows: what a verified row takes decides what AdaSpec can gain
over one length for all.

Fields of the last line, beside those of every record (``bench.common``):
    cells: For each ``trace``: ``requests``, ``batch`` (mean, without drafts), ``slo_ms`` (P90 of
        TPOT without drafts) and ``policies``: name → ``speedup`` (of mean end-to-end latency over
        no drafts), ``attainment`` (share of requests that keep ``slo_ms``, the target of policies
        that take one), ``draft_tokens`` (verified, of a verify), ``accepted`` (of a verify),
        ``acceptance``.
    ranges: What of AdaSpec's paper has a figure → ``paper`` and ``ours``: least and most, ours over
        the cells.
    row_costs: For each ``row_ms`` of a verified row, under ``bursty``, without targets:
        ``best_static``, ``speedup`` of each policy.
    auto_over_adaspec, planned_over_adaspec: Least and most over the cells: speedup over AdaSpec's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from bench.common import Run, command, flags, mean, percentile
from overlap_spec.speculation.cost import PROFILE_SPREAD, CostModel, shape_of
from overlap_spec.speculation.policy import (
    LengthPolicy,
    RequestOutcome,
    RequestView,
    StepOutcome,
    StepView,
    static_tier,
)
from overlap_spec.speculation.presets import load_policy
from overlap_spec.tiers import Budget, DraftStop, Tier
from overlap_spec.worker.draft_stop import kept, stops

A100 = CostModel(
    verify=11.0, verify_node=0.006, verify_context=4e-4, draft=1.0, draft_branch=0.001,
    draft_context=1e-5, knee_nodes=150, knee_node=0.06, prefill=1.0, prefill_token=0.05,
)  # fmt: skip
TRACES = ("bursty", "periodic")
STATIC = {f"static {n}": ("static", n) for n in (1, 3, 5)}
POLICIES = {
    "off": ("off", 5), **STATIC, "threshold": ("bench.baselines:ThresholdPolicy", 5),
    # SpecInfer (ASPLOS 2024) at width 1: a chain of its depth, whatever it costs.
    "specinfer": ("static", 8), "adaspec-minus": ("adaspec-minus", 5),
    "adaspec": ("adaspec", 5), "adaspec planned": ("adaspec", 5), "auto": ("auto", 5),
}  # fmt: skip
TARGETED = ("adaspec-minus", "adaspec", "adaspec planned", "auto")
# Policies whose drafts no step can stop.
PLANNED = ("adaspec planned",)
# What AdaSpec's paper says of it over others (figures 10 and 11) and of drafts (table 2).
PAPER = {
    "adaspec over off": (1.23, 1.79),
    "adaspec over the best static": (1.07, 1.18),
    "adaspec over threshold": (1.09, 1.58),
    "adaspec over specinfer": (1.16, 1.66),
    "adaspec over adaspec-minus": (1.71 / 1.73, 1.79 / 1.78),
    "SLO attainment of adaspec": (0.9, 1.0),
    "drafts of threshold": (5.26, 6.56),
    "accepted of threshold": (1.38, 1.42),
    "drafts of adaspec-minus": (3.13, 3.73),
    "accepted of adaspec-minus": (1.17, 1.26),
    "drafts of adaspec": (2.96, 3.63),
    "accepted of adaspec": (1.14, 1.25),
}
# Independent children that a tree's four are worth, by depth: the node budget runs out.
CHILDREN = (2.1, 1.9, 1.7, 1.4, 1.2, 1.1, 1.0)
# Mean prompt and output, in tokens.
PROMPT, OUTPUT = 420, 180
# Mean acceptance of a draft, and how it differs between requests: as many drafts of the threshold's
# are accepted as the paper says.
ACCEPTANCE, ACCEPTANCE_SPREAD = 0.6, 0.18
# How a request's confidences spread around its own rate: a beta distribution of so many trials. The
# embedded model's drafters are at 0.7 to 1.5.
SURE = 1.4
# Of :func:`row_costs`: the first is the machine's own.
ROW_MS = (0.006, 0.03, 0.06, 0.1, 0.15, 0.2)
MOST_RUNNING, CHUNK = 256, 1024
# Requests under way on average, without drafts, that arrivals are scaled to.
BUSY = 14


def rates_of(acceptance: float, tier: Tier) -> tuple[float, ...]:
    """Conditional acceptance by depth of a tier."""
    if tier.top_k == 1:
        return (acceptance,) * tier.steps
    return tuple(1 - (1 - acceptance) ** CHILDREN[d] for d in range(tier.steps))


@dataclass
class Asked:
    """A request: when it comes, in milliseconds, its lengths, and how it is drafted."""

    arrival_ms: float
    prompt: int
    output: int
    acceptance: float
    done: int = 0
    prefilled: int = 0
    first_ms: float = 0.0
    end_ms: float = 0.0

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first."""
        return (self.end_ms - self.first_ms) / max(1, self.output - 1)


def arrivals(kind: str, count: int, rng: Random) -> list[float]:
    """When requests come, in units of the mean gap."""
    now, times = 0.0, []
    for n in range(count):
        if kind == "bursty":
            # Gamma gaps of shape 0.3, as BurstGPT has them, and slow tides.
            tide = 1 + 0.7 * math.sin(2 * math.pi * n / 150)
            now += rng.gammavariate(0.3, 1 / 0.3) / tide
        else:
            now += rng.expovariate(3.0) if n % 24 < 18 else 24 / 6 - 1
        times.append(now)
    return times


def requests_of(kind: str, machine: CostModel, count: int, seed: int) -> list[Asked]:
    """A trace's requests, as many a second as keep :data:`BUSY` of them under way."""
    rng = Random(f"{seed} {kind}")
    shape = shape_of(Budget(load_policy("off", 1, 1, None).tiers[0]), BUSY, BUSY * PROMPT)
    gap_ms = OUTPUT * machine.step_ms(shape) / BUSY
    found = []
    for at in arrivals(kind, count, rng):
        acceptance = min(max(rng.gauss(ACCEPTANCE, ACCEPTANCE_SPREAD), 0.1), 0.95)
        prompt, output = (
            max(8, round(rng.lognormvariate(math.log(length) - 0.32, 0.8)))
            for length in (PROMPT, OUTPUT)
        )
        found.append(Asked(at * gap_ms, prompt, min(output, 1024), acceptance))
    return found


@dataclass
class Served:
    """What a trace came to under a policy."""

    requests: list[Asked]
    drafted: int = 0
    accepted: int = 0
    verifies: int = 0
    batch_ms: float = 0.0
    busy_ms: float = 0.0

    @property
    def latency_ms(self) -> float:
        """Mean end-to-end latency."""
        return mean(r.end_ms - r.arrival_ms for r in self.requests)

    @property
    def tpot_ms(self) -> list[float]:
        """Of each request with more than a token."""
        return [r.tpot_ms for r in self.requests if r.output > 1]


def serve(
    policy: LengthPolicy,
    machine: CostModel,
    asked: list[Asked],
    seed: int,
    target: float | None,
    planned: bool = False,
) -> Served:
    """Play a trace: first come, first served, prompts in chunks beside the trees.

    Args:
        planned: No step's drafts can be stopped.
    """
    rng, drafter, served = Random(seed), np.random.default_rng(seed), Served(asked)
    if not planned:
        policy.let_stop()
    waiting, running, now = list(asked), list[Asked](), 0.0
    if policy.weighs_cost:
        policy.calibrate(machine, PROFILE_SPREAD)
    while waiting or running:
        while waiting and waiting[0].arrival_ms <= now and len(running) < MOST_RUNNING:
            running.append(waiting.pop(0))
        if not running:
            now = waiting[0].arrival_ms
            continue
        room, chunks = CHUNK, list[tuple[Asked, int]]()
        for request in running:
            if room and request.prefilled < request.prompt:
                chunks.append((request, min(room, request.prompt - request.prefilled)))
                room -= chunks[-1][1]
        trees = [r for r in running if r.prefilled == r.prompt]
        view = StepView(
            tuple(
                RequestView(id(r), r.prompt + r.done, tpot_slo_ms=target if target else None)
                for r in trees
            ),
            CHUNK - room,
        )
        budget, paths = _drafted(trees, policy.choose(view), drafter)
        shape = shape_of(budget, len(trees), view.context_tokens, 0, view.chunk_tokens)
        if not trees:
            shape = shape._replace(nodes=0, steps=0)
        step_ms = machine.step_ms(shape) * rng.lognormvariate(0.0, 0.03)
        outcomes = _verify(trees, budget.tier, paths, rng)
        now += step_ms
        served.batch_ms += len(trees) * step_ms
        served.busy_ms += step_ms
        served.verifies += len(trees)
        for request, outcome in zip(trees, outcomes, strict=True):
            served.drafted += outcome.drafted
            served.accepted += outcome.accepted
            request.done += 1 + outcome.accepted
        for request, tokens in chunks:
            request.prefilled += tokens
            if request.prefilled == request.prompt:
                request.done, request.first_ms = 1, now
        for request in [r for r in running if r.done >= r.output]:
            request.end_ms = now
            running.remove(request)
        policy.observe(StepOutcome(view, budget, outcomes, step_ms, shape.nodes))
    return served


def _drafted(
    trees: list[Asked], budget: Budget, rng: np.random.Generator
) -> tuple[Budget, list[list[float]]]:
    """What a step drafted and verifies, and the confidences of each tree's best path."""
    tier = budget.tier
    rates = np.array([rates_of(request.acceptance, tier) for request in trees])
    found = rng.beta(SURE * rates + 1e-3, SURE * (1 - rates) + 1e-3)
    if budget.stop is not None and trees:
        steps = stopped_steps(budget.stop, found)
        found = found[:, :steps]
        lengths = verified_lengths(budget.stop, found)
        whole = sum(lengths) == len(trees) * steps
        tier = static_tier(steps, 1, None)
        budget = budget.stopped(tier, None if whole else len(trees) + sum(lengths))
    elif budget.nodes is not None:
        best = np.argsort(-found.cumprod(axis=1), axis=None, kind="stable")
        kept = best[: budget.nodes - len(trees)] // tier.steps
        lengths = np.bincount(kept, minlength=len(trees)).tolist()
    else:
        lengths = [tier.steps] * len(trees)
    return budget, [row[:n].tolist() for row, n in zip(found, lengths, strict=True)]


def stopped_steps(stop: DraftStop, confidences: NDArray[np.float64]) -> int:
    """How many drafts a step makes until its stop ends them, as the device asks it.

    Args:
        confidences: ``(trees, n)``: what the drafter would say of each further draft.
    """
    scores = torch.from_numpy(confidences).float().log()
    expected, curves = torch.from_numpy(stop.expected), torch.from_numpy(stop.curves)
    costs, most = list(stop.costs_ms), min(len(stop.costs_ms) - 1, scores.shape[1])
    asked = (n for n in range(1, most) if costs[n] > 0)
    return next((n for n in asked if stops(scores[:, :n], expected, curves, costs)), most)


def verified_lengths(stop: DraftStop, confidences: NDArray[np.float64]) -> list[int]:
    """How many drafts of each chain ``(trees, steps)`` the stop leaves to be verified."""
    trees, steps = confidences.shape
    scores = torch.from_numpy(confidences).float().log()
    found = kept(pad(scores.cumsum(1), (1, 0)), stop)
    if found is None:
        return [steps] * trees
    count, worth = found
    best = worth[:, 1:].flatten().sort(descending=True, stable=True).indices[: count - trees]
    lengths: list[int] = np.bincount(best.numpy() // steps, minlength=trees).tolist()
    return lengths


def _verify(
    trees: list[Asked], tier: Tier, paths: list[list[float]], rng: Random
) -> list[RequestOutcome]:
    """Accept each draft with the chance that its confidence says."""
    outcomes = []
    for request, path in zip(trees, paths, strict=True):
        accepted = 0
        while accepted < len(path) and rng.random() < path[accepted]:
            accepted += 1
        drafted = len(path) if tier.top_k == 1 else tier.nodes - 1
        seen = tuple(path[: accepted + 1])
        outcomes.append(RequestOutcome(id(request), accepted, drafted, False, seen))
    return outcomes


def play(
    name: str, machine: CostModel, kind: str, count: int, seed: int, target: float | None = None
) -> Served:
    """A trace under one of :data:`POLICIES`."""
    policy = load_policy(*POLICIES[name], 1, None)
    asked = requests_of(kind, machine, count, seed)
    return serve(policy, machine, asked, seed, target, name in PLANNED)


def cell(kind: str, count: int, seed: int) -> dict[str, Any]:
    """All policies on one trace."""
    off = play("off", A100, kind, count, seed)
    slo_ms = percentile(off.tpot_ms, 90)
    policies = {}
    for name in POLICIES:
        one = play(name, A100, kind, count, seed, slo_ms if name in TARGETED else None)
        policies[name] = {
            "speedup": off.latency_ms / one.latency_ms,
            "attainment": mean(ms <= slo_ms for ms in one.tpot_ms),
            "draft_tokens": one.drafted / one.verifies,
            "accepted": one.accepted / one.verifies,
            "acceptance": one.accepted / one.drafted if one.drafted else 0.0,
        }
    return {
        "trace": kind,
        "requests": count,
        "batch": off.batch_ms / off.busy_ms,
        "slo_ms": slo_ms,
        "policies": policies,
    }


def row_costs(count: int, seed: int, row_ms: Sequence[float]) -> list[dict[str, Any]]:
    """What policies gain where a verified row takes longer."""
    found = []
    for ms in row_ms:
        machine = replace(A100, verify_node=ms)
        latency = {name: play(name, machine, "bursty", count, seed).latency_ms for name in POLICIES}
        speedups = {name: latency["off"] / each for name, each in latency.items()}
        best = max(STATIC, key=speedups.__getitem__)
        found.append({"row_ms": ms, "best_static": best, "speedup": speedups})
    return found


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields."""
    found: dict[str, list[float]] = {name: [] for name in PAPER}
    over: dict[str, list[float]] = {"auto": [], "adaspec planned": []}
    for each in cells:
        policies = each["policies"]
        speedups = {name: figures["speedup"] for name, figures in policies.items()}
        others = {**speedups, "the best static": max(speedups[name] for name in STATIC)}
        for name, values in found.items():
            kind, _, of = name.rpartition(" ")
            if name.startswith("adaspec over "):
                values.append(speedups["adaspec"] / others[name.removeprefix("adaspec over ")])
            elif kind == "SLO attainment of":
                values.append(policies[of]["attainment"])
            else:
                field = "draft_tokens" if kind == "drafts of" else "accepted"
                values.append(policies[of][field])
        for name, values in over.items():
            values.append(speedups[name] / speedups["adaspec"])
    return {
        "cells": list(cells),
        "ranges": {
            name: {"paper": list(PAPER[name]), "ours": [min(values), max(values)]}
            for name, values in found.items()
        },
        **{
            f"{name.removeprefix('adaspec ')}_over_adaspec": {"min": min(v), "max": max(v)}
            for name, v in over.items()
        },
    }


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("traces", "Draft lengths under production arrivals, simulated.")
    options = parser.parse_args(arguments)
    run = Run("traces", options, arguments)
    count = 60 if options.quick else 300
    for kind in TRACES:
        run.sample(**cell(kind, count, options.seed))
    costs = row_costs(count, options.seed, ROW_MS)
    run.finish(count, **summary(run.samples), row_costs=costs)


if __name__ == "__main__":
    main()
