"""Rank 0's worker: it tells the other ranks what it does, so that they do the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from overlap_spec.config import EngineConfig
from overlap_spec.errors import EngineUnavailable
from overlap_spec.parallel.group import Group
from overlap_spec.parallel.processes import Processes
from overlap_spec.steps import StepPlan, StepResult
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.messages import (
    Call,
    SpanFields,
    decode_spans,
    encode_calls,
    pack_decision,
)
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.streams import HostEvent, RecordSpan, Streams, ThreadStream
from overlap_spec.worker.worker import Traits, Worker

# For the watcher to see that a rank has ended whose connection broke.
SEEN_S = 5.0


# Calls that wait for the next one; in a serial step, which waits for its draft, some do not.
LATER, OF_A_SERIAL_STEP = ("assign", "upload"), ("draft",)


class LeadWorker(Worker):
    """A worker whose calls are told to the ranks that hold the other parts of the model.

    Calls are gathered until a verify; its mask rows follow when the lane has made them. Both leave
    from a thread of their own, under the verify. Nothing comes back: all ranks have the same logits
    and seeds, and choose alike.

    Args:
        processes: Those of the other ranks; None: they are another's.
    """

    def __init__(
        self,
        phases: Phases,
        traits: Traits,
        streams: Streams,
        config: EngineConfig,
        record: RecordSpan,
        group: Group,
        processes: Processes | None,
    ) -> None:
        # The plan tells the size of the decision; and draft and verify are told at once.
        traits = replace(traits, stops_drafts=False, verifies_ahead=True)
        super().__init__(phases, traits, streams, config, record)
        self.group, self.processes = group, processes
        if processes is not None:
            processes.on_loss, self.rank_pids = group.abort, processes.pids
        # It waits for its draft, in which ranks may take part, before it goes on.
        self._serial = self.overlap == "none"
        self._calls: list[Call] = []
        self._verified = -1
        # Why there are no more steps, where the processes are another's.
        self._lost: EngineUnavailable | None = None
        self._sender = ThreadStream("tell", record)

    def gather_spans(self) -> None:
        """As the worker's; lane ``compute`` of rank 1 is ``rank 1 compute``. The clocks are one on
        one machine alone."""
        self.tell("tell_spans")

        def take(rank: int) -> list[SpanFields]:
            return decode_spans(lambda tensor: self.group.receive(tensor, rank))

        ranks = range(1, self.group.shard.size)
        taken = [self._sender.run("spans", take, rank) for rank in ranks]
        passed = HostEvent()
        self._sender.record(passed)
        with self.watched():
            passed.synchronize()
        for rank, spans in zip(ranks, taken, strict=True):
            for lane, name, start_ns, end_ns, step in spans.get():
                self._record(f"rank {rank} {lane}", name, start_ns, end_ns, step)

    def rest(self) -> None:
        with self.watched():
            super().rest()

    def tell(self, name: str, *arguments: Any) -> None:
        """Now, with what they have not been told of yet; or with the next call."""
        self._calls.append((name, arguments))
        if name in LATER or (name in OF_A_SERIAL_STEP and not self._serial):
            return
        calls, self._calls = self._calls, []
        for tensor in encode_calls(calls, self.group.key):
            self._sender.run("calls", self.group.send, tensor)

    def upload(self, plan: StepPlan) -> InFlightStep:
        self._sender.step = plan.index
        self.tell("upload", plan)
        return super().upload(plan)

    def verify(self, step: InFlightStep) -> None:
        self._verified = step.plan.index
        super().verify(step)

    def accept(self, step: InFlightStep, free: Sequence[bool] = ()) -> None:
        self._sender.run("decision", self._send_decision, step, True, free)
        super().accept(step, free)

    def drop(self, step: InFlightStep) -> None:
        if self._verified == step.plan.index:
            self._sender.run("decision", self._send_decision, step, False, ())
        else:
            self.tell("drop")
        super().drop(step)

    def results(
        self, step: InFlightStep, before: InFlightStep | None, grammar_ms: float
    ) -> StepResult:
        found = super().results(step, before, grammar_ms)
        # What waited for a rank that is gone was let go of, with sums that have no meaning.
        self._check()
        return found

    def close(self) -> None:
        def bid_farewell() -> None:
            self._calls.clear()
            self.tell("close")

        if self.processes is not None:
            self.processes.close(bid_farewell)
        else:
            bid_farewell()
        super().close()
        self._sender.close()
        self.group.close()

    def _send_decision(self, step: InFlightStep, accepted: bool, free: Sequence[bool]) -> None:
        for tensor in pack_decision(step, accepted, free):
            self.group.send(tensor)

    def _check(self) -> None:
        """Raise EngineUnavailable if a rank is gone."""
        if self._lost is not None:
            raise self._lost
        if self.processes is not None:
            self.processes.check()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ends the engine with one error where a rank is gone, or something fails in the block:
        the ranks are in no one step any more."""
        self._check()
        try:
            yield
        except EngineUnavailable:
            raise
        except Exception as error:
            if self.processes is None:
                reason = f"tensor_parallel_size: this rank failed, or another one: {error}"
                self._lost = EngineUnavailable(reason)
                raise self._lost from error
            self.processes.wait_for_loss(SEEN_S)
            reason = f"tensor_parallel_size: rank 0 failed, and the engine with it: {error}"
            self.processes.give_up(reason)
            self._check()
