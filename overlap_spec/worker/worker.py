"""The step's phases, each queued on the streams: upload, draft, verify, accept, extend, results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar, TypeVarTuple, Unpack

import torch

from overlap_spec.config import EngineConfig
from overlap_spec.steps import Part, StepPlan, StepResult
from overlap_spec.types import Request
from overlap_spec.worker.batch import PlanUpload
from overlap_spec.worker.host_drafts import Forecast, HostDrafts, Proposal
from overlap_spec.worker.in_flight import InFlightStep, Rotation
from overlap_spec.worker.passes import StepTensors
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.results import ResultReader
from overlap_spec.worker.streams import RecordSpan, Streams, Value

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
# Steps whose accept may still be asked for its time.
ACCEPTS = 4


@dataclass(frozen=True)
class Traits:
    """What a worker is, and does not cease to be.

    Attributes:
        context_length: Longest prompt and output together, in tokens.
        pages: Pages of the caches, page 0 included.
        page_bytes: Of a page in all caches of this rank together.
        state_bytes: Of the states of layers without keys, kept ones too; 0: there are none.
        state_slots: Where such are kept with pages; None: there are no such layers.
        on_gpu: Whether steps run on a GPU.
        compiles: Whether kernels are compiled when they first run, which no request should wait
            for.
        drafts_on_host: Whether drafts need the tokens of the step before on the host.
        guided: Whether drafts on the host need grammars' tables.
        reads_states: Whether the drafter keeps to what grammars' tables allow.
        stops_drafts: Whether a plan's drafts can be stopped after each step. Not on a GPU, whose
            host would have to wait for each.
        verifies_ahead: Whether a verify is queued before it is known that anyone wants it: on a
            GPU, which would wait for its launch else; on a CPU it would take the cores from others.
        asks_thinking: Whether acceptance depends on which requests think.
    """

    context_length: int
    pages: int
    page_bytes: int
    state_bytes: int
    state_slots: Sequence[int] | None
    on_gpu: bool
    compiles: bool
    drafts_on_host: bool
    guided: bool
    reads_states: bool
    stops_drafts: bool
    verifies_ahead: bool
    asks_thinking: bool


class Worker:
    """Runs steps over rows; what decides the next token stays on the device.

    A step is ``upload``, ``draft``, ``verify``, ``accept``, ``extend``, in this order; each queues
    work and returns. ``results`` waits. Between steps ``do`` queues jobs.

    Args:
        phases: What is computed, over the models.
        config: With ``overlap`` ``none``, ``double-sync`` or ``once-sync``.
        record: Takes spans for the timeline.

    Attributes:
        rank_pids: Process ids of the other ranks that this one has started.
    """

    rank_pids: tuple[int, ...] = ()

    def __init__(
        self,
        phases: Phases,
        traits: Traits,
        streams: Streams,
        config: EngineConfig,
        record: RecordSpan,
    ) -> None:
        self.phases, self.traits, self.streams, self._record = phases, traits, streams, record
        self.rows, self.overlap = config.max_running_requests, config.overlap
        self.runner, self.recordings, self.guard = phases.runner, phases.recordings, phases.guard
        self._tables = tables = self.runner.tables
        words = -(-tables.vocab_size // 32)
        self.buffers = Rotation(self.rows, words, streams, tables.device)
        self._reader = ResultReader(tables)
        self.host_drafts = HostDrafts(
            self.runner.proposer, self.guard, self._reader.run_behind, record
        )
        self._accepted = [streams.event() for _ in range(ACCEPTS)]
        self.plan_upload = PlanUpload(
            tables.pages.shape[1], tables.padding_row, self.recordings.padded, tables.device
        )

    def watched(self) -> AbstractContextManager[None]:
        """A block in which steps are run; EngineUnavailable where they cannot be any more."""
        return nullcontext()

    def gather_spans(self) -> None:
        """Record the spans that the other ranks have kept since the last call."""

    def tell(self, name: str, *arguments: Any) -> None:
        """Have the other ranks make this call too, of those that copy what rank 0 does."""

    def rest(self) -> None:
        """Wait until compute has run all that is queued."""
        passed = self.streams.event()
        self.streams.compute.record(passed)
        passed.synchronize()

    @torch.inference_mode()
    def do(self, job: Callable[[Worker, Unpack[Ts]], T], *arguments: *Ts) -> Value[T]:
        """Queue ``job(worker, *arguments)``, a module's function, on compute, between two steps; in
        all ranks."""
        self.tell("do", job, *arguments)
        return self.streams.compute.run(job.__name__, job, self, *arguments)

    @torch.inference_mode()
    def assign(self, row: int, request: Request, output_ids: list[int]) -> None:
        """Prepare ``row`` for a request that starts, or starts again, with its prefill."""
        self.tell("assign", row, replace(request, grammar=None), list(output_ids))
        self._tables.assign(row, request)
        self.streams.compute.run("assign", self._tables.write, row, request, tuple(output_ids))
        if self.runner.adapters is not None:
            self.streams.compute.run("adapter", self.runner.adapters.assign, row, request.lora)

    @torch.inference_mode()
    def upload(self, plan: StepPlan) -> InFlightStep:
        """Queue the plan's way to the device."""
        accepted = self._accepted[plan.index % ACCEPTS]
        accepted.reset()
        step = InFlightStep(
            plan=plan,
            buffers=self.buffers.take(plan.tier),
            accepted=accepted,
            constrained=any(grammar for _, _, grammar in plan.verified),
            tensors=StepTensors(self._tables.features([row for _, row, _ in plan.verified])),
        )
        self.streams.begin(plan.index)
        if plan.untrusted:
            for cache in self.runner.caches:
                self.streams.compute.run("clear", cache.clear, plan.untrusted)
        planner = self.streams.plan
        planner.run("upload", step.upload_plan, self.plan_upload)
        planner.record(step.events.uploaded)
        self.streams.compute.wait(step.events.uploaded)
        if plan.pages:
            self.streams.compute.run("pages", self.phases.enter_pages, step.tensors)
        if plan.chunks:
            self.streams.compute.record(step.events.pages_entered)
        return step

    @torch.inference_mode()
    def draft(self, step: InFlightStep, proposal: Proposal | Forecast | None = None) -> None:
        """Queue the drafts, by what a drafter on the host proposed or has foreseen, if there is
        one, and the tree's copy to the host."""
        self.tell("draft", proposal)
        compute, copy = self.streams.compute, self.streams.copy
        compute.run("draft", step.draft, self.phases.draft, proposal)
        if step.tree_is_read or self.host_drafts.foresees:
            compute.record(step.events.drafted)
        if step.tree_is_read:
            copy.wait(step.events.drafted)
            copy.run("tree", step.copy_tree)
            copy.record(step.events.tree_on_host)
            if self.overlap == "none":
                step.events.tree_on_host.synchronize()

    @torch.inference_mode()
    def verify(self, step: InFlightStep) -> None:
        """Queue the target's passes over the trees and, beside them, over the prompts' chunks: in
        this order, since a GPU's host launches a prompt's kernels one by one meanwhile."""
        self.tell("verify")
        compute, prefill = self.streams.compute, self.streams.prefill
        compute.run("verify", self.phases.verify, step.tensors)
        if step.plan.chunks:
            prefill.wait(step.events.pages_entered)
            prefill.run("prefill", self.phases.prefill, step.tensors)
            prefill.record(step.events.prefilled)
            compute.wait(step.events.prefilled)
        compute.record(step.events.verified)
        if step.constrained and self.overlap == "none":
            step.events.verified.synchronize()

    @torch.inference_mode()
    def accept(self, step: InFlightStep, free: Sequence[bool] = ()) -> None:
        """Queue the way to the device of the mask rows that :meth:`InFlightStep.read_trees` lent,
        the step's decision, and its way to the host.

        Args:
            free: Whether each request of ``plan.verified`` is inside its thinking, where acceptance
                asks for it; empty: none is.
        """
        compute, copy, planner = self.streams.compute, self.streams.copy, self.streams.plan
        events, step.tensors.free = step.events, free
        if step.constrained:
            step.limits = tuple(step.buffers.limits.host[: len(step.plan.verified)].tolist())
            planner.run("masks", step.upload_masks)
            planner.record(events.masks_ready)
            if self.overlap == "double-sync":
                events.masks_ready.synchronize()
            compute.wait(events.masks_ready)
        compute.run("accept", self.phases.accept, step.tensors)
        compute.record(step.accepted)
        copy.wait(step.accepted)
        copy.run("results", step.copy_results)
        copy.record(events.results_on_host)
        step.buffers.keep = step.tensors

    @torch.inference_mode()
    def extend(self, step: InFlightStep) -> None:
        """Queue the drafter's way to the next root."""
        compute, prefill = self.streams.compute, self.streams.prefill
        if step.plan.decode_rows:
            compute.run("extend", self.phases.extend, step.tensors)
        if step.plan.chunks:
            # A drafter that is not recorded may not bear two threads at once.
            beside = prefill if self.runner.recorded_drafter else compute
            beside.wait(step.accepted)
            beside.run("extend", self.phases.extend_chunks, step.tensors)
            beside.record(step.events.prefill_extended)
            compute.wait(step.events.prefill_extended)
        compute.record(step.events.free)

    @torch.inference_mode()
    def drop(self, step: InFlightStep) -> None:
        """Give up a step. Drafts that have not begun are not made, but where ranks draft together:
        none knows what the others have begun."""
        step.dropped = self.runner.target.config.shard.size == 1
        if step.tree_is_read:
            self.streams.compute.wait(step.events.tree_on_host)
        step.buffers.keep = step.tensors
        self.streams.compute.record(step.events.free)

    @torch.inference_mode()
    def results(
        self, step: InFlightStep, before: InFlightStep | None, grammar_ms: float
    ) -> StepResult:
        """Wait for a step's results and read them.

        Args:
            before: The step right before it, from whose accept its idle time counts; None: the
                worker was at rest in between.
            grammar_ms: What the grammar's work for the step took. A longer wait for its masks was
                for a core or a lock, and counts as idle time alone.
        """
        events, exposed_ms, idle_ms, step_ms = step.events, 0.0, 0.0, None
        events.results_on_host.synchronize()
        step.settle()
        plan, (rows, told) = step.plan, self._reader.read(step)
        self.streams.note()
        if step.constrained:
            waited_ms = events.verified.elapsed_ms(events.masks_ready)
            exposed_ms = min(max(0.0, waited_ms), grammar_ms)
            if exposed_ms:
                # The end of the wait: the masks come last.
                end = events.verified.time_ns + int(waited_ms * 1e6)
                start = end - int(exposed_ms * 1e6)
                self._record("compute", "exposed", start, end, plan.index)
        if before is not None:
            idle_ms = before.accepted.idle_ms(step.accepted)
            step_ms = before.accepted.elapsed_ms(step.accepted)
        verified = step.tensors.verified
        verified_rows = 0 if verified is None else len(verified.logits)
        return StepResult(plan, rows, exposed_ms, idle_ms, step_ms, verified_rows, told)

    def close(self) -> None:
        """End the streams' threads, and free all memory; nothing can be run any more."""
        self.streams.close()
        self.buffers.clear()
        self.recordings.clear()
        self.runner.release()


def tell_drafts(worker: Worker, parts: dict[str, Part]) -> None:
    """Enter what drafts read of grammars."""
    worker.runner.told.write(parts)
