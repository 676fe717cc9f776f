"""What a drafter on the host proposes for a step, from known tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from overlap_spec.drafters.base import Drafter, host_draft
from overlap_spec.drafters.grafts import graft
from overlap_spec.steps import History, Int64s, StepPlan
from overlap_spec.tiers import Floats
from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.streams import RecordSpan

# Tokens, parents and scores of all trees.
Proposal = tuple[Int64s, Int64s, Floats]


class HostDrafts:
    """Asks a drafter that works on the host.

    Args:
        drafter: None: there is none.
        guard: Around what the drafter does.
        run_behind: The tokens that the grammar forces behind a row's root.
        record: Takes spans for the timeline.
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

    def propose(self, plan: StepPlan, histories: Sequence[History]) -> Proposal | None:
        """The drafts of a step's trees; None where nothing is drafted on the host.

        Args:
            histories: Known tokens of each decode row's request.
        """
        drafter, tier = self._drafter, plan.tier.own
        if drafter is None or not tier.steps or not histories or self._guard.fault is not None:
            return None
        start = time.perf_counter_ns()
        arrays = None
        with self._guard:
            known = [
                replace(history, forced=self._run_behind(row))
                for history, row in zip(histories, plan.decode_rows, strict=True)
            ]
            drafts = drafter.propose(known, tier)
            if drafter.behind is None:
                pairs = zip(drafts, known, strict=True)
                drafts = [graft(draft, history.forced, tier) for draft, history in pairs]
            if drafter.behind is None or any(len(draft.tokens) for draft in drafts):
                arrays = host_draft(drafts, tier)
        self._record("host", "propose", start, time.perf_counter_ns(), plan.index)
        return arrays

    def forget(self, history: History) -> None:
        """A request has ended."""
        if self._drafter is not None:
            with self._guard:
                self._drafter.forget(history)
