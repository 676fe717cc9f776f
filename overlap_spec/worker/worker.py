"""The step's phases, each queued on the streams: upload, draft, verify, accept, extend, results."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, TypeVarTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Draft, host_draft
from overlap_spec.drafters.grafts import graft
from overlap_spec.steps import History, HostTrees, Int64s, Part, StepPlan, StepResult
from overlap_spec.tiers import Floats, Tier
from overlap_spec.types import Request
from overlap_spec.worker.batch import PlanUpload, uploaded
from overlap_spec.worker.cuda_graphs import CudaGraphs
from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.drafts import Drafts
from overlap_spec.worker.extras import base as extras
from overlap_spec.worker.in_flight import InFlightStep, Rotation
from overlap_spec.worker.kv_pool import KVPool
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.passes import GrammarRows, StepTensors
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.recordings import Recordings
from overlap_spec.worker.results import ResultReader
from overlap_spec.worker.sampler import Masks
from overlap_spec.worker.streams import RecordSpan, Streams, Value

# What a drafter on the host proposed: tokens, parents and scores of all trees.
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Proposal = tuple[Int64s, Int64s, Floats]
# Steps whose accept may still be asked for its time.
ACCEPTS = 4


@dataclass(frozen=True)
class Traits:
    """What a worker is, and does not cease to be.

    Attributes:
        context_length: Longest prompt and output together, in tokens.
        pages: Pages of the caches, page 0 included.
        page_bytes: What a page takes in all caches of this rank together.
        on_gpu: Whether steps run on a GPU.
        compiles: Whether kernels are compiled when they first run, which no request should wait
            for.
        drafts_on_host: Whether drafts need the tokens of the step before on the host.
        guided: Whether drafts on the host need grammars' tables.
        reads_states: Whether the drafter keeps to what grammars' tables allow.
        stops_drafts: Whether a plan's drafts can be stopped after each step. Not on a GPU, whose
            host would have to wait for each: there a budget drafts all that its tier says.
        verifies_ahead: Whether a verify is queued before it is known that anyone wants it. On a GPU
            its launch would wait for the host else, in each step of a request that may end. On the
            CPU a verify for nobody takes the cores from others.
        asks_thinking: Whether acceptance depends on which requests think.
    """

    context_length: int
    pages: int
    page_bytes: int
    on_gpu: bool
    compiles: bool
    drafts_on_host: bool
    guided: bool
    reads_states: bool
    stops_drafts: bool
    verifies_ahead: bool
    asks_thinking: bool = False


def traits_of(runner: ModelRunner) -> Traits:
    """Those of a worker that has all of the model."""
    on_gpu = runner.device.type == "cuda"
    return Traits(
        context_length=runner.target.config.max_position,
        pages=runner.pool.k.shape[1],
        page_bytes=sum(cache.page_bytes for cache in runner.caches),
        on_gpu=on_gpu,
        compiles=on_gpu,
        drafts_on_host=runner.proposer is not None,
        guided=runner.proposer is not None and runner.proposer.guided,
        reads_states=runner.reads_states,
        stops_drafts=runner.stepwise,
        verifies_ahead=on_gpu,
    )


def recordings_of(drafts: Drafts, guard: DrafterGuard, recorded: bool) -> Recordings:
    """How the passes are recorded, if they are to be."""
    if recorded and drafts.runner.device.type == "cuda":
        return CudaGraphs(drafts, guard)
    return Recordings(drafts, guard, recorded)


class Worker:
    """Runs steps over rows; what decides the next token stays on the device.

    A step is ``upload``, ``draft``, ``verify``, ``accept``, ``extend``, in this order; each queues
    work and returns. ``results`` waits. Between steps ``do`` queues jobs.

    Args:
        config: With ``overlap`` ``none``, ``double-sync`` or ``once-sync``.
        record: Takes spans for the timeline.

    Attributes:
        rank_pids: Process ids of the other ranks that this one has started.
    """

    rank_pids: tuple[int, ...] = ()

    def __init__(
        self, runner: ModelRunner, streams: Streams, config: EngineConfig, record: RecordSpan
    ) -> None:
        self.runner, self.streams, self.overlap = runner, streams, config.overlap
        self.rows, self._record = config.max_running_requests, record
        self._tables, self._device = runner.tables, runner.device
        drafter = runner.drafter
        # What drafts in all ranks must not fail in one.
        together = drafter is not None and not drafter.host and runner.target.config.shard.size > 1
        self.guard = DrafterGuard(config.drafter, fatal=together)
        drafts = Drafts(runner, coupled=not config.by_threshold)
        self.recordings = recordings_of(drafts, self.guard, config.graphs)
        self.phases = Phases(self.recordings, config)
        traits, rule = traits_of(runner), self.phases.rule
        self.traits = replace(
            traits,
            asks_thinking=rule is not None and rule.asks_thinking,
            stops_drafts=traits.stops_drafts and self.phases.draft.stop is not None,
        )
        words = -(-self._tables.vocab_size // 32)
        self.buffers = Rotation(self.rows, words, streams, self._device)
        self._reader = ResultReader(runner.tables)
        self._accepted = [streams.event() for _ in range(ACCEPTS)]
        columns = self._tables.pages.shape[1]
        self.plan_upload = PlanUpload(
            columns, self._tables.padding_row, self.recordings.padded, self._device
        )
        if self.traits.on_gpu:
            # Weights, caches and tables were written on a stream that ours do not wait for.
            torch.cuda.synchronize(self._device)
            # What earlier engines left would be counted as the graphs'.
            gc.collect()
            torch.cuda.empty_cache()

    def check(self) -> None:
        """Raise EngineUnavailable where steps cannot be run any more."""

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
        """Queue ``job(worker, *arguments)`` on compute, between two steps; in all ranks. It is a
        function of a module, such as are at the end of this one."""
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
            self.streams.compute.run("clear", _clear, self.runner.caches, plan.untrusted)
        planner = self.streams.plan
        planner.run("upload", self._upload, step)
        planner.record(step.events.uploaded)
        self.streams.compute.wait(step.events.uploaded)
        if plan.pages:
            self.streams.compute.run("pages", self.phases.enter_pages, step.tensors)
        if plan.chunks:
            self.streams.compute.record(step.events.pages_entered)
        return step

    def _upload(self, step: InFlightStep) -> None:
        step.tensors.batch = self.plan_upload(step.plan, step.buffers.staging)

    @torch.inference_mode()
    def draft(self, step: InFlightStep, histories: Sequence[History] | None = None) -> None:
        """Queue the drafts, and the tree's copy to the host.

        Args:
            histories: Known tokens of each decode row's request, for a drafter on the host.
        """
        self.grow(step, None if histories is None else self._propose(step, histories))

    @torch.inference_mode()
    def grow(self, step: InFlightStep, proposal: Proposal | None) -> None:
        """:meth:`draft`, with what a drafter on the host proposed."""
        self.tell("grow", proposal)
        compute, copy = self.streams.compute, self.streams.copy
        compute.run("draft", self._draft, step, proposal)
        if step.tree_is_read:
            compute.record(step.events.drafted)
            copy.wait(step.events.drafted)
            copy.run("tree", _copy_tree, step)
            copy.record(step.events.tree_on_host)
            if self.overlap == "none":
                step.events.tree_on_host.synchronize()

    def _draft(self, step: InFlightStep, proposal: Proposal | None) -> None:
        if step.dropped:
            return
        if proposal is None:
            self.phases.draft(step.tensors)
            return
        proposed = Draft(*(uploaded(torch.from_numpy(part), self._device) for part in proposal))
        # Where nobody drafts behind, a row without a proposal has none.
        behind = self.runner.drafter is not self.runner.proposer
        if behind and (proposal[2][:, 0] == -np.inf).any():
            self.phases.draft(step.tensors, over=proposed)
        else:
            self.phases.draft(step.tensors, proposed)

    def forget(self, history: History) -> None:
        """Tell a drafter on the host that a request has ended."""
        if self.runner.proposer is not None:
            with self.guard:
                self.runner.proposer.forget(history)

    def _propose(self, step: InFlightStep, histories: Sequence[History]) -> Proposal | None:
        drafter, tier = self.runner.proposer, step.plan.tier.own
        if drafter is None or tier.steps == 0 or not histories or self.guard.fault is not None:
            return None
        start = time.perf_counter_ns()
        arrays = None
        with self.guard:
            known = [
                replace(history, forced=self._reader.run_behind(row))
                for history, row in zip(histories, step.plan.decode_rows, strict=True)
            ]
            drafts = drafter.propose(known, tier)
            if drafter.behind is None:
                pairs = zip(drafts, known, strict=True)
                drafts = [graft(draft, history.forced, tier) for draft, history in pairs]
            if drafter.behind is None or any(len(draft.tokens) for draft in drafts):
                arrays = host_draft(drafts, tier)
        self._record("host", "propose", start, time.perf_counter_ns(), step.plan.index)
        return arrays

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

    def trees(self, step: InFlightStep) -> HostTrees:
        """The drafted trees once they are on the host, and where their masks and runs go.

        Blocks until the trees are there: the step's one wait.
        """
        return step.read_trees()

    @torch.inference_mode()
    def accept(self, step: InFlightStep, free: Sequence[bool] = ()) -> None:
        """Queue the masks' way to the device, the step's decision, and its way to the host.

        The mask rows that :meth:`trees` lent must have been written.

        Args:
            free: Whether each request of ``plan.verified`` is inside its thinking, where acceptance
                asks for it; empty: none is.
        """
        compute, copy, planner = self.streams.compute, self.streams.copy, self.streams.plan
        events, step.tensors.free = step.events, free
        if step.constrained:
            step.limits = tuple(step.buffers.limits.host[: len(step.plan.verified)].tolist())
            planner.run("masks", _upload_masks, step)
            planner.record(events.masks_ready)
            if self.overlap == "double-sync":
                events.masks_ready.synchronize()
            compute.wait(events.masks_ready)
        compute.run("accept", self.phases.accept, step.tensors)
        compute.record(step.accepted)
        copy.wait(step.accepted)
        copy.run("results", _copy_results, step)
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
        """Give up a step: nothing of it is asked for. Its drafts are not made if they have not
        begun; where ranks draft together none knows what the others have begun."""
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
            before: The step right before it, from whose accept its idle time counts; None where
                the worker was at rest in between.
            grammar_ms: What the grammar's work for the step took. A longer wait for its masks was
                one for a core or a lock, and counts as idle time alone.
        """
        events = step.events
        events.results_on_host.synchronize()
        step.settle()
        plan = step.plan
        exposed_ms, idle_ms, step_ms = 0.0, 0.0, None
        rows = self._reader.read(step)
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
        told = extras.read(plan, step.extras)
        return StepResult(plan, rows, exposed_ms, idle_ms, step_ms, verified_rows, told)

    def close(self) -> None:
        """End the streams' threads, and free all memory; nothing can be run any more."""
        self.streams.close()
        self.buffers.clear()
        self.recordings.clear()
        self.runner.release()


def _clear(caches: Sequence[KVPool], pages: tuple[int, ...]) -> None:
    for cache in caches:
        cache.clear(pages)


def _copy_tree(step: InFlightStep) -> None:
    if step.tensors.drafted is not None:
        links = step.tensors.drafted.links.flatten()
        step.buffers.links[: len(links)].copy_(links, non_blocking=True)


def _upload_masks(step: InFlightStep) -> GrammarRows:
    """What the lane wrote, on the device: no more rows than nodes have one."""
    plan, buffers, requests = step.plan, step.buffers, len(step.tensors.batch.rows)
    assert step.trees is not None
    count, nodes, final = int(step.trees.offsets[-1]), plan.tier.nodes, len(plan.final_chunks)
    places = buffers.places.upload(requests * nodes + final)
    every = count == len(plan.decode_rows) * nodes + final
    masks = Masks(buffers.masks.upload(count), None if every else places)
    limits, runs = buffers.limits.upload(requests), buffers.runs.upload(1 + count)
    step.tensors.grammar = GrammarRows(masks, limits, runs, places)
    return step.tensors.grammar


def _copy_results(step: InFlightStep) -> None:
    room, prefilled = step.buffers.results, step.tensors.prefilled
    if prefilled is not None:
        told = prefilled.extras.items()
        step.extras = {name: tuple(map(_to_host, found)) for name, found in told}
    for part in step.tensors.decided:
        if part is None:
            continue
        host = room[: part.packed.numel()].view(part.packed.shape)
        room = room[part.packed.numel() :]
        step.results.append(host.copy_(part.packed, non_blocking=True))
        if part.logprobs is not None:
            step.logprobs.append(tuple(map(_to_host, part.logprobs)))


def _to_host(found: Tensor) -> Tensor:
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
    return host.copy_(found, non_blocking=True)


# Jobs, besides measuring and warming up


def tell_drafts(worker: Worker, parts: dict[str, Part]) -> None:
    """Enter what drafts read of grammars."""
    worker.runner.told.write(parts)


def prepare(worker: Worker, tier: Tier) -> None:
    """Record a tier's passes for a single request, ahead of its first step, with a grammar or
    without one."""
    for told in {False, worker.runner.reads_states}:
        worker.recordings.record(tier, False, told)


def prepare_next(worker: Worker, tiers: Sequence[Tier]) -> bool:
    """Record what one of these tiers lacks; False if they lack nothing."""
    return worker.recordings.record_next(tiers)
