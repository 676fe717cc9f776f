"""The passes over trees, as a worker's steps call them: each recorded when it is first needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from overlap_spec.tiers import Tier
from overlap_spec.worker import examples
from overlap_spec.worker.chains import Chain, FixedChain, first_step, link_steps, next_step
from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.drafts import Drafts
from overlap_spec.worker.examples import same
from overlap_spec.worker.graphs import (
    Eager,
    Place,
    Recorded,
    Tensors,
    TracedGraph,
    Work,
    padded_size,
)

R = TypeVar("R")
# Trees without and with branches, of more than one node.
CHAIN, TREE = Tier(2, 1, 3), Tier(2, 2, 4)
# Makes a recording of a drafter's work, as :meth:`Recordings.checked`.
Record = Callable[..., Recorded]


class Recordings:
    """Traces of the passes, each good for any batch and its pages. And for any number of nodes,
    where it can be: drafting, verifying, committing and extending chains, verifying and extending
    trees. So no chain but the first waits for recordings, and a policy may take any length.

    A recording of the drafter's is held against the drafter itself on other inputs. Where that
    fails the guard is told, and the pass is as it is from then on.

    Args:
        drafts: With the runner whose passes they are; a module that holds every tensor that they
            touch.
        traced: Each is traced when it is first needed. False: the passes are as they are, unless a
            subclass has recorded them before serving.

    Attributes:
        bytes: Memory that CUDA graphs took.
        count: Passes that have been recorded.
    """

    # Rows more that the inputs have which the drafter's are checked on.
    more_rows = 1

    def __init__(self, drafts: Drafts, guard: DrafterGuard, traced: bool = False) -> None:
        self.drafts, self.runner, self.guard = drafts, drafts.runner, guard
        self.traced = traced
        self.bytes = self.count = 0
        self._known: dict[tuple[Any, ...], Any] = {}
        self._took_ms, self._making = 0.0, False

    # What kinds of recordings differ in

    def make(self, work: Work, inputs: Tensors, place: Place | None = None) -> Recorded:  # noqa: ARG002
        """A recording of ``work`` over ``inputs``, which writes its outputs to their ``place``,
        where it is of a kind that can."""
        if not self.traced:
            return Eager(work)
        self.count += 1
        return TracedGraph(self.runner, work, inputs)

    def make_target(self, work: Work, *inputs: Tensor) -> Recorded:
        """A recording of the target's pass."""
        return self.make(work, inputs)

    def kinds(self, tier: Tier, batch: int) -> tuple[int, Tier, Tier, Tier]:  # noqa: ARG002
        """For how many rows a batch's passes are recorded, and for which tiers its verify, commit
        and extend. In a trace, sizes of 1 look alike."""
        return 2, TREE if tier.top_k > 1 else CHAIN, CHAIN if tier.is_chain else tier, CHAIN

    def trees(self, tier: Tier, rows: int) -> tuple[Tensors, Tensors]:
        """Rows and pages, and trees behind them as drafts give them."""
        given = examples.padding(self.runner, rows)
        return given, self.drafts.dead(tier, *given)

    def writes(self, tier: Tier, rows: int) -> Tensors:
        """What the nodes of these trees write to states, as a verify gives it."""
        states = self.runner.states
        return () if states is None else states.nothing_written(rows * tier.nodes)

    def padded(self, batch: int) -> int:
        """Rows that a batch is filled up to."""
        return padded_size(batch) if self.traced else batch

    def packed_size(self, tier: Tier, rows: int, wanted: int) -> int:
        """How many nodes of ``rows`` trees are verified where ``wanted`` are asked for."""
        return min(self.padded(wanted), rows * tier.nodes)

    def wait_ms(self, tier: Tier) -> float:
        """About what a step of the tier would wait for recordings: as long as those of another one
        took; 0 where they are there, as those of all chains are from the start on."""
        made = {key[1] for key in list(self._known) if key[0] == "commit"} - {CHAIN}
        if not self.traced or tier.is_chain or tier in made:
            return 0.0
        return self._took_ms / (1 + len(made))

    def clear(self) -> None:
        """Forget all recordings."""
        self._known.clear()
        self.count = 0

    # What a step calls

    def draft(self, tier: Tier, batch: int, sampled: bool, told: bool) -> Recorded:
        """The drafts of ``batch`` trees: see :meth:`Drafts.trees`."""
        drafter = self.runner.drafter if tier.steps else None
        kind = tier, sampled and drafter is not None, told and drafter is not None
        if drafter is not None and (drafter.host or not drafter.recorded):
            return Eager(partial(self.drafts.trees, *kind))
        rows = self.kinds(tier, batch)[0]
        return self._guarded(("draft", *kind, rows), lambda r: self.make_draft(r, *kind, rows))

    def chain(self, sampled: bool, told: bool) -> Chain:
        """The drafts of chains, step by step."""

        def make(record: Record) -> Chain:
            first = partial(first_step, self.drafts, sampled, told)
            onward = partial(next_step, self.drafts, sampled, told)
            if record is _plain:
                return Chain(Eager(first), Eager(onward), Eager(link_steps), told)
            padding, others = (examples.padding(self.runner, rows) for rows in (2, 3))
            given, other = first(*padding), first(*others)
            # Behind a draft, which has no score to read.
            at, other_at = (x[1:4] + x[5:] for x in (given, other))
            # Of two drafts each: in a trace sizes of 1 would look alike. The others have one.
            chains = given[0], *(x.repeat(1, 2) for x in given[3:5])
            return Chain(
                record(first, padding, others),
                record(onward, (*padding, *at), (*others, *other_at)),
                record(link_steps, chains, (other[0], *other[3:5])),
                told,
            )

        return self._guarded(("chain", sampled, told), make)

    def verify(self, tier: Tier, batch: int) -> Recorded:
        """The target's pass over whole trees: see :meth:`ModelRunner.verify_trees`."""
        rows, kind, *_ = self.kinds(tier, batch)

        def make() -> Recorded:
            inputs = examples.verified(*self.trees(kind, rows))
            return self.make_target(partial(self.runner.verify_trees, kind), *inputs)

        return self._find(("verify", kind, rows), make)

    def packed(self, tier: Tier, batch: int, count: int) -> Recorded:  # noqa: ARG002
        """Verify over ``count`` nodes of the trees: see :meth:`ModelRunner.verify_packed`."""
        return self._packed(max(tier.nodes, 2), 3, 2)

    def _packed(self, *kind: int) -> Recorded:
        def make() -> Recorded:
            inputs = examples.packed(self.runner, *kind)
            return self.make_target(self.runner.verify_packed, *inputs)

        return self._find(("packed", *kind), make)

    def commit(self, tier: Tier, batch: int) -> Recorded:
        """What the trees accept becomes their rows' state."""
        rows, _, kind, _ = self.kinds(tier, batch)

        def make() -> Recorded:
            behind = *self.trees(kind, rows), self.writes(kind, rows)
            inputs = examples.committed(self.runner, kind, *behind)
            return self.make(partial(self.runner.commit_trees, kind), inputs)

        return self._find(("commit", kind, rows), make)

    def extend(self, tier: Tier, batch: int) -> Recorded:
        """The drafter's pass over what the trees commit, of one that takes it in."""
        if not self.runner.recorded_drafter:
            return Eager(self.runner.extend_trees)
        rows, *_, kind = self.kinds(tier, batch)

        def make(record: Record) -> Recorded:
            # Held against the drafter over other tokens and features, some of them accepted.
            others = self.runner, kind, rows + self.more_rows, 5, min(kind.steps, 1), 0.25
            given = self.extended(kind, rows)
            return record(self.runner.extend_trees, given, examples.extended(*others))

        return self._guarded(("extend", kind, rows), make)

    def record(self, tier: Tier, sampled: bool = False, told: bool = False) -> bool:
        """Record what a step of a single request may want; whether anything was lacking."""
        before = self.count
        self.draft(tier, 1, sampled, told)
        self.behind(tier, 1)
        return self.count > before

    def behind(self, tier: Tier, batch: int) -> None:
        """Record what comes behind the drafts of a step."""
        self.verify(tier, batch)
        self.commit(tier, batch)
        if self.runner.extends:
            self.extend(tier, batch)

    # What is recorded

    def _find(self, key: tuple[Any, ...], make: Callable[[], R]) -> R:
        """What is recorded under a key; where nothing is, ``make`` makes it."""
        found: R | None = self._known.get(key)
        if found is not None:
            return found
        # What is made for another is part of that one's time.
        start, outer, self._making = time.perf_counter(), self._making, True
        try:
            found = self._known[key] = make()
        finally:
            self._making = outer
            if not outer:
                self._took_ms += (time.perf_counter() - start) * 1e3
        return found

    def _guarded(self, key: tuple[Any, ...], make: Callable[[Record], R]) -> R:
        """The same of the drafter's passes."""
        found: R | None = self._known.get(key)
        if found is not None:
            return found
        if self.guard.fault is None:
            with self.guard:
                return self._find(key, lambda: make(self.checked))
            return self._find(key, lambda: make(_plain))
        return make(_plain)

    def make_draft(
        self, record: Record, tier: Tier, sampled: bool, told: bool, rows: int
    ) -> Recorded:
        if self.traced and self.runner.stepwise and tier.is_chain and tier.steps:
            return FixedChain(self.chain(sampled, told), tier.steps)
        inputs, others = (examples.padding(self.runner, n) for n in (rows, rows + self.more_rows))
        return record(partial(self.drafts.trees, tier, sampled, told), inputs, others)

    def extended(self, tier: Tier, rows: int) -> Tensors:
        """What an extend of these trees takes."""
        return examples.extended(self.runner, tier, rows)

    def checked(
        self, work: Work, inputs: Tensors, others: Tensors, place: Place | None = None
    ) -> Recorded:
        """A recording of the drafter's work over ``inputs``, held against the work itself over
        ``others``; RuntimeError: they differ, or it fails."""
        recorded = self.make(work, inputs, place)
        cause: Exception | None = None
        try:
            if isinstance(recorded, Eager) or same(self.runner, recorded, work, others):
                return recorded
        except Exception as error:  # the recording's, or the drafter's
            cause = error
        raise RuntimeError(
            f"{type(self.runner.drafter).__name__}: its recording gives other results than the "
            "drafter itself; keep values and sizes on the device, or set recorded = False"
        ) from cause


def _plain(work: Work, *_: Any) -> Recorded:
    return Eager(work)
