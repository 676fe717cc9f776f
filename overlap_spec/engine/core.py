"""The engine's loop: plans steps, runs them, commits their results. Knows tokens, not text."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

from overlap_spec.config import EngineConfig
from overlap_spec.engine.cost_model import tier_costs
from overlap_spec.engine.grammar_drafts import GrammarDrafts, widened
from overlap_spec.engine.grammar_manager import GrammarManager
from overlap_spec.engine.own_process import OwnProcess
from overlap_spec.grammar.matching.pool import MatcherPool
from overlap_spec.scheduler.scheduler import Scheduler
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.speculation.observed import Observed
from overlap_spec.speculation.policy import (
    LengthPolicy,
    RequestOutcome,
    RequestView,
    StepOutcome,
    StepView,
)
from overlap_spec.speculation.presets import nearest_tier
from overlap_spec.stats import Standing
from overlap_spec.steps import History, StepPlan, StepResult
from overlap_spec.tiers import Budget
from overlap_spec.timeline import Timeline
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.jobs import clear, prepare_next
from overlap_spec.worker.worker import Worker

Run = tuple[Sequence, tuple[int, ...]]


class StepOutputs(NamedTuple):
    """What steps brought: tokens of sequences that go on, and sequences that have ended."""

    runs: list[Run]
    ended: list[Sequence]


class EngineCore:
    """Scheduler, worker, grammar manager and length policy of one engine; not thread-safe.

    Args:
        pool: Runs the matchers.
        drafts: What the grammars tell drafts; None: nobody drafts.
        widens: Whether there may be wide tiers, for what the grammar tells (``config.tries``).
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        scheduler: Scheduler,
        policy: LengthPolicy,
        pool: MatcherPool,
        drafts: GrammarDrafts | None,
        timeline: Timeline,
        widens: bool,
    ) -> None:
        self.config, self.worker, self.scheduler, self.policy = config, worker, scheduler, policy
        self.grammar, self.drafts = GrammarManager(pool, timeline.record), drafts
        self.timeline, self.widens = timeline, widens
        # Also for an engine never closed: a thread inside torch aborts a process that exits.
        self._end = weakref.finalize(self, _end_threads, pool, worker, OwnProcess())
        self._in_flight: InFlightStep | None = None
        self._before: InFlightStep | None = None
        self._runs: list[Run] = []
        self._told: set[int] = set()
        # What the steps under way were planned for, the newest last.
        self._views: dict[int, StepView] = {}
        self._observed = Observed()
        # Output tokens of the requests that have ended.
        self._ended_tokens = 0
        # Whether the tiers may still be measured: no page holds what a request computed.
        self._unmeasured = policy.weighs_cost

    def prepare_next(self) -> bool:
        """Between requests: record what one tier lacks, lest its first step wait for that (0.1 s
        and more), or measure them all before the first request; False where nothing is left to do.
        No request may be running."""
        tiers = self.policy.tiers
        made = self.worker.do(prepare_next, tiers)
        self.worker.rest()
        if made.get():
            return True
        if not self._unmeasured:
            return False
        self._unmeasured = False
        found = tier_costs(self.config, self.worker, nearest_tier(self.config, tiers), tiers)
        if found is not None:
            self.policy.calibrate(*found)
        return True

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._unmeasured = False
        config = self.config
        if config.drafter != "none" and sequence.request.sampling.temperature != 0:
            sequence.stats.lossy = config.by_threshold
        if sequence.matcher is not None:
            self.grammar.matchers[sequence.request.id] = sequence.matcher
        self.scheduler.add(sequence)

    def abort(self, request_id: int) -> None:
        """End a request now; tokens that are still computed for it are dropped."""
        self.scheduler.abort(request_id)

    def step(self) -> bool:
        """Run one step of whatever is queued; False when there is nothing to do.

        Results are read one step late, under the next step's verify; where there is no next step,
        or the mode is serial, at once.
        """
        start = time.perf_counter_ns()
        self.worker.check()
        plan = self.scheduler.plan(self._budget)
        if plan is None:
            return self._drain()
        last, self._in_flight = self._in_flight, None
        self.grammar.step = plan.index
        self.timeline.record("host", "plan", start, time.perf_counter_ns(), plan.index)

        if untrusted := self.scheduler.take_untrusted():
            self.worker.do(clear, untrusted)
        kept: list[Run] | None = None
        step = self.worker.upload(plan)
        if self.worker.traits.drafts_on_host and plan.tier.steps:
            kept = self._results(last)
        self.worker.draft(step, self._histories(plan))
        ahead = self.worker.traits.verifies_ahead
        if kept is None and last is not None and not ahead and self.scheduler.may_end_all(plan):
            # The one early wait, hidden under the draft.
            kept = self._results(last)
        ended = kept is not None and self.scheduler.ended_all(plan)
        if ended:
            # At once: its drafts may not have begun.
            self.worker.drop(step)
        else:
            self.worker.verify(step)
        self._accept(self._results(last) if kept is None else kept)
        late = not ended and not plan.chunks and self.scheduler.ended_all(plan)
        if late:
            self.worker.drop(step)
        if ended or late:
            self.scheduler.drop(plan)
            self._views.pop(plan.index)
            self._before = None
            return True
        if step.constrained:
            drafted, rows, limits, runs = self.worker.trees(step)
            self.grammar.fill(plan.verified_ids, drafted, rows, limits, runs)
            if self.drafts is not None and self.widens:
                self.drafts.note(plan.verified_ids, drafted, runs)
        self.worker.accept(step, self._free(step))
        self.worker.extend(step)
        if self.config.overlap == "none":
            self._finish_serial(step)
        else:
            self._in_flight = step
        return True

    def _free(self, step: InFlightStep) -> list[bool]:
        """Which requests accept drafts in the relaxed way, because they think; noted of each."""
        if not (self.worker.traits.asks_thinking and step.constrained):
            return []
        request_ids = step.plan.verified_ids
        free = self.grammar.free(request_ids)
        thinking = {i for i, is_free in zip(request_ids, free, strict=True) if is_free}
        for sequence in self.scheduler.running:
            sequence.stats.relaxed_steps += sequence.request.id in thinking
        return free

    def outputs(self) -> StepOutputs:
        """What has happened since the last call. Where no request goes on, the step under way is
        read at once, so that it frees all."""
        if self._in_flight is not None and all(
            s.finish_reason is not None for s in self.scheduler.running
        ):
            self._drain()
        runs, self._runs = self._runs, []
        ended = [s for s in self.scheduler.running if s.finish_reason is not None]
        retired = self.scheduler.retire()
        ended += [s for s in retired if s not in ended]
        fresh = [s for s in ended if s.request.id not in self._told]
        self._told.update(s.request.id for s in fresh)
        self._told.difference_update(s.request.id for s in retired)
        for sequence in fresh:
            target = _target(sequence, self.config.tpot_slo_ms)
            self._observed.add_request(sequence.stats.tpot_ms, target)
            self.grammar.drop(sequence.request.id)
            if self.drafts is not None:
                self.drafts.leave(sequence.request.id)
            self.worker.forget(sequence.history)
            self._ended_tokens += len(sequence.output_ids)
        return StepOutputs([(s, run) for s, run in runs if run and s.finish_reason is None], fresh)

    def close(self) -> None:
        """End all threads."""
        self._end()

    def snapshot(self) -> dict[str, Any]:
        """State as plain data: length policy, drafter, pages, requests, grammar time."""
        allocator, figures = self.scheduler.allocator, self.grammar.figures
        return {
            "overlap": self.config.overlap,
            "speculation": self.policy.snapshot() | self._observed.snapshot(),
            "drafter": self.worker.guard.snapshot()
            | {"refused_nodes": int(self.worker.runner.refused)},
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "output_tokens": self._ended_tokens + sum(len(s.output_ids) for s in self._open()),
            "pages_in_use": allocator.in_use,
            "pages": allocator.total,
            "kv_bytes": allocator.total * self.worker.traits.page_bytes,
            "kv_touched_bytes": allocator.touched * self.worker.traits.page_bytes,
            "matchers": len(self.grammar.matchers),
            "graph_bytes": self.worker.recordings.bytes,
            "rank_pids": list(self.worker.rank_pids),
            "preemptions": self.scheduler.preemptions,
            "steps": figures.steps,
            "grammar_ms": figures.grammar_ms,
            "exposed_ms": figures.exposed_ms,
            "idle_ms": figures.idle_ms,
            "hidden_fraction": figures.hidden_fraction,
        }

    def standings(self, most: int) -> list[Standing]:
        """Where requests stand that run or wait, running ones first; of at most ``most``."""
        now_ns = time.perf_counter_ns()
        return [s.standing(now_ns) for s in self._open()[:most]]

    def flush_cache(self) -> int:
        """Forget computed pages that no request holds; how many there were."""
        return self.scheduler.flush_cache()

    def _open(self) -> list[Sequence]:
        """Sequences whose end nobody has been told of."""
        members = [*self.scheduler.running, *self.scheduler.waiting]
        return [s for s in members if s.request.id not in self._told]

    def _budget(self, trees: list[Sequence], index: int, chunk_tokens: int) -> Budget:
        """What step ``index`` over ``trees`` may draft and verify."""
        target = self.config.tpot_slo_ms
        view = StepView(tuple([_view(s, target) for s in trees]), chunk_tokens)
        self._views[index] = view
        budget = self.policy.choose(view)
        tier = self.worker.guard.allow(budget.tier)
        if tier != budget.tier:
            budget = Budget(tier)
        if self.drafts is not None and self.widens:
            budget = widened(budget, self.drafts.sizes(trees, tier))
        tier = budget.tier
        if tier.nodes == 1 or all(r.speculate for r in view.requests):
            return budget
        plain = [not request.speculate for request in view.requests]
        most = budget.most or (tier.nodes,) * view.batch
        most = tuple(1 if p else m for p, m in zip(plain, most, strict=True))
        nodes = sum(most) if budget.nodes is None else min(budget.nodes, sum(most))
        least = budget.least or (1,) * view.batch
        return replace(budget, nodes=nodes, least=least, most=most)

    def _histories(self, plan: StepPlan) -> list[History] | None:
        """Known tokens of the decode rows, where the drafter works on the host."""
        if not self.worker.traits.drafts_on_host:
            return None
        by_row = {s.row: s for s in self.scheduler.running}
        return [by_row[row].history for row in plan.decode_rows]

    def _results(self, step: InFlightStep | None) -> list[Run]:
        """Wait for a step's results, and cut its runs by the stop rules; what is kept of them."""
        if step is None:
            return []
        start = time.perf_counter_ns()
        result = self.worker.results(step, self._right_before(step), self.grammar.spent_ms)
        self._account(result, 0.0)
        kept = self._commit(result, step)
        idle = {"exposed_ms": result.exposed_ms, "idle_ms": result.idle_ms}
        now = time.perf_counter_ns()
        self.timeline.record("host", "results", start, now, step.plan.index, **idle)
        return kept

    def _drain(self) -> bool:
        """Read the step under way, after which the worker is at rest; False if there is none."""
        last, self._in_flight = self._in_flight, None
        self._accept(self._results(last))
        self._before = None
        return last is not None

    def _finish_serial(self, step: InFlightStep) -> None:
        """Read and accept a step at once: compute stands idle for the accepts too."""
        result = self.worker.results(step, self._right_before(step), self.grammar.spent_ms)
        kept = self._commit(result, step)
        start = time.perf_counter_ns()
        self._accept(kept)
        self._account(result, (time.perf_counter_ns() - start) / 1e6 if kept else 0.0)

    def _right_before(self, step: InFlightStep) -> InFlightStep | None:
        """The step before, where the worker was not at rest in between."""
        before = self._before
        adjacent = before is not None and before.plan.index == step.plan.index - 1
        return before if adjacent else None

    def _commit(self, result: StepResult, step: InFlightStep) -> list[Run]:
        self._end_failed()
        kept = self.scheduler.commit(result)
        self._observe(result, step)
        self._before = step
        return kept

    def _accept(self, kept: list[Run]) -> None:
        """Feed the matchers what was kept of the step before."""
        if not kept:
            return
        self.grammar.accept({s.request.id: run for s, run in kept})
        self._runs += kept
        self._end_failed()
        for sequence in self.scheduler.running:
            if sequence.finish_reason is not None:
                self.grammar.note_room(sequence)
                self.grammar.drop(sequence.request.id)

    def _account(self, result: StepResult, late_ms: float) -> None:
        shares = self.grammar.account(result.exposed_ms + late_ms, result.idle_ms)
        verified = set(result.plan.verified_ids)
        idle_ms = result.idle_ms / max(len(verified), 1)
        for sequence in self.scheduler.running:
            request_id, stats = sequence.request.id, sequence.stats
            if request_id in verified:
                stats.idle_ms += idle_ms
            if (share := shares.get(request_id)) is not None:
                stats.grammar_ms += share.grammar_ms
                stats.exposed_ms += share.exposed_ms
                stats.illegal_drafts += share.refused

    def _observe(self, result: StepResult, step: InFlightStep) -> None:
        """Tell the length policy what the step's trees got, and how long they took."""
        plan, view = result.plan, self._views[result.plan.index]
        self._views = {i: v for i, v in self._views.items() if i > plan.index}
        whole = plan.budget.nodes is None
        requests = [
            RequestOutcome(
                asked.request_id, r.accepted, r.drafted, asked.constrained, r.confidences
            )
            for asked, r in zip(view.requests, result.rows, strict=False)
            # Drafts of a request that takes none say nothing of acceptance, nor do those that the
            # budget left out. A drafter that finds nothing to draft has had nothing accepted.
            if r.tokens and (r.drafted or not plan.tier.steps or (whole and asked.speculate))
        ]
        before = self._right_before(step)
        step_ms = before.accepted.elapsed_ms(step.accepted) if before is not None else None
        outcome = StepOutcome(view, plan.budget, requests, step_ms, result.verified_rows)
        # A wide tier is none of the policy's, and its trees are the grammar's too.
        if plan.tier.base is None:
            self.policy.observe(outcome)
        self._observed.add(outcome)

    def _end_failed(self) -> None:
        """End the requests whose matcher failed."""
        failed, self.grammar.failed = self.grammar.failed, {}
        if not failed:
            return
        for sequence in self.scheduler.running:
            error = failed.get(sequence.request.id)
            if error is not None and sequence.finish_reason is None:
                sequence.fail(error)


def _end_threads(pool: MatcherPool, worker: Worker, own_process: OwnProcess) -> None:
    # A fork that exits has none of them, and the other ranks are not its own.
    if own_process.is_here:
        pool.close()
        worker.close()


def _view(sequence: Sequence, tpot_slo_ms: float | None) -> RequestView:
    """What the length policy sees of a request; the target is that of requests without one."""
    request = sequence.request
    sampling = request.sampling
    return RequestView(
        request.id,
        len(request.prompt_ids) + len(sequence.output_ids),
        sequence.matcher is not None,
        sampling.speculate,
        tpot_slo_ms if sampling.tpot_slo_ms is None else sampling.tpot_slo_ms,
        sequence.confidences,
    )


def _target(sequence: Sequence, default_ms: float | None) -> float | None:
    """A request's TPOT target, its own or the engine's."""
    own = sequence.request.sampling.tpot_slo_ms
    return default_ms if own is None else own
