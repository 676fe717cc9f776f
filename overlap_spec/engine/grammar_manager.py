"""The grammar's side of one engine: its matchers by request, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from overlap_spec.errors import RequestFailed
from overlap_spec.grammar.matching.pool import AcceptItem, FillItem, MatcherCall, MatcherPool
from overlap_spec.scheduler.sequence import UNTOLD
from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.steps import HostTrees, StepPlan
from overlap_spec.timeline import union_ns


@dataclass
class StepFigures:
    """Totals over an engine's steps, in milliseconds."""

    steps: int = 0
    grammar_ms: float = 0.0
    exposed_ms: float = 0.0
    idle_ms: float = 0.0

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the grammar's time that ran beside verify, in [0, 1]: to wait for more than the
        grammar counts as nothing hidden. None where it took none."""
        if not self.grammar_ms:
            return None
        return max(0.0, 1 - self.exposed_ms / self.grammar_ms)


class GrammarManager:
    """The matchers of one engine by request id, which ``pool`` runs, and the time that they take,
    which ``record`` takes as :meth:`overlap_spec.timeline.Timeline.record`."""

    def __init__(self, pool: MatcherPool, record: Callable[..., None]) -> None:
        self.pool, self.record = pool, record
        self.matchers: dict[int, Any] = {}
        self.failed: dict[int, Exception] = {}
        self.figures = StepFigures()
        self.step = 0
        self._calls: list[MatcherCall] = []
        self._spent_ns = 0

    def fill(self, request_ids: Sequence[int], trees: HostTrees) -> None:
        """Write one mask row a node of each constrained request's tree, and the run behind it;
        ``request_ids``: whose the trees are. Rows of requests without a grammar, and of nodes that
        the walk does not reach, become zero."""
        items, parts = [], (trees.tokens, trees.first_child, trees.next_sibling)
        trees.runs.fill(-1)
        offsets = pairwise(trees.offsets.tolist())
        for request_id, (first, end) in zip(request_ids, offsets, strict=True):
            matcher, span = self.matchers.get(request_id), slice(first, end)
            if matcher is None:
                trees.rows[span] = 0
                continue
            own = {"rows": trees.rows[span], "runs": trees.runs[span]}
            items.append(FillItem(request_id, matcher, *[part[span] for part in parts], **own))
        self._run("fill", items)
        for item in items:
            if item.error is not None:
                self._fail(item.request_id, item.error)
            elif item.root_only:
                trees.limits[request_ids.index(item.request_id)] = 0

    def free(self, plan: StepPlan, sequences: Sequence[SequenceState]) -> list[bool]:
        """Whether each request that a step verifies is inside its model's thinking, after what it
        was last fed, and so accepts drafts in the relaxed way; noted of each."""
        found = {i: self.matchers.get(i) for i in plan.verified_ids}
        free = [matcher is not None and matcher.is_free for matcher in found.values()]
        thinking = {i for i, is_free in zip(found, free, strict=True) if is_free}
        for sequence in sequences:
            sequence.stats.relaxed_steps += sequence.request.id in thinking
        return free

    def accept(self, kept: Mapping[int, Sequence[int]]) -> None:
        """Feed each constrained request's kept tokens to its matcher."""
        own = self.matchers
        items = [AcceptItem(i, own[i], tokens) for i, tokens in kept.items() if i in own]
        self._run("accept", items)
        for item in items:
            error = item.error
            if error is None and item.accepted < len(item.tokens):
                error = RequestFailed("the matcher refused an accepted token")
            if error is not None:
                self._fail(item.request_id, error)

    def note_room(self, sequence: SequenceState) -> None:
        """Enter of a sequence that has ended what the room it had did to its text."""
        matcher = self.matchers.get(sequence.request.id)
        if matcher is None:
            return
        sequence.stats.narrowed_tokens = matcher.narrowed
        if sequence.finish_reason != "length":
            return
        if matcher.is_led:
            sequence.finish_reason = "stop"
        elif matcher.is_untold:
            sequence.warnings += (UNTOLD,)

    @property
    def spent_ms(self) -> float:
        """Wall-clock time of the grammar's work since the last :meth:`account`."""
        return self._spent_ns / 1e6

    def account(
        self, exposed_ms: float, idle_ms: float, sequences: Sequence[SequenceState]
    ) -> None:
        """Close a step's books: what was done since the last call is what it cost, each running
        sequence's part of it by the time of its matcher; ``exposed_ms``: how long compute stood
        idle for the grammar, ``idle_ms``: for any reason."""
        figures = self.figures
        figures.steps += 1
        figures.grammar_ms += self.spent_ms
        figures.exposed_ms += exposed_ms
        figures.idle_ms += idle_ms
        calls, self._calls, self._spent_ns = self._calls, [], 0
        if not calls:
            return
        stats = {sequence.request.id: sequence.stats for sequence in sequences}
        exposed_share = exposed_ms / (sum(call.end_ns - call.start_ns for call in calls) or 1)
        for call in calls:
            if (own := stats.get(call.request_id)) is not None:
                took_ns = call.end_ns - call.start_ns
                own.grammar_ms += took_ns / 1e6
                own.exposed_ms += exposed_share * took_ns
                own.illegal_drafts += call.refused

    def _fail(self, request_id: int, error: Exception) -> None:
        # A matcher that failed is in no known state: it is not touched again.
        self.drop(request_id)
        self.failed[request_id] = error

    def drop(self, request_id: int) -> None:
        """Forget a request that has ended."""
        self.matchers.pop(request_id, None)
        self.pool.forget(request_id)

    def _run(self, name: str, calls: Sequence[MatcherCall]) -> None:
        self.pool.run(calls)
        self._calls += calls
        # One batch ends before the next begins.
        self._spent_ns += union_ns([(call.start_ns, call.end_ns) for call in calls])
        record, step = self.record, self.step
        for call in calls:
            record("lane", name, call.start_ns, call.end_ns, step, request=call.request_id)
