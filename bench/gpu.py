"""How near their limits a CUDA device's kernels come, and a whole verify.

``python -m bench.gpu [--only verify|kernels] [--model NAME | --model DIR --draft DIR] [--work DIR]
[--quick] [--json PATH] [--seed S] [--rehearse]`` first measures two ceilings: a large copy (bytes
read and written) and a large product. A share is the least time that they allow over the time
taken. Then comes every operation at Llama-3.1-8B's shapes (``bench.kernel_work``), as a CUDA graph
of calls over inputs that take turns, so that none is found in the cache, and its reference in the
same way; they are first held to each other (exit status 1 where they disagree). Attention is
measured with FlashAttention-3 too, where that is installed (``OVERLAP_SPEC_KERNELS=flash``).

At last the verify's graph is replayed at 16 and 64 nodes, batches to 32 and contexts to 32k, on one
device of 80 GB. The target is the embedded model padded to the cost of ``llama-3.1-8b``
(16 GB, written once to ``--work``) unless ``--model`` says otherwise. ``--rehearse`` runs the
verify alone on the CPU at tiny sizes, to see that it works: it measures nothing, which the record
says. Without a device the exit status is 2. What else is asked of a GPU, ``bench.overlap`` and
``bench.peers`` tell (docs/gpu.md has the order).

Fields of the last line, beside those of every record (``bench.common``): ``cells`` (nodes, batch
and context → ``bytes`` and ``flops`` of the verify, ``least_ms``, ``verify_ms``, ``share``, and of
those that are judged ``aim``; or ``skipped``), ``kernels`` (name → ``us`` and ``reference_us``
(spreads), ``gb_s``, ``tflop_s``, ``share``, ``speedup`` (pair by pair), ``bytes``, ``flops``; with
FlashAttention-3 ``flash_us`` and ``flash_speedup`` over the kernel), ``copy_gb_s``,
``matmul_tflop_s``, ``like`` (the target's name), ``rehearsal``. It is
``bench/results/GPU-DATE.json`` unless ``--json`` says otherwise.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common import ROOT, Run, command, fail, flags, machine, median, paired, spread
from bench.kernel_work import Draw, Work, works
from bench.overlap import SETTINGS
from bench.targets import add_model_flags, model_settings, padded_target, work_folder
from overlap_spec.engine import Engine
from overlap_spec.kernels import build_tree
from overlap_spec.kernels.dispatch import flash_installed, use
from overlap_spec.models.config import ModelConfig
from overlap_spec.tiers import Tier
from overlap_spec.worker.graphs import CudaGraph, Eager, Recorded
from overlap_spec.worker.model_runner import ModelRunner

RESULTS = ROOT / "bench" / "results"
LIKE = "llama-3.1-8b"
REHEARSAL_VOCABULARY = 4096
BRANCHES = 4
RUNS, WARM_UPS = 20, 3
CACHE_BYTES = 256 * 2**20
MOST_SETS, CALLS = 16, 32


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


def measure_verify(
    run: Run, target: Path, copy_bytes_s: float, product_flops_s: float
) -> dict[str, dict[str, Any]]:
    """Each cell's figures."""
    options = run.options
    cells = (REHEARSAL_CELLS if options.rehearse else CELLS)[: QUICK if options.quick else None]
    # As the engine holds a weight: float32 on the CPU.
    device, item = ("cpu", 4) if options.rehearse else ("cuda", 2)
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
    rows = torch.arange(batch, device=device)
    return rows, pages, positions, tree.tokens, tree.depths, tree.ancestors


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


def input_sets(work: Work) -> list[tuple[Any, ...]]:
    """Enough sets of arguments that together they are more than any cache holds."""
    first = work.draw()
    held = max(1, sum(t.numel() * t.element_size() for t in tensors(first)))
    count = min(MOST_SETS, max(2, -(-CACHE_BYTES // held)))
    return [first, *(work.draw() for _ in range(count - 1))]


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


def graph_us(work: Work, choice: str, sets: list[tuple[Any, ...]]) -> Callable[[], float]:
    """A measurement of microseconds a call, by replays of a graph of many calls where it can be
    captured."""

    def calls() -> None:
        with use(choice), torch.inference_mode():
            for index in range(CALLS):
                work.operation(*sets[index % len(sets)])

    calls()
    torch.cuda.synchronize()
    run: Callable[[], None] = calls
    if choice != "reference" or not work.reference_reads:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        run = graph.replay
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        run()
        start.record()
        run()
        end.record()
        end.synchronize()
        elapsed_ms: float = start.elapsed_time(end)
        return elapsed_ms * 1e3 / CALLS

    return sample


def disagreement(work: Work, args: tuple[Any, ...], choice: str = "triton") -> float:
    """Largest relative error of the kernel's results, and of what it wrote into its arguments."""
    outcomes = []
    for each in (choice, "reference"):
        own = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
        with use(each), torch.inference_mode():
            result = work.operation(*own)
        outcomes.append([*tensors(result), *tensors(own)])
    worst = 0.0
    for mine, theirs in zip(*outcomes, strict=True):
        mine, theirs = (t.double().nan_to_num(7.0, 1e4, -1e4) for t in (mine, theirs))
        size = float(theirs.norm())
        worst = max(worst, float((mine - theirs).norm()) / size if size else 0.0)
    return worst


# Choices may differ by one token at a boundary of the coin; a path's tail is arbitrary.
OPEN = ("masked_choose", "top_candidates", "accept_path")


# Where a choice's time stands in the record.
FIELDS = {"triton": "us", "reference": "reference_us", "flash": "flash_us"}


def choices_of(work: Work) -> tuple[str, ...]:
    """Which of :data:`FIELDS` are held to the reference."""
    is_attention = (work.config or "").startswith("attention")
    return ("triton", "flash") if is_attention and flash_installed() else ("triton",)


def ceilings(quick: bool) -> tuple[float, float]:
    """Bytes a second of a copy, and bf16 operations a second of a product."""
    size = 2**28 if quick else 2**30
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us = _best_us(lambda: target.copy_(source))
    side = 4096 if quick else 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_us = _best_us(lambda: torch.mm(a, b))
    return 2 * size / copy_us * 1e6, 2 * side**3 / product_us * 1e6


def _best_us(call: Callable[[], Any]) -> float:
    times: list[float] = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times[2:])


def measure_kernels(
    run: Run, chosen: Sequence[Work], repetitions: int, memory: float, product: float
) -> dict[str, dict[str, Any]]:
    """Kernel and reference of every work in turn: each one's figures."""
    rows: dict[str, Any] = {}
    with run.progress() as progress:
        task = progress.add_task("kernels", total=len(chosen))
        for work in chosen:
            progress.update(task, description=work.name)
            sets = input_sets(work)
            choices = choices_of(work)
            for choice in choices:
                error = disagreement(work, sets[0], choice)
                if error > 0.02 and not work.name.startswith(OPEN):
                    fail(f"{work.name}: {choice} and reference disagree by {error:.3g}")
            samples = {c: graph_us(work, c, sets) for c in (*choices, "reference")}
            us: dict[str, list[float]] = {choice: [] for choice in samples}
            for _ in range(repetitions):
                for choice, sample in samples.items():
                    us[choice].append(sample())
                last = {FIELDS[choice]: values[-1] for choice, values in us.items()}
                run.sample(work=work.name, **last)
            taken = us["triton"]
            seconds = median(taken) * 1e-6
            floor = max(work.bytes / memory, work.flops / product)
            rows[work.name] = {
                **{FIELDS[choice]: spread(values) for choice, values in us.items()},
                "gb_s": work.bytes / seconds / 1e9,
                "tflop_s": work.flops / seconds / 1e12,
                "share": floor / seconds,
                "speedup": paired(us["reference"], taken),
                "bytes": work.bytes,
                "flops": work.flops,
            }
            if "flash" in us:
                rows[work.name]["flash_speedup"] = paired(taken, us["flash"])
            progress.advance(task)
    return rows


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
    parser.add_argument("--only", choices=("verify", "kernels"), help="this part alone")
    options = parser.parse_args(arguments)
    if options.rehearse and options.json is not None and RESULTS in options.json.resolve().parents:
        parser.error("--json must not be in bench/results: a rehearsal measures nothing")
    if not (options.rehearse or torch.cuda.is_available()):
        parser.error("bench.gpu needs a CUDA device; --rehearse runs on the CPU")
    if options.json is None and not options.rehearse:
        options.json = default_path(machine()["device"], datetime.now(UTC).isoformat())
    run = Run("gpu", options, arguments)
    torch.set_num_threads(1)
    # A rehearsal's are any.
    memory, product = (1e10, 1e11) if options.rehearse else ceilings(options.quick)
    found: dict[str, Any] = {"kernels": {}, "cells": {}}
    if not options.rehearse and options.only != "verify":
        draw = Draw(torch.device("cuda"), torch.bfloat16, options.seed)
        chosen = list(works(draw, (1,) if options.quick else (1, 32)))
        found["kernels"] = measure_kernels(run, chosen, RUNS, memory, product)
    if options.only != "kernels":
        if options.rehearse:
            target, _ = padded_target(work_folder(options.work), REHEARSAL_VOCABULARY)
        else:
            options.model = options.model or LIKE
            target = Path(model_settings(options)["model"])
        found["cells"] = measure_verify(run, target, memory, product)
    found |= {"copy_gb_s": memory / 1e9, "matmul_tflop_s": product / 1e12}
    like = Path(options.model or "").name
    run.finish(RUNS, **found, like=like, rehearsal=options.rehearse)


if __name__ == "__main__":
    main()
