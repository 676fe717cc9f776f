"""What passes are recorded over: the row of padding, whose state is no request's."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.drafters.base import Drafter
from overlap_spec.kernels import Tree
from overlap_spec.tiers import Tier
from overlap_spec.worker.graphs import Recorded, Tensors, Work
from overlap_spec.worker.model_runner import ModelRunner


def padding(runner: ModelRunner, rows: int) -> tuple[Tensor, Tensor]:
    """The row of padding, so often, and its pages."""
    row = torch.full((rows,), runner.tables.padding_row, device=runner.device)
    return row, runner.tables.pages[row]


def verified(given: Tensors, trees: Tensors) -> Tensors:
    """What a verify takes of rows and pages, and of trees as drafts give them."""
    _, roots, _, _, *tensors = trees
    tree = Tree(*tensors)
    return *given, roots, tree.tokens, tree.depths, tree.ancestors


def packed(runner: ModelRunner, nodes: int, count: int, rows: int) -> Tensors:
    """The same of ``count`` nodes alone: the roots, and as many more; in ascending order."""
    row, pages = padding(runner, rows)
    more = [n for n in range(rows * nodes) if n % nodes][: count - rows]
    pack = torch.tensor(sorted([r * nodes for r in range(rows)] + more), device=row.device)
    # Each of its own: a CUDA graph is given tokens in the place of the ones, depths of the others.
    tokens, depths = row.new_zeros(2, rows, nodes).unbind()
    seen = torch.eye(nodes, dtype=torch.bool, device=row.device).expand(rows, -1, -1)
    return pack, row, pages, torch.zeros_like(row), tokens, depths, seen.contiguous()


def committed(
    runner: ModelRunner, tier: Tier, given: Tensors, trees: Tensors, writes: Tensors
) -> Tensors:
    """What a commit takes of them, where nothing is accepted; ``writes``: of their verify."""
    _, roots, _, _, *tree = trees
    every = roots.new_full((tree[0].numel(),), -1)
    limits, runs = torch.full_like(roots, tier.steps), runner.no_run.repeat(len(every), 1)
    return *given, roots, *tree, every, limits, runs, *writes


def extended(
    runner: ModelRunner, tier: Tier, rows: int, token: int = 0, length: int = 0, fill: float = 0.0
) -> Tensors:
    """What extend takes: ``token`` everywhere, ``length`` of them accepted, and features, if any,
    that are ``fill``."""
    row, pages = padding(runner, rows)
    path, roots = row.new_zeros(rows, tier.steps + 1), torch.zeros_like(row)
    found = row, pages, roots, torch.full_like(path, token), path, torch.full_like(row, length)
    if not runner.feature_layers:
        return found
    known = runner.page_features[:1]
    return *found, known.new_full((rows * tier.nodes, known.shape[1]), fill)


def same(runner: ModelRunner, recorded: Recorded, work: Work, inputs: Tensors) -> bool:
    """Whether both give the same results, and leave the drafter in the same state."""
    tables, drafter = runner.tables, runner.drafter
    if drafter is None:
        return True
    state = _own_buffers(drafter, len(tables.roots))
    tables.roots[-1:], tables.committed[-1:] = 3, 2
    tables.temperature[-1:], tables.seed[-1:] = 1.0, 7
    outcomes = []
    try:
        for run in (recorded, work):
            for cache in runner.caches[1:]:
                cache.clear((0,))
            for buffer in state:
                buffer[-1:] = 0.5 if buffer.is_floating_point() else 1
            kept = (*run(*inputs), *(b[-1:] for b in state))
            outcomes.append([x.clone() for x in kept])
    finally:
        tables.roots[-1:], tables.committed[-1:] = 0, 0
        tables.temperature[-1:], tables.seed[-1:] = 0.0, 0
    return all(
        replayed.shape == direct.shape
        and torch.allclose(replayed.float(), direct.float(), rtol=1e-3, atol=1e-3, equal_nan=True)
        for replayed, direct in zip(*outcomes, strict=True)
    )


def _own_buffers(drafter: Drafter, rows: int) -> list[Tensor]:
    """What a drafter keeps for each of ``rows``, and not its constants."""
    own = [b for b in drafter.buffers(recurse=False) if b.dim() and not b.is_mkldnn]
    return [b for b in own if len(b) == rows]
