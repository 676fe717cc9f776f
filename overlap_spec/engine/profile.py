"""What ``overlap-spec profile`` measures: a machine's offline analysis (AdaSpec, section 6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from overlap_spec.config import EngineConfig
from overlap_spec.engine.start_up import fit_times
from overlap_spec.speculation.cost import CostModel, save_profile
from overlap_spec.speculation.presets import load_policy
from overlap_spec.tiers import Tier
from overlap_spec.timeline import Timeline
from overlap_spec.worker.build import Room, build_streams, build_worker
from overlap_spec.worker.pass_times import PassTimes, Point, measure
from overlap_spec.worker.site import machine_key

# What is measured, as far as the engine's limits go.
PROFILE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PROFILE_CONTEXTS = (0, 1024, 4096)


def profile_points(tiers: Sequence[Tier], rows: int, longest: int) -> Iterator[Point]:
    """Batch × context × nodes, as far as an engine of ``rows`` requests goes."""
    for context in PROFILE_CONTEXTS:
        if context and context + 64 > longest:
            return
        for tier in tiers:
            for batch in PROFILE_BATCHES:
                # Away from an empty context, few are enough for a slope.
                if batch <= rows and (not context or batch in (1, 8, 32)):
                    yield Point(tier, batch, context)


def profile(
    config: EngineConfig, progress: Callable[[tuple[int, int]], object]
) -> tuple[CostModel, Path]:
    """Measure this machine at every tier, batch and context, and save the fit; ``progress`` is told
    (points measured, points in all).

    Returns:
        The cost model, and the file that later engines of these settings find it in.

    Raises:
        ConfigError, CheckpointError: as :class:`overlap_spec.engine.Engine`.
        OSError: the file cannot be written.
    """
    record = Timeline().record
    tiers = load_policy("auto", config.num_steps, config.eagle_topk, config.num_draft_tokens).tiers
    reserve = 2 * max(tier.window_tokens for tier in tiers) + 1
    rows = config.max_running_requests
    room = Room(reserve, rows * max(tier.nodes for tier in tiers))
    worker = build_worker(config, room, build_streams(config, record), record)
    try:
        points = list(profile_points(tiers, rows, worker.traits.context_length))
        times: list[PassTimes] = []
        for number, point in enumerate(points, 1):
            times += measure(worker, [point], math.inf)
            progress((number, len(points)))
    finally:
        worker.close()
    model = fit_times(times, "profile")
    return model, save_profile(machine_key(config), model)
