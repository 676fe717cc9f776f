"""From settings to a worker: device, types, weights, and caches sized to memory."""

from __future__ import annotations

import gc
import importlib
import os
import platform
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from overlap_spec.config import AUTO_MODE, EngineConfig
from overlap_spec.drafters.base import Drafter
from overlap_spec.drafters.registry import make_drafter
from overlap_spec.errors import ConfigError
from overlap_spec.kernels import cpu
from overlap_spec.models.config import ModelConfig, read_config, read_json
from overlap_spec.models.packing import pack
from overlap_spec.models.quantization import has_int4, has_int8, pack_grids, quantize
from overlap_spec.models.shard import Shard
from overlap_spec.models.tensors import parameter_count
from overlap_spec.models.weights import load_decoder
from overlap_spec.parallel.group import Group, told
from overlap_spec.parallel.launch import Launch, launch
from overlap_spec.worker.cores import physical_cores, pick_float, pick_threads
from overlap_spec.worker.cuda import CudaStreams
from overlap_spec.worker.follower import Spans, follow
from overlap_spec.worker.kv_pool import KVPool
from overlap_spec.worker.lead import LeadWorker
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.streams import (
    CpuStreams,
    InlineStreams,
    RecordSpan,
    Streams,
)
from overlap_spec.worker.tables import RowTables
from overlap_spec.worker.worker import Worker

CPU_CACHE_BYTES = 1 << 30
# What the processes of other ranks run.
RANK_MODULE = "overlap_spec.worker.rank"


class Room(NamedTuple):
    """What a worker's steps need beside what its requests know.

    Attributes:
        tokens: Slots after its committed length that a sequence owns.
        nodes: The most that one pass of the target verifies.
    """

    tokens: int
    nodes: int


class Site(NamedTuple):
    """What is built of some settings: where, in which type of numbers, and with how much room."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    room: Room


def build_worker(config: EngineConfig, room: Room, streams: Streams, record: RecordSpan) -> Worker:
    """Load the models and allocate every table, cache and buffer.

    Args:
        room: What the caches leave free.
        record: Takes spans for the timeline.

    Raises:
        ConfigError, CheckpointError: as in :class:`overlap_spec.engine.Engine`.
    """
    site = site_of(config, room)
    if config.quantization is not None:
        check_quantization(config.quantization, site.device)
    try:
        if config.tensor_parallel_size > 1:
            return _build_lead(site, streams, record)
        return Worker(_build_runner(site, streams, None), streams, config, record)
    except BaseException:
        streams.close()
        raise


def site_of(config: EngineConfig, room: Room) -> Site:
    """Where a worker of these settings is built."""
    device = pick_device(config.device)
    return Site(config, device, pick_dtype(config, device), room)


def _build_lead(site: Site, streams: Streams, record: RecordSpan) -> Worker:
    """Rank 0's worker, and the other ranks' processes; in a rank that torchrun has started, that
    rank's whole work, after which the process ends."""
    config, device = site.config, site.device
    size = config.tensor_parallel_size
    replace(read_config(config.target_path), shard=Shard(0, size)).check_shard()
    launched = launch(size, RANK_MODULE)
    if launched.shard.rank:
        streams.close()
        run_follower(launched)
        raise SystemExit(0)
    processes = launched.processes
    try:
        # What each would choose by itself must be the same in all.
        threads = count_threads(config, device) if device.type == "cpu" else None
        name = str(site.dtype).removeprefix("torch.")
        same = replace(config, device=device.type, dtype=name, threads=threads)
        group = Group(launched, device, (asdict(same), site.room))
        runner = _build_runner(site, streams, group)
        return LeadWorker(runner, streams, config, record, group, processes)
    except BaseException:
        if processes is not None:
            processes.give_up("rank 0 could not be built")
            processes.close(lambda: None)
        raise


def run_follower(launched: Launch) -> None:
    """Build the worker of a rank other than 0 as rank 0 says, and follow it to its end."""
    settings, room = told(launched.store)
    config, room = EngineConfig(**settings), Room(*room)
    if config.device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", launched.shard.rank))
        torch.cuda.set_device(index)
        config = replace(config, device=f"cuda:{index}")
    site, spans = site_of(config, room), Spans()
    streams = build_streams(config, spans.record)
    group = Group(launched, site.device)
    runner = _build_runner(site, streams, group)
    follow(Worker(runner, streams, config, spans.record), group, spans)


def _build_runner(site: Site, streams: Streams, group: Group | None) -> ModelRunner:
    """Models, tables and caches; with a ``group`` one rank's part of the target.

    By compute, in whose thread all torch's work in parallel is done: see :func:`host_zeros`.
    """
    built = streams.event()
    runner = streams.compute.run("load", _load, site, group)
    streams.compute.record(built)
    built.synchronize()
    return runner.get()


@torch.inference_mode(False)
def _load(site: Site, group: Group | None) -> ModelRunner:
    config, device, dtype, room = site
    rows = config.max_running_requests
    if device.type == "cuda":
        # Float32 output must not depend on the device.
        torch.backends.cuda.matmul.allow_tf32 = False
    # A type that is asked for holds for all weights.
    keep_int4 = device.type == "cpu" and group is None and config.dtype == "auto" and has_int4()
    target = load_decoder(
        config.target_path, dtype, device, config.context_length, group, keep_int4
    )
    adapters: Any = None
    if config.adapters:
        # Its file is optional.
        lora = importlib.import_module("overlap_spec.models.lora")
        adapters = lora.load_adapters(target, config.adapters)
    longest = target.config.max_position + room.tokens
    tables = RowTables(rows, -(-longest // config.page_size), target.config.vocab_size, device)
    pool = KVPool(target.config, config.page_size, dtype, device)
    draft_pools: list[KVPool] = []

    def make_cache(layers: ModelConfig, first: int = 0) -> KVPool:
        draft_pools.append(KVPool(layers, config.page_size, dtype, device, first))
        return draft_pools[-1]

    drafter: Drafter | None = None
    if config.drafter != "none":
        drafter = make_drafter(config, target, tables, make_cache)
    if device.type == "cpu":
        models = [model for model in (target, drafter) if model is not None]
        if config.quantization is not None:
            quantize(models, config.quantization)
        for model in models:
            pack_grids(model)
            pack(model)
    features = len(drafter.feature_layers) if drafter is not None else 0
    page_bytes = sum(cache.page_bytes for cache in (pool, *draft_pools))
    # The feature that each page keeps for the drafter.
    page_bytes += features * target.config.hidden_size * dtype.itemsize
    taken = 0
    if config.graphs and device.type == "cuda":
        taken = graph_bytes(target.config, features, room.nodes, dtype)
    pages = count_pages(config, page_bytes, rows * tables.pages.shape[1], device, taken)
    if group is not None:
        pages = group.least("pages", pages)
    for cache in (pool, *draft_pools):
        cache.allocate(pages)
    if adapters is not None:
        adapters.allocate(rows + 1, pages, device)
    return ModelRunner(target, drafter, tables, pool, draft_pools, adapters)


def build_streams(config: EngineConfig, record: RecordSpan) -> Streams:
    """CUDA's streams on a GPU; on the CPU threads, or none of them in the serial mode. Of several
    ranks, whose sums must come in one order, prefill is compute."""
    device, alone = pick_device(config.device), config.tensor_parallel_size == 1
    if device.type == "cuda":
        streams = CudaStreams(device, record)
        if not alone:
            streams.prefill = streams.compute
        return streams
    threads = count_threads(config, device)
    if config.overlap == "none":
        return InlineStreams(record, threads)
    # Threads of torch's own already take all cores where they are as many.
    spare = alone and threads < physical_cores()
    return CpuStreams(record, threads, prefill=spare)


def overlap_mode(config: EngineConfig) -> str:
    """The mode of a config, ``auto`` resolved: serial where a CPU's passes take all cores, since
    there is nothing then for the host and the lane to run beside them on (a batch whose requests
    end is verified for those once more besides)."""
    if config.overlap != AUTO_MODE:
        return config.overlap
    device = pick_device(config.device)
    if device.type == "cpu" and count_threads(config, device) >= physical_cores():
        return "none"
    return "once-sync"


def count_threads(config: EngineConfig, device: torch.device) -> int:
    """Threads of torch for each stream of the CPU."""
    stored = torch.int8 if config.quantization else pick_dtype(config, device)
    size, ranks = weight_bytes(config, stored), config.tensor_parallel_size
    if config.quantization == "int4":
        size //= 2
    return pick_threads(config.threads, size // ranks, ranks)


def machine_key(config: EngineConfig) -> dict[str, Any]:
    """What the time of a pass depends on, as plain data: model, drafter, device, dtype, threads."""
    device = pick_device(config.device)
    dtype = pick_dtype(config, device)
    threads = 0
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = count_threads(config, device)
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        name += f", {physical_cores()} cores"
    paths = {"model": config.target_path, "draft": config.draft_path}
    shapes = {
        what: read_json(path / "config.json") if path is not None else None
        for what, path in paths.items()
    }
    return {
        **shapes,
        "drafter": config.drafter,
        "device": name,
        "dtype": config.quantization or str(dtype),
        "threads": threads,
        "graphs": config.graphs,
        **({"kernels": "native"} if device.type == "cpu" and cpu.native() else {}),
        **({"ranks": config.tensor_parallel_size} if config.tensor_parallel_size > 1 else {}),
    }


def weight_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of the target's weights in ``dtype``."""
    return parameter_count(config.target_path) * dtype.itemsize


def check_quantization(name: str, device: torch.device) -> None:
    """Raise ConfigError where weights cannot be quantised."""
    if device.type != "cpu":
        raise ConfigError(f"quantization {name!r} is for the CPU alone: set device to cpu")
    if name == "int4" and not has_int4():
        raise ConfigError(
            f"quantization {name!r} needs a processor with AVX2 and a C++ compiler (g++, or $CXX)"
        )
    if not has_int8():
        raise ConfigError(
            f"quantization {name!r} needs a processor with AVX512-VNNI, or with AVX2 and a C++ "
            "compiler (g++, or $CXX)"
        )


def pick_device(name: str) -> torch.device:
    """The device of a setting; ConfigError where it does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known: use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this torch sees no CUDA device")
    return device


def pick_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The type of weights, caches and activations."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    hf = read_json(config.target_path / "config.json")
    name = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    stored = {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)
    if device.type == "cpu":
        return pick_float(stored, parameter_count(config.target_path))
    return stored


def graph_bytes(target: ModelConfig, features: int, nodes: int, dtype: torch.dtype) -> int:
    """What the CUDA graphs take of the GPU, but for what the driver keeps of each.

    They write to one place, of the size of the largest pass: ``nodes`` logits and features. In the
    pool that they share are these once more, as the pass itself has them, and its activations.
    """
    outputs = target.vocab_size + features * target.hidden_size
    # Of a layer: its residual, norms, queries, keys, values, attention; and the MLP's parts.
    activations = 8 * target.hidden_size + 3 * target.intermediate_size
    return nodes * (2 * outputs + activations) * dtype.itemsize


def count_pages(
    config: EngineConfig, page_bytes: int, wanted: int, device: torch.device, taken: int = 0
) -> int:
    """Pages that all caches get: at most ``wanted``, as memory allows.

    On a GPU ``mem_fraction_static`` (default 0.85) of its memory holds weights and caches; on the
    CPU the caches get that share of physical memory, or 1 GiB where none is set.

    Args:
        page_bytes: What a page takes in all caches together.
        taken: Bytes of a GPU that others will take, out of the same share.

    Raises:
        ConfigError: memory does not hold even one sequence's pages.
    """
    fraction = config.mem_fraction_static
    if device.type == "cuda":
        # What closed engines and loading left counts as taken while torch holds it.
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - total * (1 - (fraction or 0.85))) - taken
    elif fraction is not None:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        budget = int(physical * fraction)
    else:
        budget = CPU_CACHE_BYTES
    if config.max_total_tokens is not None:
        wanted = min(wanted, config.max_total_tokens // config.page_size)
    pages = min(budget // page_bytes, wanted) + 1
    if pages < 3:
        raise ConfigError(
            f"the KV cache gets {budget} bytes, and a page takes {page_bytes}: "
            "raise mem_fraction_static or max_total_tokens"
        )
    return pages
