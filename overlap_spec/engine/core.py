"""The engine's loop: plans steps, runs them, commits their results. Knows tokens, not text."""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple

from overlap_spec.children import OwnProcess
from overlap_spec.config import EngineConfig
from overlap_spec.engine.budgets import Budgets
from overlap_spec.engine.grammar_manager import GrammarManager
from overlap_spec.grammar.matching.pool import MatcherPool
from overlap_spec.scheduler.scheduler import Scheduler
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.stats import Standing
from overlap_spec.steps import History, StepPlan, StepResult
from overlap_spec.timeline import Timeline
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.worker import Worker

Run = tuple[Sequence, tuple[int, ...]]


class StepOutputs(NamedTuple):
    """What steps brought: tokens of sequences that go on, and sequences that have ended."""

    runs: list[Run]
    ended: list[Sequence]


class EngineCore:
    """Scheduler, worker, grammar manager and length policy of one engine; not thread-safe.
    ``close`` ends all threads."""

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        scheduler: Scheduler,
        budgets: Budgets,
        pool: MatcherPool,
        timeline: Timeline,
    ) -> None:
        self.config, self.worker, self.scheduler = config, worker, scheduler
        self.budgets, self.timeline = budgets, timeline
        self.grammar = GrammarManager(pool, timeline.record)
        # Also for an engine never closed: a thread inside torch aborts a process that exits.
        self.close = weakref.finalize(self, _end_threads, pool, worker, OwnProcess())
        self._in_flight: InFlightStep | None = None
        self._before: InFlightStep | None = None
        self._runs: list[Run] = []
        # Output tokens of the requests that have ended.
        self._ended_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        config = self.config
        if config.drafter != "none" and sequence.request.sampling.temperature != 0:
            sequence.stats.lossy = config.by_threshold
        if sequence.matcher is not None:
            self.grammar.matchers[sequence.request.id] = sequence.matcher
        self.scheduler.add(sequence)

    def step(self) -> bool:
        """Run one step of whatever is queued; False when there is nothing to do. Results are read
        one step late, under the next verify; where there is none, or the mode is serial, at once.
        """
        with self.worker.watched():
            return self._step()

    def _step(self) -> bool:
        start = time.perf_counter_ns()
        plan = self.scheduler.plan(self.budgets.choose)
        if plan is None:
            return self._drain()
        last, self._in_flight = self._in_flight, None
        self.grammar.step = plan.index
        self.timeline.record("host", "plan", start, time.perf_counter_ns(), plan.index)

        kept: list[Run] | None = None
        step, drafts = self.worker.upload(plan), self.worker.host_drafts
        if drafts.foresees:
            self.worker.draft(step, drafts.foreseen(plan))
        else:
            if self.worker.traits.drafts_on_host and plan.tier.steps:
                kept = self._results(last)
            self.worker.draft(step, drafts.propose(plan, self._histories(plan)))
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
            self.budgets.drop(plan.index)
            self._before = None
            return True
        if step.constrained:
            trees = step.read_trees()
            self.grammar.fill(plan.verified_ids, trees)
            self.budgets.note(plan.verified_ids, trees)
        asks = self.worker.traits.asks_thinking and step.constrained
        self.worker.accept(step, self.grammar.free(plan, self.scheduler.running) if asks else ())
        self.worker.extend(step)
        if drafts.foresees:
            drafts.foresee(step, self._histories(plan))
        if self.config.overlap == "none":
            self._finish_serial(step)
        else:
            self._in_flight = step
        return True

    def outputs(self) -> StepOutputs:
        """What has happened since the last call. Where no request goes on, the step under way is
        read at once, so that it frees all."""
        if self._in_flight is not None and all(
            s.finish_reason is not None for s in self.scheduler.running
        ):
            self._drain()
        runs, self._runs = self._runs, []
        fresh = [s for s in self._open() if s.finish_reason is not None]
        self.scheduler.retire()
        self.budgets.end(fresh)
        for sequence in fresh:
            sequence.told = True
            self.grammar.drop(sequence.request.id)
            self.worker.host_drafts.forget(sequence.history)
            self._ended_tokens += len(sequence.output_ids)
        return StepOutputs([(s, run) for s, run in runs if run and s.finish_reason is None], fresh)

    def snapshot(self) -> dict[str, Any]:
        """State as plain data: length policy, drafter, pages, requests, grammar time."""
        allocator, figures, worker = self.scheduler.allocator, self.grammar.figures, self.worker
        refused = {"refused_nodes": int(worker.runner.refused)}
        return {
            "overlap": self.config.overlap,
            "speculation": self.budgets.snapshot(),
            "drafter": worker.guard.snapshot() | refused,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "output_tokens": self._ended_tokens + sum(len(s.output_ids) for s in self._open()),
            "pages_in_use": allocator.in_use,
            "pages": allocator.total,
            "kv_bytes": allocator.total * worker.traits.page_bytes,
            "kv_touched_bytes": allocator.touched * worker.traits.page_bytes,
            "state_bytes": worker.traits.state_bytes,
            "matchers": len(self.grammar.matchers),
            "graph_bytes": worker.recordings.bytes,
            "rank_pids": list(worker.rank_pids),
            "preemptions": self.scheduler.preemptions,
            **vars(figures),
            "hidden_fraction": figures.hidden_fraction,
        }

    def standings(self, most: int) -> list[Standing]:
        """Where requests stand that run or wait, running ones first; of at most ``most``."""
        now_ns = time.perf_counter_ns()
        return [s.standing(now_ns) for s in self._open()[:most]]

    def _open(self) -> list[Sequence]:
        """Sequences whose end nobody has been told of."""
        members = [*self.scheduler.running, *self.scheduler.waiting]
        return [s for s in members if not s.told]

    def _histories(self, plan: StepPlan) -> list[History]:
        """Known tokens of the decode rows, where the drafter works on the host."""
        if not self.worker.traits.drafts_on_host and not self.worker.host_drafts.foresees:
            return []
        by_row = {s.row: s for s in self.scheduler.running}
        return [by_row[row].history for row in plan.decode_rows]

    def _results(self, step: InFlightStep | None) -> list[Run]:
        """Wait for a step's results, and cut its runs by the stop rules; what is kept of them."""
        if step is None:
            return []
        start = time.perf_counter_ns()
        result, kept = self._read(step)
        idle = {"exposed_ms": result.exposed_ms, "idle_ms": result.idle_ms}
        self.grammar.account(**idle, sequences=self.scheduler.running)
        now = time.perf_counter_ns()
        self.timeline.record("host", "results", start, now, step.plan.index, **idle)
        return kept

    def _drain(self) -> bool:
        """Read the step under way, after which the worker is at rest; False if there is none."""
        # A step that cannot be read any more is not asked for again.
        last, self._in_flight = self._in_flight, None
        with self.worker.watched():
            self._accept(self._results(last))
        self._before = None
        return last is not None

    def _finish_serial(self, step: InFlightStep) -> None:
        """Read and accept a step at once: compute stands idle for the accepts too."""
        result, kept = self._read(step)
        start = time.perf_counter_ns()
        self._accept(kept)
        late_ms = (time.perf_counter_ns() - start) / 1e6 if kept else 0.0
        running = self.scheduler.running
        self.grammar.account(result.exposed_ms + late_ms, result.idle_ms, running)

    def _read(self, step: InFlightStep) -> tuple[StepResult, list[Run]]:
        """A step's results, entered where they belong; what is kept of its runs."""
        before = self._before
        adjacent = before is not None and before.plan.index == step.plan.index - 1
        result = self.worker.results(step, before if adjacent else None, self.grammar.spent_ms)
        self._end_failed()
        kept = self.scheduler.commit(result)
        self.budgets.observe(result)
        self._before = step
        return result, kept

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

    def _end_failed(self) -> None:
        """End the requests whose matcher failed."""
        failed, self.grammar.failed = self.grammar.failed, {}
        for sequence in self.scheduler.running if failed else ():
            error = failed.get(sequence.request.id)
            if error is not None and sequence.finish_reason is None:
                sequence.fail(error)


def _end_threads(pool: MatcherPool, worker: Worker, own_process: OwnProcess) -> None:
    # A fork that exits has none of them, and the other ranks are not its own.
    if own_process.is_here:
        pool.close()
        worker.close()
