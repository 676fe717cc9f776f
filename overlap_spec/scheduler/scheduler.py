"""Which requests run, on which pages, and what a step is to compute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from overlap_spec.scheduler.pages import PageAllocator
from overlap_spec.scheduler.prefill import Prefill
from overlap_spec.scheduler.prefix import PrefixTree
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.shares import FairQueue
from overlap_spec.steps import StepPlan, StepResult
from overlap_spec.tiers import Budget

FAIR_TURN = 8


class Scheduler:
    """Over rows and pages the holders of requests take turns; of one holder's requests by priority,
    then first come, first served. Every :data:`FAIR_TURN`-th start goes to the request that waited
    longest of its holder's, so that none starves.

    A sequence holds pages for what it has committed and twice the draft window after it; when
    pages run out, the sequence admitted last gives its pages up and is computed again later.

    Args:
        pages: Pages of the caches, page 0 included.
        page_size: Slots of a page, in tokens.
        max_rows: Sequences that run at once.
        chunk_tokens: Prefill tokens a step computes at most.
        reserve_tokens: Slots after the committed length that a running sequence owns.
        assign: Called with a sequence that has just got its row.
        reuse: Whether pages are kept for prompts that start alike.
        state_slots: Of a model that has layers without keys: where states are kept with pages.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        max_rows: int,
        chunk_tokens: int,
        reserve_tokens: int,
        assign: Callable[[Sequence], None],
        reuse: bool = True,
        state_slots: Iterable[int] | None = None,
    ) -> None:
        tree = PrefixTree(page_size, state_slots)
        self.allocator = PageAllocator(pages, tree, reserve_tokens, reuse)
        self.reserve_tokens = reserve_tokens
        # One that was preempted keeps the place of its arrival.
        self.waiting: FairQueue[Sequence] = FairQueue(
            lambda s: s.request.holder, lambda s: (-s.request.priority, s.request.id)
        )
        self.running: list[Sequence] = []
        self._free_rows = deque(range(max_rows))
        self._prefill = Prefill(chunk_tokens, self.allocator)
        self._assign = assign
        self._steps = self._committed = self._starts = 0
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that is at most ``allocator.longest`` when it ends."""
        self.waiting.append(sequence)

    def plan(self, choose: Callable[[list[Sequence], int, int], Budget]) -> StepPlan | None:
        """The next step; None when there is nothing to run, or nothing before the steps that are
        under way have been committed; ``choose``: budget of a step by the sequences that get its
        trees, its index, and the prompt tokens that it prefills."""
        live, moves = self._live(), self._starts + self.preemptions
        size, reserve = self.allocator.size, self.reserve_tokens
        for sequence in live:
            keys = sequence.key_tokens
            if keys + reserve <= len(sequence.pages) * size:
                continue  # There is room, as in most steps.
            grows = sequence.row >= 0 and not sequence.prefilling
            if grows and not self._grow(sequence, keys) and sequence.row >= 0:
                return None
        self._admit()
        if self._starts + self.preemptions != moves:
            live = self._live()
        prefilling = [s for s in live if s.prefilling]
        chunks = list(self._prefill.chunks(prefilling, self._grow)) if prefilling else []
        # One that was preempted for these pages is not among them any more.
        trees = [s for s in live if not s.prefilling and s.row >= 0]
        members = [*trees, *(s for s, _ in chunks)]
        if not members:
            return None
        self._steps += 1
        for number, (sequence, chunk) in enumerate(chunks):
            sequence.planned_tokens += 0 if chunk.comes_again else len(chunk.tokens)
            self.allocator.offer(sequence, sequence.planned_tokens)
            chunks[number] = sequence, self.allocator.with_states(sequence, chunk, self._steps)
        for sequence in members:
            sequence.last_step = self._steps
        pages = self.allocator
        granted, pages.granted = tuple(pages.granted), []
        untrusted, pages.untrusted = tuple(pages.untrusted), []
        return StepPlan(
            index=self._steps,
            budget=choose(trees, self._steps, sum(len(c.tokens) for _, c in chunks)),
            # Of a list a tuple is made sooner than of a generator.
            decode_rows=tuple([s.row for s in trees]),
            chunks=tuple(c for _, c in chunks),
            request_ids=tuple([s.request.id for s in members]),
            grammar=tuple([s.matcher is not None for s in members]),
            max_keys=max([s.key_tokens for s in trees], default=0) + self.reserve_tokens,
            pages=granted,
            untrusted=untrusted,
        )

    def commit(self, result: StepResult) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Enter a step's results; the kept tokens of each sequence that got any. One that ended
        meanwhile drops its result."""
        plan = result.plan
        self._committed = plan.index
        by_id = {s.request.id: s for s in self.running}
        trees = set(plan.decode_rows)
        for request_id, told in result.told.items():
            for name, value in told.items():
                by_id[request_id].extras[name].hear(value)
        kept, tier, now_ns = [], plan.tier, time.perf_counter_ns()
        idle_ms = result.idle_ms / max(len(plan.verified), 1)
        for (request_id, row, _), got in zip(plan.verified, result.rows, strict=True):
            sequence = by_id[request_id]
            sequence.stats.idle_ms += idle_ms
            if not sequence.output_ids and got.error is None:
                for extra in sequence.extras.values():
                    got = extra.begin(got, plan.index)
            if got.error is not None:
                # Also of one that has ended: its pages hold it all the same.
                self.allocator.distrust(sequence)
            if sequence.finish_reason is None:
                sequence.tier, sequence.confidences = tier, got.confidences
                kept.append((sequence, sequence.take(got, row in trees, now_ns)))
        return kept

    def may_end_all(self, plan: StepPlan) -> bool:
        """Whether the step under way may end every request of ``plan``, the one after it."""
        if plan.chunks:
            return False
        members = set(plan.request_ids)
        for sequence in self.running:
            request = sequence.request
            if request.stop_ids or request.sampling.stop:
                continue
            tokens = len(sequence.output_ids) + self.reserve_tokens
            if tokens <= request.max_tokens and request.id in members:
                return False
        return True

    def ended_all(self, plan: StepPlan) -> bool:
        """Whether every request of ``plan`` has ended."""
        members = set(plan.request_ids)
        return all(s.finish_reason is not None for s in self.running if s.request.id in members)

    def drop(self, plan: StepPlan) -> None:
        """Enter that nothing comes of the last plan: the step before it ended everyone."""
        self._committed = plan.index

    def abort(self, request_id: int) -> None:
        """End a request now; tokens that are still computed for it are dropped."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.request.id == request_id and sequence.finish_reason is None:
                sequence.finish_reason = "abort"

    def retire(self) -> list[Sequence]:
        """Free rows and pages of ended sequences that no step under way reads; returns these."""
        everyone = [s for s in [*self.running, *self.waiting] if s.finish_reason is not None]
        ended = [s for s in everyone if s.last_step <= self._committed]
        for sequence in ended:
            if sequence.row >= 0:
                self._leave(sequence)
            else:
                self.waiting.remove(sequence)
        return ended

    def _live(self) -> list[Sequence]:
        """Running sequences that the step to be planned may compute for."""
        return [s for s in self.running if s.finish_reason is None and not self._ending(s)]

    def _ending(self, sequence: Sequence) -> bool:
        """Whether the step under way ends the sequence for certain: it brings at least a token."""
        if len(sequence.output_ids) + 1 < sequence.request.max_tokens:
            return False
        return sequence.last_step > self._committed and not sequence.prefilling

    def _admit(self) -> None:
        """Give rows to waiting sequences while their known text fits into the free pages."""
        if not self.waiting or not self._free_rows:
            return
        needed_by = self.allocator.needed
        promised = sum(max(needed_by(s.most_tokens) - len(s.pages), 0) for s in self.running)
        while self.waiting and self._free_rows:
            line = self.waiting.line()
            sequence = line[0]
            if self._starts % FAIR_TURN == FAIR_TURN - 1:
                sequence = min(line, key=lambda s: s.request.id)
            needed = needed_by(sequence.most_tokens)
            if promised + needed > self.allocator.free_count:
                return
            promised += needed
            self._starts += 1
            self.waiting.take(sequence)
            sequence.row = self._free_rows.popleft()
            sequence.prefill_tokens = sequence.total_tokens
            self.running.append(sequence)
            self._assign(sequence)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for ``tokens`` and the reserve, taken from the sequence admitted last if need be:
        it starts again from its tokens, first in line. False where that has to wait: pages that a
        step under way reads are not free."""
        missing = self.allocator.needed(tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self.allocator.free_count:
            # Of tokens that a sequence has computed again, its own pages take the tree's place.
            for each in self.running:
                self.allocator.free(self.allocator.tree.merge(each.path, each.pages))
        while missing > self.allocator.free_count:
            if self._committed < self._steps:
                return False
            victim = self.running[-1]
            self._leave(victim)
            victim.committed_tokens = victim.planned_tokens = victim.prefill_tokens = 0
            self.waiting.append(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        self.allocator.give(sequence, missing)
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence's row and pages."""
        self.allocator.take_back(sequence)
        for extra in sequence.extras.values():
            extra.leave()
        self._free_rows.append(sequence.row)
        sequence.row = -1
        self.running.remove(sequence)
