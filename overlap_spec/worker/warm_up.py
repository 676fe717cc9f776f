"""Every kernel that serving may want, run once before the first request: none is compiled later.

Kernels differ by tier, by batch (how many programs share a request's keys), by what is asked of the
sampler, and by the logits' type. What is run is the padding row's, and leaves no trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from overlap_spec.kernels.sampling import PURPOSES, apply_bitmask, apply_penalties, noise_keys
from overlap_spec.steps import Chunk, StepPlan
from overlap_spec.tiers import Budget, Tier
from overlap_spec.worker.batch import Staging
from overlap_spec.worker.cuda_graphs import CudaGraphs
from overlap_spec.worker.graphs import packed_sizes, powers_of_two
from overlap_spec.worker.passes import StepTensors
from overlap_spec.worker.recordings import Recordings
from overlap_spec.worker.sampler import Masks, Nodes
from overlap_spec.worker.tables import PLAIN
from overlap_spec.worker.worker import Worker


def warm_up(worker: Worker, tiers: Mapping[Tier, int], chunk_tokens: int) -> None:
    """Run everything once; no request may be running. ``tiers``: all that a step may take, and
    the most trees that it may have then, padding included; ``chunk_tokens``: most of a step."""
    try:
        if isinstance(worker.recordings, CudaGraphs):
            record_all(worker.recordings, tiers)
        for tier, most in tiers.items():
            for size in sizes(worker.recordings, most):
                warm_packed(worker, tier, size)
        warm_sampler(worker)
        for tokens in powers_of_two(chunk_tokens):
            warm_chunk(worker, next(iter(tiers)), tokens)
    finally:
        forget(worker)


def sizes(recordings: Recordings, most: int) -> list[int]:
    """Batches of at most ``most`` rows: all where each has a graph of its own, else powers of two,
    between which no kernel differs."""
    own = isinstance(recordings, CudaGraphs)
    every = range(1, most + 1) if own else powers_of_two(most)
    return sorted({recordings.padded(size) for size in every})


def record_all(graphs: CudaGraphs, most_rows: Mapping[Tier, int]) -> None:
    """The graphs of all steps of these tiers, of at most so many rows each, the largest first:
    their outputs have room for those of all others."""
    before = graphs.reserved()
    every = [(tier, size) for tier, most in most_rows.items() for size in sizes(graphs, most)]
    for tier, size in sorted(every, key=lambda of: -of[0].nodes * of[1]):
        for variant in variants(graphs.runner.reads_states, tier):
            graphs.draft(tier, size, *variant)
        for count in packed_sizes(size, tier.nodes):
            graphs.packed(tier, size, count)
    graphs.bytes = graphs.reserved() - before


def variants(told: bool, tier: Tier) -> list[tuple[bool, bool]]:
    """The kinds of drafts that steps of a tier may want, ``sampled`` and ``told``; ``told``:
    whether the drafter reads the states of grammars."""
    # Wide tiers are for who has a grammar.
    kinds = dict.fromkeys((told,) if tier.base else (told, False))
    return list(itertools.product((False, True), kinds))


def warm_sampler(worker: Worker) -> None:
    """The choice of tokens, with and without masks, penalties, noise and filters, in both types of
    logits."""
    runner, choose = worker.runner, worker.phases.sampler.choose
    tables, vocab, device = runner.tables, runner.tables.vocab_size, runner.device
    rows = torch.full((2,), tables.padding_row, device=device)
    place = Nodes(rows, torch.zeros_like(rows), None, None)
    bits = torch.full((2, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
    asked = [PLAIN, PLAIN._replace(sampled=True), PLAIN._replace(sampled=True, filtered=True)]
    given = (None, Masks(bits, None), Masks(bits, rows * 0))
    for kind in {torch.float32, runner.pool.k.dtype}:
        for features, masks in itertools.product(asked, given):
            choose(torch.zeros(2, vocab, dtype=kind, device=device), place, features, masks)
        apply_bitmask(torch.zeros(2, vocab, dtype=kind, device=device), bits)
    counts = torch.zeros(2, vocab, dtype=torch.int32, device=device)
    factors = (rows.float() for _ in range(3))
    apply_penalties(counts.float(), counts, counts > 0, *factors)
    for purpose in PURPOSES:
        noise_keys(rows, rows, purpose)


def warm_packed(worker: Worker, tier: Tier, size: int) -> None:
    """The choice of any number of nodes; and their verify, where none is recorded."""
    nodes, row = size * tier.nodes, worker.runner.tables.padding_row
    if tier.nodes == 1:
        return
    wanted = (n for n in powers_of_two(nodes - 1) if n >= size)
    for count in sorted({worker.recordings.packed_size(tier, size, n) for n in wanted}):
        budget = Budget(tier, count, (tier.nodes,) * size)
        plan = StepPlan(0, budget, (row,) * size, (), (0,) * size, (False,) * size, 0, ())
        step = planned(worker, plan)
        worker.phases.draft(step)
        if not isinstance(worker.recordings, CudaGraphs):
            worker.phases.verify(step)


def warm_chunk(worker: Worker, tier: Tier, tokens: int) -> None:
    """A prompt of this length: how many programs share its keys follows from that."""
    runner, phases = worker.runner, worker.phases
    text = np.zeros(min(tokens, runner.last_position), np.int64)
    chunk = Chunk(runner.tables.padding_row, 0, text, True)
    plan = StepPlan(0, Budget(tier), (), (chunk,), (0,), (False,), 0, ())
    step = planned(worker, plan)
    for phase in (phases.prefill, phases.accept, phases.extend_chunks):
        phase(step)


def planned(worker: Worker, plan: StepPlan) -> StepTensors:
    """A step of requests that ask for nothing."""
    step = StepTensors(PLAIN)
    step.batch = worker.plan_upload(plan, Staging())
    return step


def forget(worker: Worker) -> None:
    """Leave the padding row and page 0 as they were."""
    runner = worker.runner
    runner.tables.committed[-1:], runner.tables.roots[-1:] = 0, 0
    runner.told.forget()
    for cache in runner.caches:
        cache.clear((0,))


def prepare(worker: Worker, tier: Tier) -> None:
    """Record a tier's passes for a single request, ahead of its first step, with a grammar or
    without one."""
    for told in {False, worker.runner.reads_states}:
        worker.recordings.record(tier, False, told)


def prepare_next(worker: Worker, tiers: Sequence[Tier]) -> bool:
    """Record what one of these tiers lacks; False if they lack nothing."""
    recordings = worker.recordings
    kinds = itertools.product(tiers, (False, True), (False, worker.runner.reads_states))
    return recordings.traced and any(itertools.starmap(recordings.record, kinds))
