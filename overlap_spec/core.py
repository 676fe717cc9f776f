"""The engine's loop: plans steps, runs them, settles their results. Knows tokens, not text."""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple

from overlap_spec.config import EngineConfig
from overlap_spec.errors import NumericFault
from overlap_spec.grammar.matcher_pool import MatcherPool as LanePool
from overlap_spec.grammar_lane import GrammarLane, StepFigures
from overlap_spec.scheduler.scheduler import Scheduler
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.speculation.policy import LengthPolicy
from overlap_spec.speculation.presets import load_policy
from overlap_spec.speculation.static import StaticPolicy, static_tier
from overlap_spec.timeline import Timeline
from overlap_spec.types import StepPlan, StepResult
from overlap_spec.worker.build import build_streams, build_worker
from overlap_spec.worker.worker import Flight, Worker


class News(NamedTuple):
    """What a step brought: tokens of sequences that go on, and sequences that have ended."""

    runs: list[tuple[Sequence, tuple[int, ...]]]
    ended: list[Sequence]


class Core:
    """Scheduler, worker, grammar lane and length policy of one engine; not thread-safe.

    Raises:
        ConfigError, CheckpointError: as :class:`overlap_spec.engine.Engine`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.policy = _policy(config)
        self.timeline = Timeline()
        record = self.timeline.record
        tiers = self.policy.tiers
        reserve = reserve_tokens(max(tier.window_tokens for tier in tiers))
        self.worker = build_worker(config, tiers, reserve, build_streams(config, record), record)
        self.lane = GrammarLane(
            LanePool(config.lanes, config.mask_deadline_ms), self._settle, self._spent, record
        )
        self.scheduler = Scheduler(
            pages=self.worker.pool.k.shape[1],
            page_size=config.page_size,
            max_rows=config.max_running_requests,
            chunk_tokens=config.chunked_prefill_size,
            reserve_tokens=reserve,
            assign=lambda s: self.worker.assign(s.row, s.request, s.output_ids),
            reuse=config.prefix_cache,
        )
        # Also for an engine that nobody closed: a thread inside torch aborts a process that exits.
        self._end = weakref.finalize(self, _end_threads, self.lane.pool, self.worker)
        self._flight: Flight | None = None
        self._last: Flight | None = None
        self._runs: list[tuple[Sequence, tuple[int, ...]]] = []
        self._told: set[int] = set()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        if sequence.matcher is not None:
            self.lane.matchers[sequence.request.id] = sequence.matcher
        self.scheduler.add(sequence)

    def step(self) -> bool:
        """Run one step of whatever is queued; False when there is nothing to do.

        Results are read one step late, under the next step's verify; where there is no next
        step, or the mode is serial, at once.
        """
        start = time.perf_counter_ns()
        plan = self.scheduler.plan(self.policy.choose)
        flight = None
        if plan is not None:
            self.lane.step = plan.index
            self.timeline.record("host", "plan", start, time.perf_counter_ns(), plan.index)
            flight = self.worker.step(plan, self.lane)
        busy = plan is not None or self._flight is not None
        self._settle()
        if plan is not None and flight is None:
            self.scheduler.drop(plan)
        self._flight = flight
        if self.config.overlap == "none":
            self._settle()
        return busy

    def news(self) -> News:
        """What has happened since the last call. Where nobody is left, the step under way is read
        at once, so that it frees all."""
        if all(s.finish_reason is not None for s in self.scheduler.running):
            self._settle()
        runs, self._runs = self._runs, []
        ended = [s for s in self.scheduler.running if s.finish_reason is not None]
        retired = self.scheduler.retire()
        ended += [s for s in retired if s not in ended]
        fresh = [s for s in ended if s.request.id not in self._told]
        self._told.update(s.request.id for s in fresh)
        self._told.difference_update(s.request.id for s in retired)
        for sequence in fresh:
            self.lane.drop(sequence.request.id)
        return News([(s, run) for s, run in runs if run and s.finish_reason is None], fresh)

    def close(self) -> None:
        """End all threads."""
        self._end()

    @property
    def figures(self) -> StepFigures:
        """What the grammar cost so far, and how much of it was hidden."""
        return self.lane.figures

    def snapshot(self) -> dict[str, Any]:
        """State as plain data: length policy, pages, requests, grammar time."""
        allocator, figures = self.scheduler.allocator, self.figures
        return {
            "overlap": self.config.overlap,
            "speculation": self.policy.snapshot(),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "pages_in_use": allocator.in_use,
            "pages": allocator.total,
            "matchers": len(self.lane.matchers),
            "graph_bytes": self.worker.passes.replays.bytes,
            "preemptions": self.scheduler.preemptions,
            "steps": figures.steps,
            "grammar_ms": figures.grammar_ms,
            "exposed_ms": figures.exposed_ms,
            "hidden_fraction": figures.hidden_fraction,
        }

    def _settle(self) -> None:
        """Read the step under way, cut its runs by the stop rules, and feed the matchers."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        result = self.worker.collect(flight)
        serial = self.config.overlap == "none"
        if not serial:
            self._account(result, 0.0)
        self._fail_failed()
        kept = self.scheduler.commit(result)
        start = time.perf_counter_ns()
        self.lane.accept({s.request.id: run for s, run in kept})
        if serial:
            # Nothing runs beside these accepts: compute stands idle for them too.
            self._account(result, (time.perf_counter_ns() - start) / 1e6 if kept else 0.0)
        self._runs += kept
        self._observe(result, flight)
        self._fail_failed()
        for sequence in self.scheduler.running:
            if isinstance(sequence.error, NumericFault):
                self.scheduler.spoil(sequence)
                self.worker.clear(sequence.pages)
            if sequence.finish_reason is not None:
                self.lane.drop(sequence.request.id)

    def _spent(self, plan: StepPlan) -> bool:
        """See :class:`overlap_spec.types.Lane`."""
        if self._flight is None or plan.chunks:
            return False
        result = self.worker.collect(self._flight)
        ids = (request_id for request_id, _, _ in result.plan.verified)
        got = {i: row.tokens for i, row in zip(ids, result.rows, strict=True)}
        members = {s.request.id: s for s in self.scheduler.running}
        return all(i in got and members[i].ended_by(got[i]) for i in plan.request_ids)

    def _account(self, result: StepResult, late_ms: float) -> None:
        shares = self.lane.account(result.plan.index, result.exposed_ms + late_ms)
        for sequence in self.scheduler.running:
            grammar_ms, exposed_ms = shares.get(sequence.request.id, (0.0, 0.0))
            sequence.stats.grammar_ms += grammar_ms
            sequence.stats.exposed_ms += exposed_ms

    def _observe(self, result: StepResult, flight: Flight) -> None:
        """Tell the length policy what the step's trees got, and how long they took."""
        plan, trees = result.plan, len(result.plan.decode_rows)
        # Drafts of a request that takes none say nothing of acceptance.
        told = [r for r in result.rows[:trees] if r.tokens and (r.drafted or not plan.tier.steps)]
        self.policy.observe(trees, plan.tier, [r.accepted for r in told])
        last, self._last = self._last, flight
        if last is not None and last.plan.index == plan.index - 1 and not plan.chunks:
            self.policy.clock(trees, plan.tier, last.chosen.elapsed_ms(flight.chosen))

    def _fail_failed(self) -> None:
        """End the requests whose matcher failed."""
        failed, self.lane.failed = self.lane.failed, {}
        for sequence in self.scheduler.running:
            error = failed.get(sequence.request.id)
            if error is not None and sequence.finish_reason is None:
                sequence.fail(error)


def _end_threads(pool: LanePool, worker: Worker) -> None:
    pool.close()
    worker.close()


def _policy(config: EngineConfig) -> LengthPolicy:
    if config.draft_path is None:
        return StaticPolicy(static_tier(0, 1, None))
    return load_policy(
        config.adaptive, config.num_steps, config.eagle_topk, config.num_draft_tokens
    )


def reserve_tokens(window_tokens: int) -> int:
    """Slots that a running sequence owns behind its committed length.

    Twice the draft window, since the host may be one step behind, and one for the draft cache's
    slot of the newest token.
    """
    return 2 * window_tokens + 1
