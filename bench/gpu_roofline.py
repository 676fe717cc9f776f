"""The part of ``bench.gpu`` that times verifies alone: 16 and 64 nodes, batches to 32, contexts
to 32k."""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common import median, spread
from bench.kernels import ceilings
from bench.overlap import SETTINGS
from overlap_spec.engine import Engine
from overlap_spec.kernels import build_tree
from overlap_spec.models.config import ModelConfig
from overlap_spec.tiers import Tier
from overlap_spec.worker.graphs import CudaGraph, Eager, Recorded
from overlap_spec.worker.model_runner import ModelRunner

BRANCHES = 4
RUNS, WARM_UPS = 20, 3


@dataclass(frozen=True)
class Setup:
    """What every part runs on: the command line's options, and the folders of the checkpoint and
    of its EAGLE-3 head."""

    options: Namespace
    target: Path
    draft: Path

    @property
    def rehearse(self) -> bool:
        """Whether nothing is measured."""
        return bool(self.options.rehearse)

    @property
    def device(self) -> str:
        """Torch's name of it."""
        return "cpu" if self.rehearse else "cuda"

    @property
    def itemsize(self) -> int:
        """Bytes of a weight as the engine holds it: float32 on the CPU."""
        return 4 if self.rehearse else 2

    def ceilings(self) -> tuple[float, float]:
        """Bytes a second of a large copy, and operations a second of a large product; of a
        rehearsal any."""
        return (1e10, 1e11) if self.rehearse else ceilings(self.options.quick)


@dataclass
class Result:
    """What a part found.

    Attributes:
        figures: Name → :func:`figure`.
        details: More of it, as plain data.
        samples: Raw samples.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)


def figure(
    value: float, *, least: float | None = None, most: float | None = None, **more: Any
) -> dict[str, Any]:
    """A figure held against its target, ``least`` or ``most``; without one, ``met`` is None.

    Args:
        more: ``unit``, ``by`` (what else was measured of it: label → value), and the like.
    """
    target = most if least is None else least
    met = None if target is None else value >= target if least is not None else value <= target
    goal = None if target is None else "at least" if least is not None else "at most"
    return {"value": value, "target": target, "goal": goal, "met": met, **more}


def weight_bytes(folder: Path, itemsize: int) -> int:
    """Bytes of a checkpoint's weights at ``itemsize`` bytes each, embedding tables left out: a
    pass reads a few of their rows."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name == "__metadata__" or "embed_tokens" in name:
                continue
            count = itemsize
            for size in tensor["shape"]:
                count *= size
            total += count
    return total


class Cell(NamedTuple):
    """Trees of so many nodes, each behind ``context`` tokens of its own."""

    nodes: int
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes, batch {self.batch}, context {self.context}"


# The first two are judged: what decoding does, and a long context; then by how common they are.
CELLS = (
    Cell(16, 1, 2048),
    Cell(64, 1, 32768),
    Cell(16, 32, 2048),
    Cell(16, 1, 8192),
    Cell(64, 1, 8192),
    Cell(16, 1, 32768),
    Cell(16, 32, 8192),
    Cell(64, 32, 2048),
    Cell(64, 32, 8192),
    # As many keys as the one before: 32 requests of this length fit into no one GPU's memory.
    Cell(64, 8, 32768),
)
REHEARSAL_CELLS = (Cell(16, 1, 32), Cell(64, 1, 96), Cell(16, 2, 32))
QUICK = 3


# Of the first cells: their figures, and the share that they must reach.
JUDGED = {"verify_roofline_share": 0.85, "verify_share_64_nodes_32k": 0.75}


def roofline(setup: Setup) -> Result:
    """Each cell's share of the roofline: the least time that the copy's and the product's rates
    allow over the time that a verify takes, its graph replayed by itself."""
    cells: tuple[Cell, ...] = REHEARSAL_CELLS if setup.rehearse else CELLS
    cells = cells[:QUICK] if setup.options.quick else cells
    copy_bytes_s, product_flops_s = setup.ceilings()
    weights = weight_bytes(setup.target, setup.itemsize)
    found: dict[str, dict[str, Any]] = {}
    result = Result(details={"cells": found})
    more = settings(cells) | {"device": setup.device}
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(str(long_target(setup.target, Path(folder), cells)), **more) as engine,
    ):
        runner = engine.core.worker.runner
        for cache in (runner.pool.k, runner.pool.v):
            cache.normal_()
        for cell in cells:
            size, flops = work_of(cell, runner.target.config, weights, setup.itemsize)
            least_ms = max(size / copy_bytes_s, flops / product_flops_s) * 1e3
            row: dict[str, Any] = {"bytes": size, "flops": flops, "least_ms": least_ms}
            if taken_ms := timed(runner, cell):
                row |= {"verify_ms": spread(taken_ms), "share": least_ms / median(taken_ms)}
                result.samples += [{"cell": str(cell), "verify_ms": ms} for ms in taken_ms]
            else:
                row["skipped"] = "its keys do not fit into the cache"
            found[str(cell)] = row
    shares = {name: row["share"] for name, row in found.items() if "share" in row}
    for cell, (name, least) in zip(cells, JUDGED.items(), strict=False):
        if share := shares.get(str(cell)):
            result.figures[name] = figure(share, least=least, unit="of roofline", by=shares)
    return result


def settings(cells: Sequence[Cell]) -> dict[str, Any]:
    """The engine's: no drafter, room for the cells, and no recording of its own."""
    longest = max(cell.context + cell.nodes for cell in cells)
    return SETTINGS | {
        "algorithm": "none",
        "graphs": False,
        "context_length": longest + 64,
        "max_running_requests": max(cell.batch for cell in cells),
        "chunked_prefill_size": 1024,
        # The cells' own, where memory has room for them.
        "max_total_tokens": max(cell.batch * (cell.context + cell.nodes + 64) for cell in cells),
    }


def long_target(target: Path, folder: Path, cells: Sequence[Cell]) -> Path:
    """``folder``, as the target with room for the cells' positions: its weights, under a config of
    its own."""
    for file in target.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    longest = max(cell.context + cell.nodes for cell in cells) + 128
    config["max_position_embeddings"] = max(longest, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def work_of(cell: Cell, shape: ModelConfig, weights: int, item: int) -> tuple[float, float]:
    """The least bytes that a verify reads, and its operations."""
    nodes, batch, context = cell
    row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * item
    seen = 4 * shape.num_layers * shape.num_heads * shape.head_dim * (context + nodes / 2)
    flops = batch * nodes * (2 * weights / item + seen)
    return weights + batch * (context + nodes) * row, flops


def timed(runner: ModelRunner, cell: Cell) -> list[float]:
    """Milliseconds of replays; none where the cache has no room for the cell's keys."""
    inputs = inputs_of(runner, cell)
    if inputs is None:
        return []
    tier = Tier(max(2, cell.nodes.bit_length() // 2 + 1), BRANCHES, cell.nodes)
    work = partial(runner.verify_trees, tier)
    with torch.inference_mode():
        if runner.device.type != "cuda":
            return _by_clock(Eager(work), inputs)
        # The default stream cannot be captured; what was written on it is waited for.
        torch.cuda.synchronize(runner.device)
        with torch.cuda.stream(torch.cuda.Stream(runner.device)):
            return _by_events(CudaGraph(work, inputs, torch.cuda.graph_pool_handle()), inputs)


def inputs_of(runner: ModelRunner, cell: Cell) -> tuple[Tensor, ...] | None:
    """What verify takes of the cell: every tree on pages of its own."""
    nodes, batch, context = cell
    pool, device = runner.pool, runner.device
    each = -(-(context + nodes) // pool.page_size)
    if batch * each >= pool.k.shape[1]:
        return None
    pages = torch.zeros(batch, runner.tables.pages.shape[1], dtype=torch.int64, device=device)
    pages[:, :each] = 1 + torch.arange(batch * each, device=device).view(batch, each)
    generator = torch.Generator().manual_seed(0)
    vocab = runner.target.config.vocab_size
    drawn = torch.randint(0, vocab, (batch, nodes), generator=generator).to(device)
    above = torch.arange(nodes - 1, device=device).div(BRANCHES, rounding_mode="floor")
    scores = -above.float().expand(batch, -1).contiguous()
    parents = above.expand(batch, -1).contiguous()
    tree = build_tree(drawn[:, 0], drawn[:, 1:].contiguous(), parents, scores, nodes)
    positions = torch.full((batch,), context, device=device)
    return pages, positions, tree.tokens, tree.depths, tree.ancestors


def _by_events(recorded: Recorded, inputs: tuple[Tensor, ...]) -> list[float]:
    taken: list[float] = []
    for number in range(RUNS + WARM_UPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        recorded(*inputs)
        end.record()
        end.synchronize()
        if number >= WARM_UPS:
            taken.append(start.elapsed_time(end))
    return taken


def _by_clock(recorded: Recorded, inputs: tuple[Tensor, ...]) -> list[float]:
    taken: list[float] = []

    def once(run: Callable[..., object]) -> float:
        start = time.perf_counter()
        run(*inputs)
        return (time.perf_counter() - start) * 1e3

    once(recorded)
    for _ in range(WARM_UPS):
        taken.append(once(recorded))
    return taken
