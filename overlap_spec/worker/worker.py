"""The step, in the order in which it happens."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from overlap_spec.errors import NumericFault
from overlap_spec.types import (
    HostTrees,
    Lane,
    Origin,
    Request,
    RowResult,
    StepPlan,
    StepResult,
    Tier,
    TokenLogprobs,
)
from overlap_spec.worker.batch import Buffers, TierState, upload
from overlap_spec.worker.origins import token_origins
from overlap_spec.worker.passes import Drafted, Emitted, Passes
from overlap_spec.worker.sampler import Masks, token_logprobs
from overlap_spec.worker.streams import Event, Record, Streams

NAN_CHOICE = -2


@dataclass
class Flight:
    """A step under way. Everything that its results need for their reading travels with it."""

    plan: StepPlan
    buffers: Buffers
    constrained: bool
    planned: Event
    drafted: Event
    copied: Event
    verified: Event
    masked: Event
    chosen: Event
    done: Event
    limits: tuple[int, ...] = ()
    results: Tensor | None = None
    logprobs: tuple[Tensor, ...] = ()
    result: StepResult | None = None


class Worker:
    """Runs steps over rows; what decides the next token stays on the device.

    Args:
        overlap: ``none``, ``double-sync`` or ``once-sync``.
        rows: Rows of the tables.
        record: Takes spans for the timeline.
    """

    def __init__(
        self,
        passes: Passes,
        streams: Streams,
        overlap: str,
        tiers: tuple[Tier, ...],
        rows: int,
        record: Record,
    ) -> None:
        self.record = record
        self.passes, self.streams, self.overlap = passes, streams, overlap
        self.tables, self.pool = passes.tables, passes.pool
        words = -(-passes.tables.vocab_size // 32)
        device = passes.device
        self.states = {tier: TierState(tier, rows, words, streams, device) for tier in tiers}
        self._record_passes(rows)

    @torch.inference_mode()
    def _record_passes(self, rows: int) -> None:
        """Queue the recording of all tiers' passes, ahead of the first step."""
        if self.passes.device.type == "cuda":
            # Weights, caches and tables were written on a stream that ours do not wait for.
            torch.cuda.synchronize(self.passes.device)
            # What earlier engines left would be counted as the graphs'.
            gc.collect()
            torch.cuda.empty_cache()
        for tier in self.states:
            for size in self.passes.replays.sizes(rows):
                self.streams.compute.run("record", self.passes.replays.record, tier, size)

    @torch.inference_mode()
    def assign(self, row: int, request: Request, output_ids: list[int]) -> None:
        """Prepare ``row`` for a request that starts, or starts again, with its prefill."""
        self.tables.assign(row, request)
        self.streams.compute.run("assign", self.tables.write, row, request, tuple(output_ids))

    @torch.inference_mode()
    def step(self, plan: StepPlan, lane: Lane) -> Flight | None:
        """Queue one step; blocks on nothing but the lane.

        None where the step before has ended everyone: nothing is drafted then.
        """
        compute, copy, planner = self.streams.compute, self.streams.copy, self.streams.plan
        passes, flight = self.passes, self._flight(plan)
        buffers, serial = flight.buffers, self.overlap == "none"
        needs = self.tables.needs(row for _, row, _ in plan.verified)

        self.streams.begin(plan.index)
        batch = planner.run("upload", upload, plan, *self.tables.extent, passes.device)
        planner.record(flight.planned)
        compute.wait(flight.planned)
        # The wait is for tokens of the step before, whose draft extend still keeps compute busy.
        if plan.tier.steps and lane.spent(plan):
            buffers.keep = batch
            compute.record(buffers.free)
            return None
        drafted = compute.run("draft", passes.draft, batch)
        if flight.constrained:
            compute.record(flight.drafted)
            copy.wait(flight.drafted)
            copy.run("tree", _copy_tree, drafted, buffers, plan)
            copy.record(flight.copied)
            if serial:
                flight.copied.synchronize()
        verified = compute.run("verify", passes.verify, batch, drafted)
        compute.record(flight.verified)
        masks = None
        if flight.constrained:
            if serial:
                flight.verified.synchronize()
            lane.settle()
            flight.copied.synchronize()
            flight.limits = self._fill(flight, lane)
            masks = planner.run("masks", _upload_masks, buffers, plan)
            planner.record(flight.masked)
            if self.overlap == "double-sync":
                flight.masked.synchronize()
            compute.wait(flight.masked)
        emitted = compute.run("accept", passes.choose, batch, drafted, verified, needs, masks)
        compute.run("count", passes.count_output, batch, emitted, needs)
        compute.record(flight.chosen)
        copy.wait(flight.chosen)
        copy.run("results", _copy_results, emitted, flight)
        copy.record(flight.done)
        compute.run("extend", passes.extend, batch, drafted, verified, emitted)
        compute.record(buffers.free)
        buffers.keep = (batch, drafted, verified, masks, emitted)
        return flight

    @torch.inference_mode()
    def collect(self, flight: Flight) -> StepResult:
        """Wait for a step's results and read them, once."""
        if flight.result is not None:
            return flight.result
        flight.done.synchronize()
        plan, rows = flight.plan, []
        assert flight.results is not None
        host = flight.results.tolist()
        for index, (_, row, _) in enumerate(plan.verified):
            in_tree = index < len(plan.decode_rows)
            accepted, *tokens = host[index]
            del tokens[accepted + 1 :]
            error = None
            if tokens[-1] == NAN_CHOICE:
                error = NumericFault("the model's logits are not numbers: numeric fault")
            if tokens[-1] < 0:
                tokens.pop()
            asked = self.tables.needs_of(row)
            logprobs: tuple[TokenLogprobs, ...] = ()
            if asked.top_logprobs is not None and flight.logprobs:
                own, best, ids = (part[index, : len(tokens)] for part in flight.logprobs)
                logprobs = token_logprobs(own, best, ids, asked.top_logprobs)
            limited = bool(flight.limits) and flight.limits[index] < plan.tier.steps
            drafted = plan.tier.nodes - 1 if in_tree and not asked.plain else 0
            origins = self._origins(flight, index, tokens, accepted) if asked.origins else ()
            rows.append(
                RowResult(
                    tuple(tokens), drafted, accepted, logprobs, error, in_tree and limited, origins
                )
            )
        exposed_ms = 0.0
        if flight.constrained:
            exposed_ms = max(0.0, flight.verified.elapsed_ms(flight.masked))
            if exposed_ms:
                start = flight.verified.time_ns
                end = start + int(exposed_ms * 1e6)
                self.record("compute", "exposed", start, end, plan.index)
        self.streams.note()
        flight.result = StepResult(plan, tuple(rows), exposed_ms)
        return flight.result

    def _origins(
        self, flight: Flight, index: int, tokens: list[int], accepted: int
    ) -> tuple[Origin, ...]:
        """How each of a request's tokens came: its tree is walked again, along them."""
        plan, buffers = flight.plan, flight.buffers
        trees, nodes = len(plan.decode_rows), plan.tier.nodes
        plain: tuple[Origin, ...] = tuple(
            "drafted" if at < accepted else "bonus" for at in range(len(tokens))
        )
        if not plan.verified[index][2]:
            return plain
        if index >= trees:
            rows = buffers.mask_rows(trees * nodes + index - trees + 1)[-1:]
            return token_origins(tokens, plain, None, rows)
        mine = slice(index * nodes, (index + 1) * nodes)
        links = buffers.links[:, mine].numpy()
        return token_origins(tokens, plain, links, buffers.mask_rows(mine.stop)[mine])

    @torch.inference_mode()
    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN, behind the steps that are under way."""
        for pool in (self.passes.pool, self.passes.draft_pool):
            if pool is not None:
                self.streams.compute.run("clear", pool.clear, tuple(pages))

    def close(self) -> None:
        """End the streams' threads."""
        self.streams.close()

    def _flight(self, plan: StepPlan) -> Flight:
        event = self.streams.event
        return Flight(
            plan=plan,
            buffers=self.states[plan.tier].rotate(),
            constrained=any(grammar for _, _, grammar in plan.verified),
            planned=event(),
            drafted=event(),
            copied=event(),
            verified=event(),
            masked=event(),
            chosen=event(),
            done=event(),
        )

    def _fill(self, flight: Flight, lane: Lane) -> tuple[int, ...]:
        """Let the lane write the mask rows; the depth down to which each request's are good."""
        plan, buffers = flight.plan, flight.buffers
        final = plan.final_chunks
        trees, nodes = len(plan.decode_rows), plan.tier.nodes
        none = np.full(len(final), -1, np.int64)
        ends = [chunk.tokens[-1:] for chunk in final]
        tokens, child, sibling = buffers.links[:, : trees * nodes].numpy()
        sizes = [nodes] * trees + [1] * len(final)
        offsets = np.cumsum([0, *sizes], dtype=np.int64)
        host = HostTrees(
            np.concatenate([tokens, *ends]),
            np.concatenate([child, none]),
            np.concatenate([sibling, none]),
            offsets,
        )
        limits = buffers.limits[: len(sizes)]
        limits.fill_(plan.tier.steps)
        ids = [request_id for request_id, _, _ in plan.verified]
        lane.fill(ids, host, buffers.mask_rows(int(offsets[-1])), limits.numpy())
        return tuple(limits.tolist())


def _copy_tree(drafted: Drafted, buffers: Buffers, plan: StepPlan) -> None:
    if drafted.tree is not None:
        trees = len(plan.decode_rows)
        count = trees * plan.tier.nodes
        links = (drafted.tree.tokens, drafted.tree.first_child, drafted.tree.next_sibling)
        for host, link in zip(buffers.links, links, strict=True):
            host[:count].copy_(link[:trees].flatten(), non_blocking=True)


def _upload_masks(buffers: Buffers, plan: StepPlan) -> tuple[Masks, Tensor]:
    """Mask rows, and the depth limits of the requests, to the device."""
    sizes = [plan.tier.nodes] * len(plan.decode_rows) + [1] * len(plan.final_chunks)
    count, requests = sum(sizes), len(sizes)
    rows, limits = buffers.device_masks[:count], buffers.device_limits[:requests]
    rows.copy_(buffers.masks[:count], non_blocking=True)
    limits.copy_(buffers.limits[:requests], non_blocking=True)
    constrained = np.array([grammar for _, _, grammar in plan.verified])
    if constrained.all():
        return Masks(rows, None), limits
    flags = torch.from_numpy(np.repeat(constrained, sizes))
    if rows.is_cuda:
        flags = flags.pin_memory()
    return Masks(rows, flags.to(rows.device, non_blocking=True)), limits


def _copy_results(emitted: Emitted, flight: Flight) -> None:
    # One piece: CUDA copies into rows of a wider table by way of the host, and waits for it.
    packed = torch.cat([emitted.lengths[:, None], emitted.tokens], 1)
    flight.results = flight.buffers.results[: packed.numel()].view(packed.shape)
    flight.results.copy_(packed, non_blocking=True)
    if emitted.logprobs is not None:
        pinned = [
            torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            for part in emitted.logprobs
        ]
        flight.logprobs = tuple(
            host.copy_(part, non_blocking=True)
            for host, part in zip(pinned, emitted.logprobs, strict=True)
        )
