"""Every kernel that serving may want, run once before the first request: none is compiled later.

Kernels differ by tier, by batch (how many programs share a request's keys), by what a step asks of
the sampler, and by the type of its logits. What is run is the padding row's, and leaves no trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from overlap_spec.kernels import apply_bitmask, noise_keys
from overlap_spec.kernels.sampling import PURPOSES
from overlap_spec.types import LOST, Budget, Chunk, StepPlan, Tier
from overlap_spec.worker.batch import PlanUpload, Staging
from overlap_spec.worker.graphs import padded_size
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.passes import Accepted
from overlap_spec.worker.sampler import Masks, Nodes
from overlap_spec.worker.tables import SamplingFeatures

PLAIN = SamplingFeatures(
    sampled=False,
    filtered=False,
    penalised=False,
    biased=False,
    banned=False,
    min_tokens=False,
    top_logprobs=None,
    tries=False,
    extras=frozenset(),
)


def warm_up(
    runner: ModelRunner, upload: PlanUpload, tiers: Mapping[Tier, int], chunk_tokens: int
) -> None:
    """Run everything once; no request may be running.

    Args:
        upload: As steps upload their plans.
        tiers: All that a step may take, and the most trees that it may have then.
        chunk_tokens: Most prompt tokens of a step.
    """
    try:
        for tier, most in tiers.items():
            for size in warm_sizes(most):
                runner.graphs.find(tier, size)
                warm_packed(runner, upload, tier, size)
        warm_sampler(runner)
        for tokens in powers_of_two(chunk_tokens):
            warm_chunk(runner, upload, next(iter(tiers)), tokens)
    finally:
        forget(runner)


def powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and ``most``."""
    power = 1
    while power < most:
        yield power
        power *= 2
    yield most


def warm_sizes(rows: int) -> list[int]:
    """Batches between which no kernel differs: by powers of two, as shares of keys do."""
    return sorted({padded_size(size) for size in powers_of_two(rows)})


def warm_sampler(runner: ModelRunner) -> None:
    """The choice of tokens, with and without masks, noise and filters, in both types of logits."""
    tables, vocab = runner.tables, runner.tables.vocab_size
    words = -(-vocab // 32)
    rows = torch.full((2,), tables.padding_row, device=runner.device)
    place = Nodes(rows, torch.zeros_like(rows), None, None)
    flags = torch.ones(2, dtype=torch.bool, device=runner.device)
    bits = torch.full((2, words), -1, dtype=torch.int32, device=runner.device)
    asked = [PLAIN, replace(PLAIN, sampled=True), replace(PLAIN, sampled=True, filtered=True)]
    kinds = {torch.float32, runner.pool.k.dtype}
    for kind, features in itertools.product(kinds, asked):
        for masks in (None, Masks(bits, None), Masks(bits, flags)):
            logits = torch.zeros(2, vocab, dtype=kind, device=runner.device)
            runner.sampler.choose(logits, place, features, masks)
    for kind in kinds:
        logits = torch.zeros(2, vocab, dtype=kind, device=runner.device)
        apply_bitmask(logits, bits)
    for purpose in PURPOSES:
        noise_keys(rows, rows, purpose)


def warm_packed(runner: ModelRunner, upload: PlanUpload, tier: Tier, size: int) -> None:
    """Verify of some nodes alone, of which there may be any number."""
    nodes, row = size * tier.nodes, runner.tables.padding_row
    if tier.nodes == 1:
        return
    for count in (n for n in powers_of_two(nodes - 1) if n >= size):
        budget = Budget(tier, count, (1,) * size, (tier.nodes,) * size)
        plan = StepPlan(0, budget, (row,) * size, (), (0,) * size, (False,) * size, 0, ())
        drafted = runner.draft(upload(plan, Staging()))
        assert drafted is not None
        roots, tree = drafted.roots, drafted.tree
        inputs = roots.pages, roots.positions, tree.tokens, tree.depths, tree.ancestors
        if drafted.pack is not None:
            runner.verify_packed(drafted.pack, *inputs)


def warm_chunk(runner: ModelRunner, upload: PlanUpload, tier: Tier, tokens: int) -> None:
    """A prompt of this length: how many programs share its keys follows from that."""
    text = np.zeros(min(tokens, runner.last_position), np.int64)
    chunk = Chunk(runner.tables.padding_row, 0, text, True)
    plan = StepPlan(0, Budget(tier), (), (chunk,), (0,), (False,), 0, ())
    batch = upload(plan, Staging())
    prefilled = runner.prefill(batch)
    accepted: Accepted = runner.accept(batch, None, None, prefilled, PLAIN, None)
    runner.extend_chunks(batch, prefilled, accepted)


def forget(runner: ModelRunner) -> None:
    """Leave the padding row and page 0 as they were."""
    tables = runner.tables
    tables.committed[-1:], tables.roots[-1:], tables.forced[-1:] = 0, 0, -1
    runner.states.state[-1:] = LOST
    for cache in (runner.pool, *runner.draft_pools):
        cache.clear((0,))
