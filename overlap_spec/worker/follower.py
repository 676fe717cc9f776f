"""A rank of tensor parallelism other than 0: it makes the calls of its worker that rank 0 makes.

It has its own part of the model, and no scheduler, no grammars and no face; the drafter and all
tables are whole, and stay equal to rank 0's.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from queue import SimpleQueue

import torch

from overlap_spec.parallel.group import Group
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.messages import (
    SpanFields,
    decode_calls,
    decode_spans,
    encode_spans,
    take_decision,
)
from overlap_spec.worker.streams import Event
from overlap_spec.worker.worker import Worker

# Calls of the step that the last ``upload`` has begun.
OF_A_STEP = ("draft", "verify", "drop")
# Spans that a rank keeps until rank 0 asks for them, and the lane of what it is told.
KEPT_SPANS = 16_384
TOLD_LANE = "told"


class Spans:
    """The newest spans of one rank, of any thread."""

    def __init__(self) -> None:
        self._kept: deque[SpanFields] = deque(maxlen=KEPT_SPANS)

    def record(self, lane: str, name: str, start_ns: int, end_ns: int, step: int) -> None:
        """Keep one; as a timeline takes it."""
        self._kept.append((lane, name, start_ns, end_ns, step))

    def take(self) -> list[SpanFields]:
        """Those kept since the last call, the oldest first."""
        return [self._kept.popleft() for _ in range(len(self._kept))]


@torch.inference_mode()
def follow(worker: Worker, group: Group, spans: Spans) -> None:
    """Run what rank 0 tells, until it closes the engine; the worker is closed then. To the worker's
    ``spans`` what this rank waits for is added as lane ``told``. RuntimeError: the connection
    broke: rank 0 is gone, or another rank."""
    passed: SimpleQueue[Event | None] = SimpleQueue()
    watcher = threading.Thread(target=_watch, args=(passed,), name="passes", daemon=True)
    watcher.start()
    step: InFlightStep | None = None
    told = ""
    while told != "close":
        start = time.perf_counter_ns()
        calls, told_ns = decode_calls(group.receive, group.key), time.perf_counter_ns()
        for told, arguments in calls:
            if told == "upload":
                step = worker.upload(*arguments)
            elif told == "tell_spans":
                _tell_spans(group, spans)
            elif told in OF_A_STEP:
                getattr(worker, told)(step, *arguments)
            elif told != "close":
                getattr(worker, told)(*arguments)
        if told == "verify":
            assert step is not None
            spans.record(TOLD_LANE, "calls", start, told_ns, step.plan.index)
            _decide(worker, group, step, spans)
        event = worker.streams.event()
        worker.streams.compute.record(event)
        passed.put(event)
        # Nobody reads results here, under which the others do so.
        worker.streams.note()
    passed.put(None)
    watcher.join()
    worker.close()


def _tell_spans(group: Group, spans: Spans) -> None:
    """Broadcast this rank's spans when its turn comes; what the others broadcast is rank 0's."""
    for rank in range(1, group.shard.size):
        if rank == group.shard.rank:
            for tensor in encode_spans(spans.take()):
                group.send(tensor)
        else:
            decode_spans(lambda tensor, rank=rank: group.receive(tensor, rank))  # type: ignore[misc]


def _decide(worker: Worker, group: Group, step: InFlightStep, spans: Spans) -> None:
    """Accept a step or drop it, as rank 0 does."""
    start = time.perf_counter_ns()
    accepted, free = take_decision(step, group.receive)
    spans.record(TOLD_LANE, "decision", start, time.perf_counter_ns(), step.plan.index)
    if accepted:
        worker.accept(step, free)
        worker.extend(step)
    else:
        worker.drop(step)


def _watch(passed: SimpleQueue[Event | None]) -> None:
    """End the process when its passes fail: the others wait for them, and the loop for rank 0."""
    while (event := passed.get()) is not None:
        try:
            event.synchronize()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
