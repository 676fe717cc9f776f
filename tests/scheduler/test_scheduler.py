"""The scheduler alone, with a made-up worker: pages conserved, budgets kept, nobody starved."""

import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from overlap_spec.errors import NumericFault
from overlap_spec.scheduler.scheduler import Scheduler
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.scheduler.stops import TextBuffer, cut
from overlap_spec.steps import RowResult, StepPlan, StepResult
from overlap_spec.tiers import Budget, Tier
from overlap_spec.types import Request, SamplingParams

TIER = Tier(3, 1, 4)
BUDGET = Budget(TIER)
RESERVE = 9
STOP = 0


class Letters:
    """Token n is the n-th letter; tokens over 25 are two letters."""

    def push(self, tokens: Collection[int]) -> str:
        return "".join(
            chr(97 + t) if t < 26 else chr(97 + t // 26) + chr(97 + t % 26) for t in tokens
        )


def sequence(number: int, prompt: int, max_tokens: int, **sampling: Any) -> Sequence:
    params = SamplingParams(**sampling)
    request = Request(
        number, tuple(range(1, prompt + 1)), params, None, max_tokens, frozenset({STOP}), 0, 0
    )
    return Sequence(request, TextBuffer(Letters(), tuple(params.stop)))


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests and aborts against a worker that accepts random runs."""

    @initialize(
        lag=st.sampled_from([0, 1]),
        pages=st.integers(8, 40),
        page_size=st.sampled_from([1, 4, 16]),
        rows=st.integers(1, 5),
        budget=st.integers(1, 30),
        slots=st.sampled_from([None, 0, 1, 3, 50]),
    )
    def start(
        self, lag: int, pages: int, page_size: int, rows: int, budget: int, slots: int | None
    ) -> None:
        # Results come this many steps late, as in the overlapped modes.
        self.lag = lag
        self.flights: list[StepPlan] = []
        self.rows, self.budget = rows, max(budget, page_size)
        self.assigned: dict[int, int] = {}
        self.scheduler = Scheduler(
            max(pages, 30 // page_size + 2),
            page_size,
            rows,
            self.budget,
            RESERVE,
            lambda s: self.assigned.__setitem__(s.row, s.request.id),
            state_slots=None if slots is None else range(100, 100 + slots),
        )
        # Slot, or row, of a state → the tokens that it is of.
        self.slots, self.states = slots, dict[int, list[int]]()
        self.live: dict[int, Sequence] = {}
        self.kept: dict[int, list[int]] = {}
        self.random = random.Random(4)
        self.number = 0

    @rule(prompt=st.integers(1, 60), max_tokens=st.integers(1, 40), priority=st.integers(0, 2))
    def submit(self, prompt: int, max_tokens: int, priority: int) -> None:
        if prompt + max_tokens <= self.scheduler.allocator.longest:
            new = sequence(self.number, prompt, max_tokens)
            new.request = replace(new.request, priority=priority)
            self.live[self.number] = new
            self.kept[self.number] = []
            self.number += 1
            self.scheduler.add(new)

    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick: int) -> None:
        if self.live:
            victim = sorted(self.live)[pick % len(self.live)]
            self.scheduler.abort(victim)
            self.retire()

    @rule()
    def step(self) -> None:
        plan = self.scheduler.plan(lambda *_: BUDGET)
        if plan is None:
            assert self.flights or not self.live or self.scheduler.waiting
        else:
            self.check_plan(plan)
            self.flights.append(plan)
        while self.flights and (plan is None or len(self.flights) > self.lag):
            self.settle(self.flights.pop(0))
        self.retire()

    def check_plan(self, plan: StepPlan) -> None:
        assert sum(len(c.tokens) for c in plan.chunks) <= self.budget
        rows = [*plan.decode_rows, *(c.row for c in plan.chunks)]
        assert len(set(rows)) == len(rows) <= self.rows
        by_id = {s.request.id: s for s in self.scheduler.running}
        for request_id, row in zip(plan.request_ids, rows, strict=True):
            assert by_id[request_id].row == row
            assert self.assigned[row] == request_id
        for request_id, chunk in zip(
            plan.request_ids[len(plan.decode_rows) :], plan.chunks, strict=True
        ):
            known = [*by_id[request_id].request.prompt_ids, *self.kept[request_id]]
            end = chunk.start + len(chunk.tokens)
            assert chunk.tokens.tolist() == known[chunk.start : end]
            assert chunk.final == (end == len(known))
            assert chunk.start % self.scheduler.allocator.size == 0
        if self.slots is not None:
            self.check_states(plan)
        for s in by_id.values():
            if s.request.id in plan.request_ids:
                slots = len(s.pages) * self.scheduler.allocator.size
                assert slots >= s.key_tokens + RESERVE

    def check_states(self, plan: StepPlan) -> None:
        """A chunk starts from the state of what stands before it; all are read before any is
        written."""
        states = dict(self.states)
        for chunk in plan.chunks:
            fresh = chunk.start == 0 and chunk.state is None
            before = [] if fresh else states[chunk.row if chunk.state is None else chunk.state]
            tokens = chunk.tokens.tolist()
            assert len(before) == chunk.start
            for behind, slot in chunk.kept:
                assert (chunk.start + behind) % self.scheduler.allocator.size == 0
                self.states[slot] = before + tokens[:behind]
            self.states[chunk.row] = before + tokens
            row = next(s for s in self.scheduler.running if s.row == chunk.row)
            known = [*row.request.prompt_ids, *self.kept[row.request.id]]
            assert self.states[chunk.row] == known[: chunk.start + len(tokens)]
        written = [slot for chunk in plan.chunks for _, slot in chunk.kept]
        assert len(set(written)) == len(written)

    def settle(self, plan: StepPlan) -> None:
        results = []
        for index in range(len(plan.verified)):
            decode = index < len(plan.decode_rows)
            accepted = self.random.randint(0, 3) if decode else 0
            run = tuple(self.random.randint(0, 9) for _ in range(accepted + 1))
            results.append(RowResult(run, 3 if decode else 0, accepted))
        for s, run in self.scheduler.commit(StepResult(plan, tuple(results))):
            self.kept[s.request.id] += run
            assert s.output_ids == self.kept[s.request.id]
            assert len(s.output_ids) <= s.request.max_tokens
            if s.finish_reason is None:
                assert s.committed_tokens == s.total_tokens - 1

    def retire(self) -> None:
        for s in self.scheduler.retire():
            del self.live[s.request.id]

    @invariant()
    def pages_are_conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        allocator = self.scheduler.allocator
        owned = [p for s in self.scheduler.running for p in s.pages]
        shared = [node.page for s in self.scheduler.running for node in s.path]
        assert len(set(owned) | set(shared)) == allocator.in_use
        # A page that two sequences read is one of the tree's.
        assert all(owned.count(p) == 1 or p in shared for p in owned)
        assert allocator.in_use + allocator.free_count == allocator.total
        assert not any(s.pages for s in self.scheduler.waiting)
        assert not any(s.start for s in self.scheduler.waiting)

    def teardown(self) -> None:
        """Everyone who was let in gets through, in a bounded number of steps."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle
        assert self.scheduler.allocator.in_use == 0
        assert not self.live


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestScheduler = SchedulerMachine.TestCase


def run_cut(run: list[int], **sampling: Any) -> tuple[int, str | None, Any, str]:
    s = sequence(0, 3, sampling.pop("max_tokens", 99), **sampling)
    end = cut(s.request, 0, s.buffer, run)
    return end.kept, end.reason, end.match, s.buffer.text


@pytest.mark.parametrize(
    ("run", "sampling", "want"),
    [
        ([1, 2, 3], {}, (3, None, None, "bcd")),
        ([1, STOP, 3], {}, (2, "stop", STOP, "b")),
        ([1, 2, 3], {"max_tokens": 2}, (2, "length", None, "bc")),
        ([1, 2, 3], {"stop": "cd"}, (3, "stop", "cd", "b")),
        ([1, 2, 3], {"stop": ["d", "bc"]}, (2, "stop", "bc", "")),
        # One token can complete two strings: the one that starts first wins.
        ([30, 3], {"stop": ["e", "be"]}, (1, "stop", "be", "")),
        # At the same token a stop string comes before the length.
        ([1, 2], {"stop": "c", "max_tokens": 2}, (2, "stop", "c", "b")),
        ([STOP], {"max_tokens": 1}, (1, "stop", STOP, "")),
        ([1, 2, 1, 2], {"stop": "c", "min_tokens": 3}, (4, "stop", "c", "bcb")),
    ],
)
def test_cut(run: list[int], sampling: dict[str, Any], want: tuple[Any, ...]) -> None:
    assert run_cut(run, **sampling) == want


def test_released_text_never_shows_part_of_a_stop_string() -> None:
    buffer = TextBuffer(Letters(), ("bcd",))
    shown = []
    for token in (0, 1, 2, 2, 1, 2):
        assert buffer.push([token]) is None
        shown.append(buffer.release(finished=False))
    assert shown == ["a", "", "", "bcc", "", ""]
    assert buffer.push([3]) == (0, "bcd")
    assert buffer.release(finished=True) == ""
    assert buffer.text == "abcc"


def starts(priorities: list[int]) -> list[int]:
    """The order in which one row takes waiting requests, each done in one step."""
    order: list[int] = []
    scheduler = Scheduler(50, 4, 1, 64, RESERVE, lambda s: order.append(s.request.id))
    for number, priority in enumerate(priorities):
        new = sequence(number, 3, 1)
        new.request = replace(new.request, priority=priority)
        scheduler.add(new)
    while (plan := scheduler.plan(lambda *_: BUDGET)) is not None:
        rows = tuple(RowResult((1,), 0, 0) for _ in plan.verified)
        scheduler.commit(StepResult(plan, rows))
        scheduler.retire()
    return order


def test_priorities_and_arrival_order() -> None:
    assert starts([0, 0, 2, 1, 2]) == [2, 4, 3, 0, 1]


def test_low_priority_does_not_starve() -> None:
    order = starts([0] + [5] * 40)
    assert order.index(0) == 7


def test_a_step_is_not_planned_for_what_the_step_under_way_ends() -> None:
    scheduler = Scheduler(50, 4, 2, 64, RESERVE, lambda _: None)
    for number, max_tokens in enumerate((1, 3)):
        scheduler.add(sequence(number, 3, max_tokens))
    flights = [scheduler.plan(lambda *_: BUDGET)]
    verified = []
    while (plan := scheduler.plan(lambda *_: BUDGET)) is not None or flights:
        flights.append(plan)
        if (done := flights.pop(0)) is not None:
            verified.append([request_id for request_id, _, _ in done.verified])
            scheduler.commit(StepResult(done, tuple(RowResult((1,), 0, 0) for _ in done.verified)))
            scheduler.retire()
        flights = [flight for flight in flights if flight is not None]
    assert verified == [[0, 1], [1], [1]]
    assert scheduler.idle


def prefills(prompts: list[tuple[int, int]], steps: int) -> list[dict[int, int]]:
    """Prompt tokens that each request has in each step of 64, in pages of 4.

    Args:
        prompts: First token and length of each: equal first tokens are equal prompts.
    """
    scheduler = Scheduler(500, 4, 8, 64, RESERVE, lambda _: None)
    for number, (first, length) in enumerate(prompts):
        new = sequence(number, length, 2)
        ids = (first, *new.request.prompt_ids[1:])
        new.request = replace(new.request, prompt_ids=ids)
        scheduler.add(new)
    found = []
    for _ in range(steps):
        plan = scheduler.plan(lambda *_: BUDGET)
        assert plan is not None
        ids = plan.request_ids[len(plan.decode_rows) :]
        found.append({i: len(c.tokens) for i, c in zip(ids, plan.chunks, strict=True)})
        scheduler.commit(StepResult(plan, tuple(RowResult((1,), 0, 0) for _ in plan.verified)))
        scheduler.retire()
    return found


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert prefills([(1, 200), (2, 11)], 2) == [{0: 52, 1: 11}, {0: 64}]


def test_short_prompts_leave_half_of_a_step_to_the_first() -> None:
    first, second, *_ = prefills([(1, 200), (2, 30), (3, 31), (4, 32)], 2)
    assert first == {0: 32, 1: 30}
    assert second == {0: 32, 2: 31}


def test_equal_prompts_are_computed_once() -> None:
    found = prefills([(1, 130), (1, 130), (1, 130)], 3)
    assert found[:2] == [{0: 64}, {0: 64}]
    assert found[2] == {0: 2, 1: 2, 2: 2}


def test_a_long_prompt_that_is_cached_counts_as_short() -> None:
    scheduler = Scheduler(500, 4, 8, 64, RESERVE, lambda _: None)
    plans = []

    def steps(count: int) -> None:
        for _ in range(count):
            plan = scheduler.plan(lambda *_: BUDGET)
            assert plan is not None
            sizes = (len(chunk.tokens) for chunk in plan.chunks)
            plans.append(dict(zip(plan.request_ids, sizes, strict=True)))
            scheduler.commit(StepResult(plan, tuple(RowResult((1,), 0, 0) for _ in plan.verified)))
            scheduler.retire()

    scheduler.add(sequence(0, 150, 1))
    steps(3)
    other = sequence(1, 120, 1)
    other.request = replace(other.request, prompt_ids=(77,) * 120)
    scheduler.add(other)
    scheduler.add(sequence(2, 150, 1))
    steps(1)
    assert plans[-1] == {1: 60, 2: 2}


def test_holders_of_requests_that_wait_take_turns() -> None:
    scheduler = Scheduler(100, 4, 2, 100, RESERVE, lambda _: None)
    holders = ["one"] * 5 + ["other"]
    for number, holder in enumerate(holders):
        new = sequence(number, 4, 4)
        # A holder's priority orders its own requests alone.
        new.request = replace(new.request, holder=holder, priority=int(holder == "one"))
        scheduler.add(new)
    scheduler.plan(lambda *_: BUDGET)
    assert [s.request.holder for s in scheduler.running] == ["one", "other"]


def of_its_own(number: int, prompt: int) -> Sequence:
    """A sequence that starts like no other."""
    new = sequence(number, prompt, 40)
    new.request = replace(new.request, prompt_ids=(100 + number,) * prompt)
    return new


def commit(scheduler: Scheduler, plan: StepPlan | None, tokens: int) -> None:
    """Each tree of ``plan`` brings so many tokens, each prompt one."""
    assert plan is not None
    trees = len(plan.decode_rows)
    rows = [RowResult((1,) * tokens, 3, tokens - 1)] * trees
    rows += [RowResult((1,), 0, 0)] * (len(plan.verified) - trees)
    scheduler.commit(StepResult(plan, tuple(rows)))
    scheduler.retire()


@pytest.mark.parametrize("together", [True, False])
def test_pages_that_a_prompt_still_needs_are_promised_to_it(together: bool) -> None:
    """15 of 19 pages are for the first, which takes them chunk by chunk; the second needs 9."""
    scheduler = Scheduler(20, 4, 4, 16, RESERVE, lambda _: None)
    first, second = of_its_own(0, 48), of_its_own(1, 24)
    scheduler.add(first)
    if together:
        scheduler.add(second)
    for step in range(3):
        plan = scheduler.plan(lambda *_: BUDGET)
        assert plan is not None
        assert plan.request_ids == (0,)
        if not step and not together:
            # There are pages enough for it, but for the promise.
            assert scheduler.allocator.free_count > 9
            scheduler.add(second)
        commit(scheduler, plan, 1)
    assert (scheduler.running, scheduler.preemptions) == ([first], 0)
    scheduler.abort(0)
    scheduler.retire()
    plan = scheduler.plan(lambda *_: BUDGET)
    assert plan is not None
    assert plan.request_ids == (1,)


def test_nobody_gives_up_pages_that_the_step_under_way_reads() -> None:
    scheduler = Scheduler(11, 4, 2, 64, RESERVE, lambda _: None)
    for number in range(2):
        scheduler.add(of_its_own(number, 8))
    commit(scheduler, scheduler.plan(lambda *_: BUDGET), 1)
    flights = [scheduler.plan(lambda *_: BUDGET) for _ in range(2)]
    commit(scheduler, flights[0], 4)
    # Both want a page, none is free, and the second of these steps is under way.
    assert scheduler.plan(lambda *_: BUDGET) is None
    assert (scheduler.preemptions, scheduler.allocator.free_count) == (0, 0)
    assert [len(s.pages) for s in scheduler.running] == [5, 5]
    commit(scheduler, flights[1], 4)
    plan = scheduler.plan(lambda *_: BUDGET)
    assert plan is not None
    assert (plan.request_ids, scheduler.preemptions) == ((0,), 1)


def test_pages_of_a_numeric_fault_are_cleared_when_nobody_holds_them() -> None:
    """Prompts of three pages, two of them shared; the middle one's logits are no numbers."""
    scheduler = Scheduler(40, 4, 3, 64, RESERVE, lambda _: None)

    def add(number: int) -> Sequence:
        new = sequence(number, 12, 40)
        new.request = replace(new.request, prompt_ids=(*range(8), *[50 + number] * 4))
        scheduler.add(new)
        return new

    first = add(0)
    commit(scheduler, scheduler.plan(lambda *_: BUDGET), 1)
    failing = add(1)
    plan = scheduler.plan(lambda *_: BUDGET)
    assert plan is not None
    shared, own, kept = set(first.pages[:2]), set(failing.pages[2:]), first.pages[2]
    assert set(failing.pages[:2]) == shared
    fault = RowResult((), 0, 0, error=NumericFault("no numbers"))
    scheduler.commit(StepResult(plan, (RowResult((1,), 0, 0), fault)))
    assert scheduler.retire() == [failing]
    # A later one finds nothing of it, and the first keeps what it reads.
    later = add(2)
    plan = scheduler.plan(lambda *_: BUDGET)
    assert plan is not None
    assert set(plan.untrusted) == own
    commit(scheduler, plan, 1)
    assert later.stats.cached_tokens == 0
    assert set(first.pages[:2]) == shared
    assert scheduler.allocator.untrusted == []
    for number in (0, 2):
        scheduler.abort(number)
    scheduler.retire()
    # With what lay behind them in the tree.
    assert set(scheduler.allocator.untrusted) == {*shared, kept}
    assert scheduler.allocator.in_use == 0
