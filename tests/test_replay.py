"""Recorded passes: what is replayed is what was recorded, for every tier and size of batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_spec.drafters.base import Roots
from overlap_spec.engine import Engine
from overlap_spec.kernels import Tree
from overlap_spec.worker.graphs import padded, padded_size
from overlap_spec.worker.passes import Passes
from overlap_spec.worker.replay import read_inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TIERS: dict[str, dict[str, Any]] = {
    "no draft": {"num_steps": 0},
    "chain": {"num_steps": 3},
    "tree": {"num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 11},
}


def state(passes: Passes) -> list[Tensor]:
    """What passes write, among others: caches, tables, the drafter's states and features."""
    return [buffer for buffer in passes.buffers() if not buffer.is_mkldnn]


def close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tier", TIERS)
@torch.inference_mode()
def test_replay_equals_the_passes(tiny: dict[str, Any], tier: str, device: str) -> None:
    settings = {"adaptive": "static", "overlap": "none", "dtype": "float32", "page_size": 4}
    with Engine(**tiny, **settings, **TIERS[tier], device=device) as engine:
        passes, (own,) = engine.core.worker.passes, engine.core.worker.states
        generator = torch.Generator().manual_seed(1)
        for buffer in state(passes):
            if buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
        for batch in (1, 3, 9):
            columns = passes.tables.pages.shape[1] if device == "cuda" else 4 + batch
            rows = torch.arange(batch, device=device)
            tables = passes.tables
            tables.pages[:batch, :6] = rows[:, None] * 6 + 1 + torch.arange(6, device=device)
            tables.committed[:batch] = torch.arange(batch, device=device) + 7
            tables.roots[:batch] = rows + 30
            size = padded_size(batch)
            rows = torch.cat([rows, rows.new_full((size - batch,), tables.nobody)])
            pages = tables.pages[rows, :columns]
            replay = passes.replays._found[own, size if device == "cuda" else 2]

            want = passes.grow(own, rows, pages)
            got = replay.draft(rows, pages)
            close([x[:batch] for x in got], [x[:batch] for x in want])
            tokens, positions, *tree = (x.clone() for x in want)
            inputs = read_inputs(Roots(rows, pages, tokens, positions), Tree(*tree))
            want = [x.clone() for x in passes.read(own, *inputs)]
            after = [x.clone() for x in state(passes)]
            got = replay.verify(*inputs)
            real = batch * own.nodes
            close([x[:real] for x in got], [x[:real] for x in want])
            close(state(passes), after)

            assert replay.extend is not None
            chosen = torch.randint(200, (batch, own.steps + 1), generator=generator)
            path = torch.arange(own.steps + 1).expand(batch, -1) % own.nodes
            lengths = torch.arange(batch) % (own.steps + 1)
            lesson = [padded(x, size).to(device) for x in (chosen, path, lengths)]
            passes.learn(own, rows, pages, positions, want[1], *lesson)
            after = [x[:batch].clone() for x in (passes.drafter.root_state,)]
            passes.drafter.root_state.zero_()
            replay.extend(rows, pages, positions, want[1], *lesson)
            close([passes.drafter.root_state[:batch]], after)


def test_sizes_are_few_and_waste_little() -> None:
    sizes = [padded_size(n) for n in range(1, 257)]
    assert all(n <= size <= max(n + 1, n * 1.25) for n, size in enumerate(sizes, 1))
    assert sizes[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert len(set(sizes)) <= 32


@pytest.mark.parametrize("overlap", ["none", "once-sync"])
def test_nothing_is_recorded_where_it_is_switched_off(tiny: dict[str, Any], overlap: str) -> None:
    outputs = []
    for graphs in (True, False):
        with Engine(**tiny, overlap=overlap, graphs=graphs, adaptive="default") as engine:
            outputs.append(engine.generate(["one", "two", "three"], None, {"max_tokens": 20}))
            assert bool(engine.core.worker.passes.replays._found) == graphs
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
