"""Which requests run, on which pages, and what a step is to compute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from overlap_spec.errors import RequestFailed
from overlap_spec.scheduler.pages import PageAllocator
from overlap_spec.scheduler.prefix import PrefixTree
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.scheduler.stops import cut
from overlap_spec.shares import FairQueue, Turns
from overlap_spec.steps import Chunk, RowResult, StepPlan, StepResult
from overlap_spec.tiers import Budget
from overlap_spec.types import Request

FAIR_TURN = 8
PageGrant = tuple[int, int, tuple[int, ...]]


class Scheduler:
    """Over rows and pages the holders of requests take turns; of one holder's requests by priority,
    then first come, first served.

    Every :data:`FAIR_TURN`-th start goes to the request that waited longest of its holder's, so
    that none starves.

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
    ) -> None:
        self.reuse = reuse
        self.tree = PrefixTree(page_size)
        self.allocator = PageAllocator(pages, self.tree)
        self.page_size, self.chunk_tokens = page_size, chunk_tokens
        self.reserve_tokens = reserve_tokens
        self.waiting: FairQueue[Sequence] = FairQueue(lambda s: s.request.holder, _rank)
        self.running: list[Sequence] = []
        self._free_rows = deque(range(max_rows))
        self._passes = Turns()
        self._assign = assign
        # Pages handed out that no plan has told the worker of yet.
        self._grants: list[PageGrant] = []
        self._untrusted: list[int] = []
        self._steps = self._committed = self._starts = 0
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can run at all."""
        return self.allocator.total * self.page_size - self.reserve_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that is at most :attr:`longest` when it ends."""
        self.waiting.append(sequence)

    def plan(self, choose: Callable[[list[Sequence], int, int], Budget]) -> StepPlan | None:
        """The next step; None when there is nothing to run, or nothing before the steps that are
        under way have been committed.

        Args:
            choose: Budget of a step by the sequences that get its trees, its index, and the prompt
                tokens that it prefills.
        """
        live, moves = self._live(), self._starts + self.preemptions
        size, reserve = self.page_size, self.reserve_tokens
        for sequence in live:
            keys = sequence.key_tokens
            if keys + reserve <= len(sequence.pages) * size:
                continue  # There is room, as in most steps.
            if sequence.row >= 0 and not sequence.prefilling:
                grown = self._grow(sequence, keys)
                if not grown and sequence.row >= 0:
                    return None
        self._admit()
        if self._starts + self.preemptions != moves:
            live = self._live()
        chunks: list[tuple[Sequence, Chunk]] = []
        prefilling = [s for s in live if s.prefilling]
        room = self.chunk_tokens
        for sequence, share in self._in_turn(prefilling, self._shares(prefilling)):
            if share and sequence.row >= 0:
                self._reuse(sequence)
                chunk = self._chunk(sequence, share, room)
                if chunk is None:
                    continue
                if not self._grow(sequence, chunk.end):
                    break
                if chunk.behind:
                    self._passes.took(sequence.request.holder)
                    room -= chunk.behind
                chunks.append((sequence, sequence.asking(chunk)))
        # One that was preempted for these pages is not among them any more.
        trees = [s for s in live if not s.prefilling and s.row >= 0]
        members = [*trees, *(s for s, _ in chunks)]
        if not members:
            return None
        self._steps += 1
        for sequence, chunk in chunks:
            sequence.planned_tokens += 0 if chunk.comes_again else len(chunk.tokens)
            self._offer(sequence, sequence.planned_tokens)
        for sequence in members:
            sequence.last_step = self._steps
        grants, self._grants = tuple(self._grants), []
        return StepPlan(
            index=self._steps,
            budget=choose(trees, self._steps, sum(len(c.tokens) for _, c in chunks)),
            # Of a list a tuple is made sooner than of a generator.
            decode_rows=tuple([s.row for s in trees]),
            chunks=tuple(c for _, c in chunks),
            request_ids=tuple([s.request.id for s in members]),
            grammar=tuple([s.matcher is not None for s in members]),
            max_keys=max([s.key_tokens for s in trees], default=0) + self.reserve_tokens,
            pages=grants,
        )

    def _shares(self, prefilling: list[Sequence]) -> list[int]:
        """Prompt tokens of a step for each, in their order: the one with the least left goes first.

        Half of the step is for the one admitted first as long as it needs it, so that short
        prompts, which would wait for a long one, neither do so nor keep it from its end.
        """
        left = self.chunk_tokens
        needed = [s.prefill_tokens - s.planned_tokens for s in prefilling]
        if sum(needed) <= left:
            return needed
        needed = [n - self._cached(s) for s, n in zip(prefilling, needed, strict=True)]
        kept = min(needed[0], max(left // 2, self.page_size))
        shares = [0] * len(needed)
        for index in sorted(range(len(needed)), key=needed.__getitem__):
            if index == 0:
                kept = 0
            share = min(needed[index], left - kept)
            if share < needed[index]:
                share -= share % self.page_size
            shares[index] = share
            left -= share
        return shares

    def _cached(self, sequence: Sequence) -> int:
        """Tokens that a sequence which has not begun will find computed."""
        if not self.reuse or sequence.planned_tokens:
            return 0
        known = sequence.tokens(0, sequence.reusable_tokens)
        return len(self.tree.find(known, sequence.request.page_salt)) * self.page_size

    def commit(self, result: StepResult) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Enter a step's results; the kept tokens of each sequence that got any.

        A sequence that ended meanwhile drops its result.
        """
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
                self._distrust(sequence)
            if sequence.finish_reason is None:
                sequence.tier, sequence.confidences = tier, got.confidences
                kept.append((sequence, self._take(sequence, got, row in trees, now_ns)))
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

    def _take(
        self, sequence: Sequence, row: RowResult, verified: bool, now_ns: int
    ) -> tuple[int, ...]:
        if row.error is not None:
            sequence.fail(row.error)
            return ()
        output = sequence.output_ids
        kept, reason, match = cut(sequence.request, len(output), sequence.buffer, row.tokens)
        tokens = row.tokens[:kept]
        output += tokens
        if row.logprobs:
            sequence.logprobs += row.logprobs[:kept]
        for name, told in row.extras.items():
            sequence.extras[name].take(told, kept)
        sequence.record_run(kept, row, verified, now_ns)
        sequence.committed_tokens = sequence.total_tokens - 1
        if reason is not None:
            sequence.finish_reason, sequence.stop_match = reason, match
        elif len(row.tokens) <= row.accepted:
            sequence.fail(RequestFailed(_dead_end(sequence.request)))
        return tokens

    def abort(self, request_id: int) -> None:
        """End a request now; tokens that are still computed for it are dropped."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.request.id == request_id and sequence.finish_reason is None:
                sequence.finish_reason = "abort"

    def _distrust(self, sequence: Sequence) -> None:
        """Allow no reuse of what the sequence's pages hold: it may be no numbers. Others that hold
        some of them read on; all are cleared when nobody does."""
        sequence.untrusted = True
        self._free_untrusted(self.tree.detach(sequence.path))

    def _free_untrusted(self, pages: list[int]) -> None:
        self.allocator.free(pages)
        self._untrusted += pages

    def take_untrusted(self) -> list[int]:
        """Pages freed since the last call that may hold what is no number: to be cleared before
        the plan that :meth:`plan` has just made."""
        pages, self._untrusted = self._untrusted, []
        return pages

    def retire(self) -> list[Sequence]:
        """Free rows and pages of ended sequences that no step under way reads; returns these."""
        ended = [
            s
            for s in [*self.running, *self.waiting]
            if s.finish_reason is not None and s.last_step <= self._committed
        ]
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

    def _pages_for(self, tokens: int) -> int:
        return -(-(tokens + self.reserve_tokens) // self.page_size)

    def _admit(self) -> None:
        """Give rows to waiting sequences while their known text fits into the free pages."""
        if not self.waiting or not self._free_rows:
            return
        promised = sum(
            max(self._pages_for(_most_tokens(s)) - len(s.pages), 0) for s in self.running
        )
        while self.waiting and self._free_rows:
            line = self.waiting.line()
            sequence = line[0]
            if self._starts % FAIR_TURN == FAIR_TURN - 1:
                sequence = min(line, key=lambda s: s.request.id)
            needed = self._pages_for(_most_tokens(sequence))
            if promised + needed > self.allocator.free_count:
                return
            promised += needed
            self._starts += 1
            self.waiting.take(sequence)
            sequence.row = self._free_rows.popleft()
            sequence.prefill_tokens = sequence.total_tokens
            self.running.append(sequence)
            self._assign(sequence)

    def _reuse(self, sequence: Sequence) -> None:
        """Before its first chunk: let a sequence start after pages that hold its first tokens."""
        if not self.reuse or sequence.planned_tokens or sequence.pages:
            return
        known = sequence.tokens(0, sequence.reusable_tokens)
        path = self.tree.find(known, sequence.request.page_salt)
        if path:
            self.tree.acquire(path)
            sequence.path = path
            sequence.pages = [node.page for node in path]
            self._grants.append((sequence.row, 0, tuple(sequence.pages)))
            sequence.planned_tokens = sequence.committed_tokens = len(path) * self.page_size
            sequence.stats.cached_tokens = sequence.planned_tokens

    def _offer(self, sequence: Sequence, tokens: int) -> None:
        """Let others start after the sequence's first ``tokens`` tokens, from the next step on."""
        if self.reuse:
            known, salt = sequence.tokens(0, tokens), sequence.request.page_salt
            self.tree.insert(known, sequence.pages, sequence.path, salt)

    def flush_cache(self) -> int:
        """Forget the pages that no sequence holds; how many there were."""
        pages = self.tree.evict(self.tree.idle_pages)
        self.allocator.free(pages)
        return len(pages)

    def _in_turn(self, prefilling: list[Sequence], shares: list[int]) -> list[tuple[Sequence, int]]:
        """Sequences with their shares of the step, those first whose holder's passes behind prompts
        come first."""
        each = list(zip(prefilling, shares, strict=True))
        passing = {s.request.holder for s in prefilling if s.passing is not None}
        if len(passing) > 1:
            first = self._passes.first(sorted(passing))
            each.sort(key=lambda pair: pair[0].request.holder != first)
        return each

    def _chunk(self, sequence: Sequence, budget: int, room: int) -> Chunk | None:
        """The next tokens to prefill: all, or full pages of them; None if not one page fits, or
        the pass behind them has to wait.

        Args:
            room: Slots that passes behind prompts may still write in the step.
        """
        start, size = sequence.planned_tokens, self.page_size
        end, part, behind, final = sequence.prefill_tokens, sequence.passing, 0, True
        if part is not None and end - start <= budget:
            before = (end - 1) // size * size
            if part.passes > 1 and before > start:
                # Of what comes again with each pass, no more than a page.
                budget = before - start
            else:
                behind, final = part.next_behind, part.passes == 1
                if behind is None or (behind > room and room != self.chunk_tokens):
                    return None
        if end - start > budget:
            end = start + budget // size * size
            if end == start:
                return None
            final = False
        tokens = np.array(sequence.tokens(start, end), np.int64)
        page_before = sequence.pages[start // size - 1] if start else 0
        return Chunk(sequence.row, start, tokens, final, page_before, behind)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for ``tokens`` and the reserve, taken from the sequence admitted last if need be.

        False where that has to wait: pages that a step under way reads are not free.
        """
        missing = self._pages_for(tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        while missing > self.allocator.free_count:
            if self._committed < self._steps:
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        pages = self.allocator.take(missing)
        self._grants.append((sequence.row, len(sequence.pages), pages))
        sequence.pages += pages
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Give up the victim's row and pages; it starts again from its tokens, first in line."""
        self._leave(victim)
        victim.committed_tokens = victim.planned_tokens = victim.prefill_tokens = 0
        self.waiting.append(victim)
        self.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        self._grants = [grant for grant in self._grants if grant[0] != sequence.row]
        if sequence.error is None and not sequence.untrusted:
            self._offer(sequence, sequence.committed_tokens)
        for extra in sequence.extras.values():
            extra.leave()
        shared = {node.page for node in sequence.path}
        own = [page for page in sequence.pages if page not in shared]
        if sequence.untrusted:
            self._free_untrusted(own)
        else:
            self.allocator.free(own)
        self._free_untrusted(self.tree.release(sequence.path))
        sequence.pages, sequence.path = [], []
        self._free_rows.append(sequence.row)
        sequence.row = -1
        self.running.remove(sequence)


def _most_tokens(sequence: Sequence) -> int:
    """Keys that a sequence has after its prefill, before it goes on."""
    part = sequence.passing
    return sequence.total_tokens + (0 if part is None else part.most_behind)


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Place in the queue; a preempted sequence keeps that of its arrival."""
    return -sequence.request.priority, sequence.request.id


def _dead_end(request: Request) -> str:
    """Why a request has no next token."""
    sampling = request.sampling
    names = ["the grammar"] if request.grammar is not None else []
    names += ["allowed_token_ids"] if sampling.allowed_token_ids is not None else []
    names += ["bad_words"] if request.banned else []
    names += ["logit_bias"] if sampling.logit_bias else []
    together = " together" if len(names) > 1 else ""
    return f"{' and '.join(names)}{together} allow no token here: a dead end"
