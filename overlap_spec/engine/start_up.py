"""What an engine does before its first request: compiles, records, and measures what steps cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from overlap_spec.config import EngineConfig
from overlap_spec.engine.core import EngineCore
from overlap_spec.engine.grammar_drafts import wide_tier
from overlap_spec.speculation.cost import (
    ASSUMED,
    ASSUMED_SPREAD,
    PROFILE_SPREAD,
    STARTUP_SPREAD,
    CostModel,
    DraftTime,
    TierTime,
    VerifyTime,
    fit,
    load_profile,
)
from overlap_spec.speculation.policy import LengthPolicy, RequestView, StepView
from overlap_spec.speculation.presets import nearest_tier
from overlap_spec.tiers import Tier
from overlap_spec.worker.graphs import graph_size
from overlap_spec.worker.pass_times import PassTimes, Point, measure
from overlap_spec.worker.site import machine_key
from overlap_spec.worker.warm_up import prepare, prepare_next
from overlap_spec.worker.warm_up import warm_up as run_once
from overlap_spec.worker.worker import Worker

log = logging.getLogger(__name__)

# Batches that a fit at start-up measures the launch tier at, since without them a row's cost is not
# known, the last one where so many run; and more, as far as a share of the load time goes, in
# seconds at least and at most. How many points are enough.
STARTUP_BATCHES, STARTUP_MORE_BATCHES = (1, 4, 8), (2, 3, 16)
STARTUP_SHARE, STARTUP_LEAST_S, STARTUP_MOST_S = 0.2, 0.1, 2.0
ENOUGH_POINTS = 4
# Batches that all tiers are measured at when they have been recorded, and seconds for it.
TIER_BATCHES, TIER_S = (1, 4, 8), 2.0


def warm_up(core: EngineCore, chunk_tokens: int, load_s: float) -> None:
    """Compile, measure and record what the first steps want."""
    config, worker, policy = core.config, core.worker, core.budgets.policy
    tiers = policy.tiers
    taken = with_wide(tiers) if core.budgets.widens else tiers
    policy.tell_waits(worker.recordings.wait_ms)
    # A wide tier's drafts are the grammar's too: its budget has no stop.
    if worker.traits.stops_drafts and not core.budgets.widens:
        policy.let_stop()
    if worker.traits.compiles:
        worker.buffers.reserve(taken)
        worker.do(run_once, batches(config, policy, taken), chunk_tokens)
        worker.rest()
    if policy.weighs_cost:
        policy.calibrate(*cost_model(config, worker, nearest_tier(config, tiers), tiers, load_s))
    worker.do(prepare, policy.choose(StepView((RequestView(0, 1),))).tier)


def with_wide(tiers: Iterable[Tier]) -> tuple[Tier, ...]:
    """These tiers, and those with room for what the grammar tells that steps may take instead."""
    own = tuple(tiers)
    return own + tuple(wide_tier(tier) for tier in own if tier.steps)


def batches(config: EngineConfig, policy: LengthPolicy, tiers: Iterable[Tier]) -> dict[Tier, int]:
    """The most trees of each tier that a step has, padding included."""
    rows, fixed, found = config.max_running_requests, nearest_tier(config, policy.tiers), {}
    for tier in tiers:
        # Where the policy fails, all steps may take one of its tiers.
        most = rows if tier.own == fixed else policy.largest_batch(tier.own) or rows
        found[tier] = graph_size(min(most, rows))
    return found


def preparation(core: EngineCore) -> Iterator[bool]:
    """Records what tiers lack, lest their first step wait for that (0.1 s and more), and measures
    them all before the first request: one thing at a time, while no request runs.

    Yields:
        Whether there was something to do.
    """
    worker, measures = core.worker, core.budgets.policy.weighs_cost
    while True:
        tiers = core.budgets.policy.tiers
        made = worker.do(prepare_next, tiers)
        worker.rest()
        # To measure is to write to pages.
        asked = not made.get() and measures and not core.scheduler.allocator.touched
        if asked:
            measures = False
            found = tier_costs(core.config, worker, nearest_tier(core.config, tiers), tiers)
            if found is not None:
                core.budgets.policy.calibrate(*found)
        yield asked or made.get()


def cost_model(
    config: EngineConfig, worker: Worker, launch: Tier, tiers: Sequence[Tier], load_s: float
) -> tuple[CostModel, float]:
    """The cost model to start with, and the standard deviation of its coefficients' logarithms;
    ``launch``, ``tiers``: as for :func:`startup_points`; ``load_s``: how long the worker loaded."""
    known = load_profile(machine_key(config))
    if known is not None:
        return known, max(PROFILE_SPREAD, known.error or 0.0)
    try:
        rows = config.max_running_requests
        more = [Point(launch, batch) for batch in STARTUP_MORE_BATCHES if batch <= rows]
        points = startup_points(launch, tiers, rows)
        times = measure(worker, points, math.inf)
        limit_s = min(max(STARTUP_SHARE * load_s, STARTUP_LEAST_S), STARTUP_MOST_S)
        # Again: what a machine does besides lasts, and should slow no point more than another.
        times += measure(worker, (points + more) * 2, limit_s)
        return startup_fit(_least(times))
    except Exception as error:  # the drafter's own, or no room for it
        log.warning("no start-up fit, costs are assumed: %s", error, exc_info=error)
        return ASSUMED, ASSUMED_SPREAD


def tier_costs(
    config: EngineConfig, worker: Worker, launch: Tier, tiers: Sequence[Tier]
) -> tuple[CostModel, float] | None:
    """As :func:`cost_model`, of the tiers themselves, all recorded: what wide and deep ones cost is
    measured. No request may have run. None where the user's profile tells more, or too little could
    be measured."""
    if load_profile(machine_key(config)) is not None:
        return None
    points = tier_points(tiers, launch, config.max_running_requests)
    try:
        times = measure(worker, points, TIER_S)
    except Exception as error:  # the drafter's own, or no room for it
        log.warning("tiers are not measured: %s", error, exc_info=error)
        return None
    if len(times) < ENOUGH_POINTS:
        return None
    model = fit_times(times, "start-up fit")
    # The tiers themselves were measured: what a step takes beyond that is the machine's load.
    return model, max(PROFILE_SPREAD, model.error or 0.0)


def tier_points(tiers: Sequence[Tier], launch: Tier, rows: int) -> list[Point]:
    """What tells most comes first: the launch tier, the one of most nodes, the deepest and none, of
    a single request; the launch tier of most requests; the other tiers; the first four again."""
    widest = max(tiers, key=lambda tier: (tier.nodes, tier.steps))
    deepest = max(tiers, key=lambda tier: (tier.steps, -tier.nodes))
    shallowest = min(tiers, key=lambda tier: tier.steps)
    some = dict.fromkeys((launch, widest, deepest, shallowest))
    batches = [batch for batch in TIER_BATCHES if batch <= rows]
    points = [Point(tier, 1) for tier in some]
    points += [Point(launch, batch) for batch in reversed(batches)]
    points += [Point(tier, 1) for tier in tiers]
    points += [Point(tier, batch) for batch in batches for tier in some]
    return list(dict.fromkeys(points))


def startup_points(launch: Tier, tiers: Sequence[Tier], rows: int) -> list[Point]:
    """What is measured at every start of an engine of ``rows`` requests: the launch tier, whose
    recording is good for all batches on a CPU; and the shallowest, as reading the weights bounds a
    pass over few rows, and larger ones tell nothing of that."""
    most = max(rows, STARTUP_BATCHES[1])
    points = [Point(launch, batch) for batch in STARTUP_BATCHES if batch <= most]
    return [*points, Point(min(tiers, key=lambda tier: tier.steps), 1)]


def startup_fit(times: Sequence[PassTimes]) -> tuple[CostModel, float]:
    """The cost model of a few points, as :func:`cost_model` returns it. Of fewer than
    :data:`ENOUGH_POINTS`, as a busy machine measures, it is as uncertain as what is assumed."""
    model = fit_times(times, "start-up fit")
    least = STARTUP_SPREAD if len(times) >= ENOUGH_POINTS else ASSUMED_SPREAD
    return model, max(least, 2 * (model.error or 0.0))


def _least(times: Sequence[PassTimes]) -> list[PassTimes]:
    """Of each point the least times."""
    found: dict[Point, PassTimes] = {}
    for new in times:
        old = found.get(new.point, new)
        least = min(old.draft_ms, new.draft_ms), min(old.verify_ms, new.verify_ms)
        found[new.point] = PassTimes(new.point, *least)
    return list(found.values())


def fit_times(times: Sequence[PassTimes], source: str) -> CostModel:
    """The cost model of measured passes, and what it does not tell of them."""
    verifies, drafts = [], []
    for (tier, batch, context), draft_ms, verify_ms in times:
        verifies.append(VerifyTime(batch * tier.nodes, batch * context, verify_ms))
        if draft_ms:
            drafts.append(DraftTime(batch, batch * context, tier.steps, tier.top_k, draft_ms))
    model = fit(verifies, drafts, source)
    tiers = []
    for (tier, batch, context), draft_ms, verify_ms in times:
        told = model.verify_ms(batch * tier.nodes, 0)
        told += model.draft_ms(batch, tier.steps, tier.top_k, 0) if draft_ms else 0.0
        if not context and told:
            tiers.append(TierTime(tier.steps, tier.top_k, batch, (draft_ms + verify_ms) / told))
    return replace(model, tiers=tuple(tiers))
