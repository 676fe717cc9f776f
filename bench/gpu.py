"""How near its limits a verify comes on a CUDA device, by itself.

``python -m bench.gpu [--model NAME | --model DIR --draft DIR] [--work DIR] [--quick] [--json PATH]
[--rehearse]`` replays the verify's graph at 16 and 64 nodes, batches to 32 and contexts to 32k, on
one device of 80 GB. The share is the least time that the rates of a large copy and a large product
allow over the time taken. The target is the embedded model padded to the cost of ``llama-3.1-8b``
(16 GB, written once to ``--work``) unless ``--model`` says otherwise. ``--rehearse`` runs the same
on the CPU at tiny sizes, to see that it works: it measures nothing, which the record says. Without
a device the exit status is 2. What else is asked of a GPU, ``bench.kernels``, ``bench.overlap`` and
``bench.peers`` tell (docs/gpu.md has the order).

Fields of the last line, beside those of every record (``bench.common``): ``cells`` (nodes, batch
and context → ``bytes`` and ``flops`` of the verify, ``least_ms``, ``verify_ms``, ``share``, and of
those that are judged ``aim``; or ``skipped``), ``like`` (the target's name), ``rehearsal``. It is
``bench/results/GPU-DATE.json`` unless ``--json`` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common import ROOT, Run, command, flags, machine, median, spread
from bench.kernels import ceilings
from bench.overlap import SETTINGS
from bench.targets import add_model_flags, model_settings, padded_target, work_folder
from overlap_spec.engine import Engine
from overlap_spec.kernels import build_tree
from overlap_spec.models.config import ModelConfig
from overlap_spec.tiers import Tier
from overlap_spec.worker.graphs import CudaGraph, Eager, Recorded
from overlap_spec.worker.model_runner import ModelRunner

RESULTS = ROOT / "bench" / "results"
LIKE = "llama-3.1-8b"
REHEARSAL_VOCABULARY = 4096
BRANCHES = 4
RUNS, WARM_UPS = 20, 3


class Cell(NamedTuple):
    """Trees of so many nodes, each behind ``context`` tokens of its own."""

    nodes: int
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes, batch {self.batch}, context {self.context}"


# What decoding does, and a long context; then by how common they are.
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
# Shares that the first cells must reach.
AIMS = (0.85, 0.75)


def weight_bytes(folder: Path, itemsize: int) -> int:
    """Bytes of a checkpoint's weights at ``itemsize`` bytes each, embedding tables left out: a
    pass reads a few of their rows."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__" and "embed_tokens" not in name:
                total += itemsize * torch.Size(tensor["shape"]).numel()
    return total


def measure(target: Path, options: argparse.Namespace, run: Run) -> dict[str, dict[str, Any]]:
    """Each cell's figures."""
    cells = (REHEARSAL_CELLS if options.rehearse else CELLS)[: QUICK if options.quick else None]
    # As the engine holds a weight: float32 on the CPU. A rehearsal's ceilings are any.
    device, item = ("cpu", 4) if options.rehearse else ("cuda", 2)
    copy_bytes_s, product_flops_s = (1e10, 1e11) if options.rehearse else ceilings(options.quick)
    weights = weight_bytes(target, item)
    found: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(
            str(long_target(target, Path(folder), cells)), device=device, **settings(cells)
        ) as engine,
    ):
        runner = engine.core.worker.runner
        for cache in (runner.pool.k, runner.pool.v):
            cache.normal_()
        for cell, aim in zip(cells, (*AIMS, *[None] * len(cells)), strict=False):
            size, flops = work_of(cell, runner.target.config, weights, item)
            least_ms = max(size / copy_bytes_s, flops / product_flops_s) * 1e3
            row: dict[str, Any] = {"bytes": size, "flops": flops, "least_ms": least_ms, "aim": aim}
            if taken_ms := timed(runner, cell):
                row |= {"verify_ms": spread(taken_ms), "share": least_ms / median(taken_ms)}
            else:
                row["skipped"] = "its keys do not fit into the cache"
            found[str(cell)] = row
            run.sample(cell=str(cell), verify_ms=taken_ms)
    return found


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


def _by_clock(recorded: Callable[..., object], inputs: tuple[Tensor, ...]) -> list[float]:
    taken: list[float] = []
    for _ in range(WARM_UPS + 1):
        start = time.perf_counter()
        recorded(*inputs)
        taken.append((time.perf_counter() - start) * 1e3)
    return taken[1:]


def default_path(device: str, date: str) -> Path:
    """Where a run's record goes: the device's name and the day."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return RESULTS / f"{slug}-{date[:10]}.json"


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("gpu", "How near its limits a CUDA device's verify comes.")
    add_model_flags(parser, f"that of {LIKE}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny sizes")
    options = parser.parse_args(arguments)
    if options.rehearse and options.json is not None and RESULTS in options.json.resolve().parents:
        parser.error("--json must not be in bench/results: a rehearsal measures nothing")
    if not (options.rehearse or torch.cuda.is_available()):
        parser.error("bench.gpu needs a CUDA device; --rehearse runs on the CPU")
    if options.json is None and not options.rehearse:
        options.json = default_path(machine()["device"], datetime.now(UTC).isoformat())
    run = Run("gpu", options, arguments)
    if options.rehearse:
        target, _ = padded_target(work_folder(options.work), REHEARSAL_VOCABULARY)
    else:
        options.model = options.model or LIKE
        target = Path(model_settings(options)["model"])
    torch.set_num_threads(1)
    cells = measure(target, options, run)
    run.finish(RUNS, cells=cells, like=Path(options.model or "").name, rehearsal=options.rehearse)


if __name__ == "__main__":
    main()
