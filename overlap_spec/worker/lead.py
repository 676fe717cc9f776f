"""Rank 0's worker: it tells the other ranks what it does, so that they do the same."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from overlap_spec.errors import EngineUnavailable
from overlap_spec.parallel.group import Group
from overlap_spec.parallel.processes import Processes
from overlap_spec.types import (
    GrammarTable,
    HostTrees,
    Int32s,
    Int64s,
    Request,
    StepPlan,
    StepResult,
    Tier,
    TokenTrie,
)
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.messages import (
    Call,
    SpanFields,
    decode_spans,
    encode_calls,
    pack_decision,
)
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.pass_times import BEGIN_SHARE, PassTimes, Point
from overlap_spec.worker.streams import HostEvent, RecordSpan, Streams, ThreadStream
from overlap_spec.worker.worker import Proposal, Worker

# For the watcher to see that a rank has ended whose connection broke.
SEEN_S = 5.0


class LeadWorker(Worker):
    """A worker whose calls are told to the ranks that hold the other parts of the model.

    Calls are gathered until a verify, which takes all ranks; its mask rows follow when the lane has
    made them. Both leave from a thread of their own, under the verify. Nothing comes back: all
    ranks have the same logits and seeds, and choose alike.

    Args:
        processes: Those of the other ranks; None: they are another's.
    """

    def __init__(
        self,
        runner: ModelRunner,
        streams: Streams,
        overlap: str,
        rows: int,
        record: RecordSpan,
        group: Group,
        processes: Processes | None,
    ) -> None:
        super().__init__(runner, streams, overlap, rows, record)
        self.group, self.processes = group, processes
        if processes is not None:
            processes.on_loss = group.abort
        # A serial step waits for its draft, in which ranks may take part, before it goes on.
        self._serial = overlap == "none"
        self._calls: list[Call] = []
        self._verified = -1
        self._sender = ThreadStream("tell", record)

    @property
    def stops_drafts(self) -> bool:
        """No: the other ranks wait for a decision whose size the plan tells."""
        return False

    @property
    def verifies_ahead(self) -> bool:
        """Always: draft and verify are told at once."""
        return True

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return () if self.processes is None else self.processes.pids

    def check(self) -> None:
        """Raise EngineUnavailable if a rank is gone."""
        if self.processes is not None:
            self.processes.check()

    def gather_spans(self) -> None:
        """As the worker's; lane ``compute`` of rank 1 is ``rank 1 compute``. The clocks are one on
        one machine alone."""
        self._tell(("tell_spans", ()))
        taken = [
            self._sender.run("spans", self._take_spans, rank)
            for rank in range(1, self.group.shard.size)
        ]
        passed = HostEvent()
        self._sender.record(passed)
        with self._blaming():
            passed.synchronize()
        for rank, spans in enumerate(taken, 1):
            for lane, name, start_ns, end_ns, step in spans.get():
                self._record(f"rank {rank} {lane}", name, start_ns, end_ns, step)

    def _take_spans(self, rank: int) -> list[SpanFields]:
        return decode_spans(lambda tensor: self.group.receive(tensor, rank))

    def prepare(self, tier: Tier) -> None:
        self._tell(("prepare", (tier,)))
        super().prepare(tier)

    def prepare_next(self, tiers: Sequence[Tier]) -> bool:
        self._tell(("prepare_next", (tiers,)))
        with self._blaming():
            return super().prepare_next(tiers)

    def warm_up(self, tiers: Mapping[Tier, int | None], chunk_tokens: int) -> None:
        self._tell(("warm_up", (tiers, chunk_tokens)))
        with self._blaming():
            super().warm_up(tiers, chunk_tokens)

    def measure(self, points: Sequence[Point], deadline_s: float) -> list[PassTimes]:
        """As the worker's; each point is told by itself, since only this rank's clock counts."""
        found, start = [], time.perf_counter()
        for point in points:
            if time.perf_counter() - start > BEGIN_SHARE * deadline_s:
                break
            self._tell(("measure", ([point], math.inf)))
            with self._blaming():
                found += super().measure([point], math.inf)
        return found

    def assign(
        self, row: int, request: Request, output_ids: list[int], trie: TokenTrie | None = None
    ) -> None:
        bare = replace(request, grammar=None)
        self._calls.append(("assign", (row, bare, list(output_ids), trie)))
        super().assign(row, request, output_ids, trie)

    def write_texts(self, steps: Int32s) -> None:
        self._tell(("write_texts", (steps,)))
        super().write_texts(steps)

    def write_table(self, base: int, table: GrammarTable) -> None:
        self._calls.append(("write_table", (base, GrammarTable(*table))))
        super().write_table(base, table)

    def upload(self, plan: StepPlan) -> InFlightStep:
        self._sender.step = plan.index
        self._calls.append(("upload", (plan,)))
        with self._blaming():
            return super().upload(plan)

    def grow(self, step: InFlightStep, proposal: Proposal | None) -> None:
        self._tell(("grow", (proposal,)), self._serial)
        super().grow(step, proposal)

    def prefill(self, step: InFlightStep) -> None:
        self._tell(("prefill", ()), self._serial)
        super().prefill(step)

    def verify(self, step: InFlightStep) -> None:
        self._tell(("verify", ()))
        self._verified = step.plan.index
        super().verify(step)

    def trees(self, step: InFlightStep) -> tuple[HostTrees, Int32s, Int64s, Int32s]:
        with self._blaming():
            return super().trees(step)

    def accept(self, step: InFlightStep, free: Sequence[bool] = ()) -> None:
        self._sender.run("decision", self._send_decision, step, True, free)
        super().accept(step, free)

    def drop(self, step: InFlightStep) -> None:
        if self._verified == step.plan.index:
            self._sender.run("decision", self._send_decision, step, False, ())
        else:
            self._tell(("drop", ()))
        super().drop(step)

    def results(
        self, step: InFlightStep, before: InFlightStep | None, grammar_ms: float
    ) -> StepResult:
        with self._blaming():
            found = super().results(step, before, grammar_ms)
        # What waited for a rank that is gone was let go of, with sums that have no meaning.
        self.check()
        return found

    def clear(self, pages: list[int]) -> None:
        self._calls.append(("clear", (pages,)))
        super().clear(pages)

    def retry_drafter(self) -> None:
        # After the same pass in all ranks.
        self._calls += [("rest", ()), ("retry_drafter", ())]
        with self._blaming():
            self.rest()
        super().retry_drafter()

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close(self._bid_farewell)
        else:
            self._bid_farewell()
        super().close()
        self._sender.close()
        self.group.close()

    def _bid_farewell(self) -> None:
        self._calls.clear()
        self._tell(("close", ()))

    def _tell(self, call: Call, now: bool = True) -> None:
        """Send the calls so far, this one the last; or keep it for the next."""
        self._calls.append(call)
        if not now:
            return
        calls, self._calls = self._calls, []
        for tensor in encode_calls(calls, self.group.key):
            self._sender.run("calls", self.group.send, tensor)

    def _send_decision(self, step: InFlightStep, accepted: bool, free: Sequence[bool]) -> None:
        self.group.send(pack_decision(step, accepted, free))

    @contextmanager
    def _blaming(self) -> Iterator[Any]:
        """End the engine with one error where the streams have failed: the ranks are in no one
        step any more."""
        try:
            yield
        except EngineUnavailable:
            raise
        except Exception as error:
            if self.processes is None:
                raise EngineUnavailable(
                    f"tensor_parallel_size: this rank failed, or another one: {error}"
                ) from error
            self.processes.wait_for_loss(SEEN_S)
            reason = f"tensor_parallel_size: rank 0 failed, and the engine with it: {error}"
            self.processes.give_up(reason)
            self.processes.check()
