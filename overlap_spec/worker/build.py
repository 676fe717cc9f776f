"""From settings to a worker: device, types, weights, and caches sized to memory."""

from __future__ import annotations

import gc
import importlib
import os
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Drafter
from overlap_spec.drafters.registry import make_drafter
from overlap_spec.errors import ConfigError
from overlap_spec.models.config import ModelConfig, read_config
from overlap_spec.models.packing import pack
from overlap_spec.models.quantization import has_int4, pack_grids, quantize
from overlap_spec.models.shard import Shard
from overlap_spec.models.weights import load_decoder
from overlap_spec.parallel.group import Group, told
from overlap_spec.parallel.launch import Launch, launch
from overlap_spec.worker.cores import physical_cores
from overlap_spec.worker.cuda import CudaStreams
from overlap_spec.worker.cuda_graphs import CudaGraphs
from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.drafts import Drafts
from overlap_spec.worker.follower import Spans, follow
from overlap_spec.worker.kv_pool import KVPool
from overlap_spec.worker.lead import LeadWorker
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.recordings import Recordings
from overlap_spec.worker.site import check_quantization, count_threads, pick_device, pick_dtype
from overlap_spec.worker.state_pool import StatePool
from overlap_spec.worker.streams import CpuStreams, InlineStreams, RecordSpan, Streams
from overlap_spec.worker.tables import RowTables
from overlap_spec.worker.worker import Traits, Worker

CPU_CACHE_BYTES = 1 << 30
# What the processes of other ranks run.
RANK_MODULE = "overlap_spec.worker.rank"


class Room(NamedTuple):
    """What steps need beside what requests know: ``tokens``, slots after its committed length that
    a sequence owns; ``nodes``, the most that one pass of the target verifies."""

    tokens: int
    nodes: int


class Site(NamedTuple):
    """Where a worker is built, in which type of numbers, and with how much room."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    room: Room


def build_worker(config: EngineConfig, room: Room, streams: Streams, record: RecordSpan) -> Worker:
    """Load the models and allocate every table, cache and buffer; ``record`` takes spans for the
    timeline. ConfigError, CheckpointError: as in :class:`overlap_spec.engine.Engine`."""
    site = site_of(config, room)
    if config.quantization is not None:
        check_quantization(config.quantization, site.device)
    try:
        if config.tensor_parallel_size > 1:
            return _build_lead(site, streams, record)
        return Worker(*_build_parts(site, streams), streams, config, record)
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
        parts = _build_parts(site, streams, group)
        return LeadWorker(*parts, streams, config, record, group, processes)
    except BaseException:
        if processes is not None:
            processes.give_up("rank 0 could not be built")
            processes.close(lambda: None)
        raise


def run_follower(launched: Launch) -> None:
    """Build the worker of a rank other than 0 as rank 0 says, and follow it to its end."""
    settings, room = told(launched.store)
    config, spans = EngineConfig(**settings), Spans()
    if config.device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", launched.shard.rank))
        torch.cuda.set_device(index)
        config = replace(config, device=f"cuda:{index}")
    site, streams = site_of(config, Room(*room)), build_streams(config, spans.record)
    group = Group(launched, site.device)
    parts = _build_parts(site, streams, group)
    follow(Worker(*parts, streams, config, spans.record), group, spans)


def _build_parts(site: Site, streams: Streams, group: Group | None = None) -> tuple[Phases, Traits]:
    """What a worker computes, over its models, tables and caches; with a ``group`` over one rank's
    part of the target. Built by compute, whose thread does all torch's parallel work
    (:func:`host_zeros`)."""
    if group is not None:
        # The ranks' sums must come in one order.
        streams.join_prefill()
    built = streams.event()
    loaded = streams.compute.run("load", _load, site, group)
    streams.compute.record(built)
    built.synchronize()
    runner, config = loaded.get(), site.config
    # What drafts in all ranks must not fail in one.
    together = group is not None and runner.drafter is not None and not runner.drafter.host
    guard = DrafterGuard(config.drafter, fatal=together)
    drafts = Drafts(runner, coupled=not config.by_threshold)
    phases = Phases(recordings_of(drafts, guard, config.graphs), config)
    if runner.device.type == "cuda":
        # Weights, caches and tables were written on a stream that ours do not wait for.
        torch.cuda.synchronize(runner.device)
        # What earlier engines left would be counted as the graphs'.
        gc.collect()
        torch.cuda.empty_cache()
    return phases, traits_of(phases)


def recordings_of(drafts: Drafts, guard: DrafterGuard, recorded: bool) -> Recordings:
    """How the passes are recorded, if they are to be."""
    if recorded and drafts.runner.device.type == "cuda":
        return CudaGraphs(drafts, guard)
    return Recordings(drafts, guard, recorded)


def traits_of(phases: Phases) -> Traits:
    """Those of a worker that has all of the model."""
    runner, rule, states = phases.runner, phases.rule, phases.runner.states
    on_gpu, proposer = runner.device.type == "cuda", runner.proposer
    return Traits(
        context_length=runner.target.config.max_position,
        pages=runner.pool.k.shape[1],
        page_bytes=sum(cache.page_bytes for cache in runner.caches),
        state_bytes=0 if states is None else states.bytes,
        state_slots=None if states is None else states.kept_slots,
        on_gpu=on_gpu,
        compiles=on_gpu,
        drafts_on_host=proposer is not None and proposer.behind is None,
        guided=proposer is not None and proposer.guided,
        reads_states=runner.reads_states,
        stops_drafts=runner.stepwise and phases.stop is not None,
        verifies_ahead=on_gpu,
        asks_thinking=rule is not None and rule.asks_thinking,
    )


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
    taken, written, states = 0, 0, None
    if target.config.delta is not None:
        kept = rows if config.prefix_cache else 0
        states = StatePool(target.config.delta, rows, kept, dtype, device)
        taken, written = states.bytes, states.node_bytes
    if config.graphs and device.type == "cuda":
        taken += graph_bytes(target.config, features, room.nodes, dtype, written)
    pages = count_pages(config, page_bytes, rows * tables.pages.shape[1], device, taken)
    if group is not None:
        pages = group.least("pages", pages)
    for cache in (pool, *draft_pools):
        cache.allocate(pages)
    if states is not None:
        states.allocate()
    if adapters is not None:
        adapters.allocate(rows + 1, pages, device)
    return ModelRunner(target, drafter, tables, pool, draft_pools, states, adapters)


def build_streams(config: EngineConfig, record: RecordSpan) -> Streams:
    """CUDA's streams on a GPU; on the CPU threads, or none of them in the serial mode."""
    device = pick_device(config.device)
    if device.type == "cuda":
        return CudaStreams(device, record)
    threads = count_threads(config, device)
    if config.overlap == "none":
        return InlineStreams(record, threads)
    # Threads of torch's own already take all cores where they are as many.
    return CpuStreams(record, threads, prefill=threads < physical_cores())


def graph_bytes(
    target: ModelConfig, features: int, nodes: int, dtype: torch.dtype, written: int = 0
) -> int:
    """What the CUDA graphs take of the GPU, but for what the driver keeps of each.

    They write to one place, of the size of the largest pass: ``nodes`` logits and features, and
    ``written`` bytes each to states. Their pool has these once more, and the pass's activations.
    """
    outputs = target.vocab_size + features * target.hidden_size
    # Of a layer: its residual, norms, queries, keys, values, attention; and the MLP's parts.
    activations = 8 * target.hidden_size + 3 * target.intermediate_size
    return nodes * ((2 * outputs + activations) * dtype.itemsize + 2 * written)


def count_pages(
    config: EngineConfig, page_bytes: int, wanted: int, device: torch.device, taken: int = 0
) -> int:
    """Pages that all caches get: at most ``wanted``, as memory allows.

    On a GPU ``mem_fraction_static`` (default 0.85) of its memory holds weights and caches; on the
    CPU the caches get that share of physical memory, or 1 GiB where none is set.

    Args:
        page_bytes: What a page takes in all caches together.
        taken: Bytes that others will take, out of the same share.

    Raises:
        ConfigError: memory holds not even one sequence's pages.
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
        budget = int(physical * fraction) - taken
    else:
        budget = CPU_CACHE_BYTES
    if config.max_total_tokens is not None:
        wanted = min(wanted, config.max_total_tokens // config.page_size)
    pages = min(budget // page_bytes, wanted) + 1
    if pages < 3:
        raise ConfigError(
            f"the KV cache gets {max(budget, 0)} bytes, and a page takes {page_bytes}: "
            "raise mem_fraction_static or max_total_tokens, or lower max_running_requests"
        )
    return pages
