"""A rank of tensor parallelism other than 0: it makes the calls of its worker that rank 0 makes.

Its worker is like rank 0's, with its own part of the model. It has no scheduler, no grammars and no
face; the drafter and all tables are whole, and stay equal to rank 0's.
"""

from __future__ import annotations

import os
import threading
import traceback
from queue import SimpleQueue

import torch

from overlap_spec.parallel.group import Group
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.messages import decision_sizes, decode, take_decision
from overlap_spec.worker.streams import Event
from overlap_spec.worker.worker import Worker

# Calls of the step that the last ``upload`` has begun.
OF_A_STEP = ("grow", "prefill", "verify", "drop")


@torch.inference_mode()
def follow(worker: Worker, group: Group) -> None:
    """Run what rank 0 tells, until it closes the engine; the worker is closed then.

    Raises:
        RuntimeError: the connection broke: rank 0 is gone, or another rank.
    """
    passed: SimpleQueue[Event | None] = SimpleQueue()
    watcher = threading.Thread(target=_watch, args=(passed,), name="passes", daemon=True)
    watcher.start()
    step: InFlightStep | None = None
    told = ""
    while told != "close":
        for told, arguments in decode(group.receive):
            if told == "upload":
                step = worker.upload(*arguments)
            elif told in OF_A_STEP:
                getattr(worker, told)(step, *arguments)
            elif told != "close":
                getattr(worker, told)(*arguments)
        if told == "verify":
            assert step is not None
            _decide(worker, group, step)
        event = worker.streams.event()
        worker.streams.compute.record(event)
        passed.put(event)
    passed.put(None)
    watcher.join()
    worker.close()


def _decide(worker: Worker, group: Group, step: InFlightStep) -> None:
    """Accept a step or drop it, as rank 0 does."""
    packed = torch.empty(sum(decision_sizes(step)), dtype=torch.int32)
    group.receive(packed)
    accepted, free = take_decision(step, packed)
    if not accepted:
        worker.drop(step)
        return
    if any(free):
        # What follows reads the plan as the device has it.
        step.events.tree_on_host.synchronize()
    worker.accept(step, free)
    worker.extend(step)


def _watch(passed: SimpleQueue[Event | None]) -> None:
    """End the process when its passes fail: the others wait for them, and the loop for rank 0."""
    while (event := passed.get()) is not None:
        try:
            event.synchronize()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
