"""What :meth:`overlap_spec.worker.worker.Worker.do` runs between steps, besides measuring and
warming up: each in every rank, on compute."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_spec.steps import Part
from overlap_spec.tiers import Tier
from overlap_spec.worker.worker import Worker


def tell_drafts(worker: Worker, parts: dict[str, Part]) -> None:
    """Enter what drafts read of grammars."""
    worker.runner.told.write(parts)


def prepare(worker: Worker, tier: Tier) -> None:
    """Record a tier's passes for a single request, ahead of its first step, with a grammar or
    without one."""
    for told in {False, worker.runner.reads_states}:
        worker.recordings.record(tier, False, told)


def prepare_next(worker: Worker, tiers: Sequence[Tier]) -> bool:
    """Record what one of these tiers lacks; False if they lack nothing."""
    return worker.recordings.record_next(tiers)


def clear(worker: Worker, pages: Sequence[int]) -> None:
    """Zero pages that may hold NaN."""
    for pool in worker.runner.caches:
        pool.clear(tuple(pages))
