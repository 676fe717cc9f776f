"""How long the passes of a step take, measured over rows that belong to no request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec.kernels import Tree
from overlap_spec.tiers import Tier
from overlap_spec.worker.streams import get_pass_threads
from overlap_spec.worker.worker import Worker

# Times a pass is run at most, after once that is not counted; the least counts, since what else
# the machine does only adds.
RUNS = 4
# Share of the time after which no other point is begun; and how many times the deadline it may take
# where other work has the processor.
BEGIN_SHARE, BUSY_FACTOR = 0.6, 2.0


class Point(NamedTuple):
    """Trees of a tier, each behind ``context`` tokens."""

    tier: Tier
    batch: int
    context: int = 0


class PassTimes(NamedTuple):
    """Milliseconds of a point; ``draft_ms`` is 0 where nothing is drafted on the device, and
    ``verify_ms`` holds what the drafter then computes of the verified rows."""

    point: Point
    draft_ms: float
    verify_ms: float


def measure(worker: Worker, points: Sequence[Point], deadline_s: float) -> list[PassTimes]:
    """Time the passes of each point, by this rank's clock alone; the rest is left out when the
    time is over.

    Args:
        deadline_s: Seconds for all points, of a machine that does nothing else. The one under way
            is finished.
    """
    start, worked, found = time.perf_counter(), time.process_time(), []
    for point in points:
        # On a machine that is busy with other work, what was worked counts.
        passed = time.perf_counter() - start, time.process_time() - worked
        if min(passed) > BEGIN_SHARE * deadline_s or passed[0] > BUSY_FACTOR * deadline_s:
            break
        times = worker.do(measure_point, point)
        worker.rest()
        found.append(times.get())
    return found


def measure_point(worker: Worker, point: Point) -> PassTimes:
    """Run the recorded passes of a point. No request may be running: pages are written."""
    runner, (tier, batch, context) = worker.runner, point
    tables, pool, row = runner.tables, runner.pool, runner.tables.padding_row
    needed = -(-(context + tier.window_tokens + 1) // pool.page_size)
    needed = min(needed, tables.pages.shape[1], pool.k.shape[1] - 1)
    kept = tables.pages[row].clone()
    try:
        tables.pages[row, :needed] = torch.arange(1, needed + 1, device=tables.device)
        tables.committed[row] = min(context, runner.last_position - tier.window_tokens)
        rows = torch.full((batch,), row, device=tables.device)
        columns = tables.pages.shape[1] if rows.is_cuda else needed
        return PassTimes(point, *_times(worker, tier, rows, tables.pages[rows, :columns]))
    finally:
        tables.pages[row] = kept
        tables.committed[row] = 0
        for cache in runner.caches:
            cache.clear(tuple(range(needed + 1)))


def _times(worker: Worker, tier: Tier, rows: Tensor, pages: Tensor) -> tuple[float, float]:
    runner, recordings = worker.runner, worker.recordings
    together = runner.target.config.shard.size > 1

    def draft() -> tuple[Tensor, ...]:
        drafts = recordings.draft(tier, len(rows), False, False)
        return worker.phases.grow(drafts, tier, rows, pages)[0]

    draft_ms, (_, positions, _, _, *tensors) = least_ms(draft, rows, together)
    tree = Tree(*tensors)
    inputs = rows, pages, positions, tree.tokens, tree.depths, tree.ancestors
    path = rows.new_zeros(len(rows), tier.steps + 1)

    def verify() -> tuple[Tensor, ...]:
        logits, *rest = recordings.verify(tier, len(rows))(*inputs)
        if runner.extends:
            extend = recordings.extend(tier, len(rows))
            features = rest[:1] if runner.feature_layers else []
            extend(rows, pages, positions, path, path, torch.zeros_like(rows), *features)
        return (logits,)

    verify_ms, _ = least_ms(verify, rows, together)
    on_device = tier.steps > 0 and runner.drafter is not None and not runner.drafter.host
    return draft_ms if on_device else 0.0, verify_ms


def least_ms(
    run: Callable[[], tuple[Tensor, ...]], rows: Tensor, together: bool
) -> tuple[float, tuple[Tensor, ...]]:
    """Milliseconds of ``run``, the least of :data:`RUNS`, and what it returns; ``rows``: on the
    device that it runs on; ``together``: whether ranks run it beside this one, as often."""
    # What one thread computes is timed by its own work: a busy machine disturbs every pass.
    alone = not rows.is_cuda and get_pass_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    outputs = run()
    took = []
    for _ in range(RUNS):
        _wait(rows)
        start = clock()
        outputs = run()
        _wait(rows)
        took.append((clock() - start) * 1e3)
        # Long passes vary little. Ranks that compute together run a pass as often as each other.
        if sum(took) > 100.0 and not together:
            break
    return min(took), outputs


def _wait(rows: Tensor) -> None:
    if rows.is_cuda:
        torch.cuda.current_stream().synchronize()
