"""What a drafter on the host proposes for a step, from known tokens, or has foreseen of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from overlap_spec.drafters.base import Drafter, Foreseen, host_draft
from overlap_spec.drafters.grafts import graft
from overlap_spec.steps import History, Int64s, StepPlan
from overlap_spec.tiers import Floats
from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.streams import RecordSpan

# Tokens, parents and scores of all trees.
Proposal = tuple[Int64s, Int64s, Floats]


class Forecast(NamedTuple):
    """What was foreseen for the requests of a step: ``known`` int64 ``(B,)``, how many tokens of
    each were known then, and ``tokens``, ``scores`` and ``starts`` ``(B, M)`` as of
    :class:`Foreseen`; behind its end a draft's nodes more, scores -inf and starts -1."""

    known: Int64s
    tokens: Int64s
    scores: Floats
    starts: Int64s


class HostDrafts:
    """Asks a drafter that works on the host, if there is one.

    Args:
        guard: Around what the drafter does.
        run_behind: The tokens that the grammar forces behind a row's root.
        record: Takes spans for the timeline.

    Attributes:
        foresees: Whether it drafts for the step after the one under way, so that none waits for it.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        guard: DrafterGuard,
        run_behind: Callable[[int], list[int]],
        record: RecordSpan,
    ) -> None:
        self._drafter, self._guard = drafter, guard
        self._run_behind, self._record = run_behind, record
        self.foresees = drafter is not None and drafter.behind is not None
        # By request id, with how many tokens were known then.
        self._foreseen: dict[int, tuple[int, Foreseen]] = {}

    def propose(self, plan: StepPlan, histories: Sequence[History]) -> Proposal | None:
        """The drafts of a step's trees, by the ``histories`` of its decode rows; None where nothing
        is drafted on the host."""
        drafter, tier = self._drafter, plan.tier.own
        if drafter is None or not tier.steps or not histories or self._guard.fault is not None:
            return None
        start, arrays = time.perf_counter_ns(), None
        with self._guard:
            known = self._with_runs(plan, histories)
            pairs = zip(drafter.propose(known, tier), known, strict=True)
            drafts = [graft(draft, history.forced, tier) for draft, history in pairs]
            arrays = host_draft(drafts, tier)
        self._record("host", "propose", start, time.perf_counter_ns(), plan.index)
        return arrays

    def foresee(self, step: InFlightStep, histories: Sequence[History]) -> None:
        """Have the step after this one drafted, by ``histories`` as of :meth:`propose`, while this
        one is verified."""
        drafter, plan = self._drafter, step.plan
        if drafter is None or not plan.tier.steps or not histories or self._guard.fault is not None:
            return
        # Between two passes of a CPU the host would keep their thread waiting.
        step.events.drafted.synchronize()
        start = time.perf_counter_ns()
        with self._guard:
            found = drafter.foresee(self._with_runs(plan, histories), plan.tier.own)
            pairs = zip(histories, found, strict=True)
            self._foreseen = {h.request_id: (len(h), own) for h, own in pairs if own is not None}
        self._record("host", "propose", start, time.perf_counter_ns(), plan.index)

    def foreseen(self, plan: StepPlan) -> Forecast | None:
        """What was foreseen for a step's trees; None where that is nothing."""
        ids = plan.request_ids[: len(plan.decode_rows)]
        found = [(row, *self._foreseen[n]) for row, n in enumerate(ids) if n in self._foreseen]
        if not found or not plan.tier.steps:
            return None
        shape = len(ids), max(len(own.tokens) for *_, own in found) + plan.tier.own.nodes - 1
        tokens, starts = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        known, scores = np.zeros(len(ids), np.int64), np.full(shape, -np.inf, np.float32)
        for row, length, own in found:
            known[row], count = length, len(own.tokens)
            tokens[row, :count], scores[row, :count], starts[row, :count] = own
        return Forecast(known, tokens, scores, starts)

    def _with_runs(self, plan: StepPlan, histories: Sequence[History]) -> list[History]:
        rows = zip(histories, plan.decode_rows, strict=True)
        return [replace(history, forced=self._run_behind(row)) for history, row in rows]

    def forget(self, history: History) -> None:
        """A request has ended."""
        if self._drafter is not None:
            with self._guard:
                self._drafter.forget(history)
