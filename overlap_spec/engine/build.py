"""An engine from its settings: the one place that knows how its parts fit together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from overlap_spec.config import EngineConfig
from overlap_spec.engine.budgets import Budgets
from overlap_spec.engine.core import EngineCore
from overlap_spec.engine.cost_model import cost_model, tier_costs
from overlap_spec.engine.grammar_drafts import GrammarDrafts, wide_tier
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.compile import GrammarCompiler
from overlap_spec.grammar.drafting.forced import ForcedRuns
from overlap_spec.grammar.isolation.limits import CompileLimits
from overlap_spec.grammar.matching.pool import MatcherPool
from overlap_spec.memory import MemoryCeiling, machine_bytes, rss_bytes
from overlap_spec.models.config import read_config
from overlap_spec.scheduler.scheduler import Scheduler
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.speculation.policy import LengthPolicy, RequestView, StepView
from overlap_spec.speculation.presets import nearest_tier, policy_of
from overlap_spec.steps import RUN_TOKENS
from overlap_spec.tiers import Tier
from overlap_spec.timeline import Timeline
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.worker.build import Room, build_streams, build_worker
from overlap_spec.worker.graphs import graph_size
from overlap_spec.worker.site import overlap_mode
from overlap_spec.worker.warm_up import prepare, prepare_next, warm_up

# Prompt tokens of a step, if nobody says: running requests wait for them. A CPU computes longer
# chunks no faster, token by token.
GPU_CHUNK_TOKENS, CPU_CHUNK_TOKENS = 1024, 256


def build(config: EngineConfig) -> tuple[Tokenizer, EngineCore, GrammarCompiler, Iterator[bool]]:
    """The model's tokenizer, the engine's core, ready for its first step, what compiles its
    grammars, and its :func:`preparation`.

    Raises:
        ConfigError, CheckpointError: as :class:`overlap_spec.engine.Engine`.
    """
    tokenizer = Tokenizer(config.target_path, read_config(config.target_path).vocab_size)
    compiler = GrammarCompiler(
        load(config.grammar_backend)(tokenizer.vocabulary),
        config.grammar_cache_bytes,
        isolated=config.grammar_isolated,
        limits=CompileLimits(
            time_s=config.grammar_compile_timeout_s,
            memory_bytes=config.grammar_compile_memory_bytes,
        ),
    )
    # Its processes start while the weights are read.
    compiler.warm()
    try:
        core = _core(config, tokenizer)
        # How much is left to grammars is known, now that the rest is there.
        compiler.ceiling = _ceiling(config.memory_limit_bytes, core)
    except BaseException:
        compiler.close()
        raise
    traits = core.worker.traits
    compiler.makes_states = traits.reads_states or traits.guided
    return tokenizer, core, compiler, preparation(core)


def _core(config: EngineConfig, tokenizer: Tokenizer) -> EngineCore:
    # A mode that was not asked for keeps its lane: only there a matcher's time has a bound.
    lanes = config.lanes
    config = replace(config, overlap=overlap_mode(config))
    policy, timeline = policy_of(config), Timeline()
    tiers = policy.tiers
    # Of tiers with room for what the grammar tells, beside the policy's own.
    reserve = reserve_tokens(max(tier.window_tokens for tier in tiers))
    wider = reserve_tokens(max(tier.window_tokens for tier in with_wide(tiers)))

    start = time.perf_counter()
    streams = build_streams(config, timeline.record)
    verified = max(n * tier.nodes for tier, n in batches(config, policy, with_wide(tiers)).items())
    worker = build_worker(config, Room(wider, verified), streams, timeline.record)
    load_s, traits, drafts = time.perf_counter() - start, worker.traits, config.drafter != "none"
    usual = GPU_CHUNK_TOKENS if traits.on_gpu else CPU_CHUNK_TOKENS
    chunk_tokens = config.chunked_prefill_size or max(usual, config.page_size)
    # The slots that wide tiers need are at most half of all.
    fits = config.max_running_requests * wider <= traits.pages * config.page_size // 2
    widens = drafts and fits and (traits.on_gpu if config.tries is None else config.tries)

    vocabulary, forced = tokenizer.vocabulary, None
    if drafts:
        weighed = traits.reads_states
        forced = ForcedRuns(vocabulary, tokenizer.encode, RUN_TOKENS, weighed=weighed)
    pool = MatcherPool(lanes, config.mask_deadline_ms, config.mask_timeout_s, forced)
    told = GrammarDrafts(worker, pool, vocabulary) if drafts else None

    def assign(sequence: Sequence) -> None:
        if told is not None:
            told.enter(sequence)
        worker.assign(sequence.row, sequence.request, sequence.output_ids)

    scheduler = Scheduler(
        pages=traits.pages,
        page_size=config.page_size,
        max_rows=config.max_running_requests,
        chunk_tokens=chunk_tokens,
        reserve_tokens=wider if widens else reserve,
        assign=assign,
        reuse=config.prefix_cache,
        state_slots=traits.state_slots,
    )
    fixed = nearest_tier(config, tiers)
    budgets = Budgets(policy, fixed, worker.guard, told, widens, config.tpot_slo_ms)
    core = EngineCore(config, worker, scheduler, budgets, pool, timeline)
    _warm_up(core, chunk_tokens, load_s)
    return core


def _warm_up(core: EngineCore, chunk_tokens: int, load_s: float) -> None:
    """Compile, measure and record what the first steps want."""
    config, worker, policy = core.config, core.worker, core.budgets.policy
    tiers = policy.tiers
    taken = with_wide(tiers) if core.budgets.widens else tiers
    policy.tell_waits(worker.recordings.wait_ms)
    # A wide tier's drafts are the grammar's too: its budget has no stop.
    if worker.traits.stops_drafts and not core.budgets.widens:
        policy.let_stop()
    if worker.traits.compiles:
        worker.buffers.reserve(taken)
        worker.do(warm_up, batches(config, policy, taken), chunk_tokens)
        worker.rest()
    if policy.weighs_cost:
        policy.calibrate(*cost_model(worker, nearest_tier(config, tiers), load_s))
    worker.do(prepare, policy.choose(StepView((RequestView(0, 1),))).tier)


def with_wide(tiers: Iterable[Tier]) -> tuple[Tier, ...]:
    """These tiers, and those with room for what the grammar tells that steps may take instead."""
    own = tuple(tiers)
    return own + tuple(wide_tier(tier) for tier in own if tier.steps)


def batches(config: EngineConfig, policy: LengthPolicy, tiers: Iterable[Tier]) -> dict[Tier, int]:
    """The most trees of each tier that a step has, padding included."""
    rows, fixed, found = config.max_running_requests, nearest_tier(config, policy.tiers), {}
    for tier in tiers:
        # Where the policy fails, all steps may take one of its tiers.
        most = rows if tier.own == fixed else policy.largest_batch(tier.own) or rows
        found[tier] = graph_size(min(most, rows))
    return found


def _ceiling(most_bytes: int | None, core: EngineCore) -> MemoryCeiling:
    """The ceiling of this process, in which ``core`` has been loaded.

    Raises:
        ConfigError: the engine takes more than that by itself.
    """
    state, rest = core.snapshot(), rss_bytes()
    if not core.worker.traits.on_gpu:
        # Pages take their memory when they are first written.
        rest += state["kv_bytes"] - state["kv_touched_bytes"] + state["state_bytes"]
    if most_bytes is None:
        # Most is left to the machine's other processes, compile workers among them.
        most_bytes = rest + max(0, machine_bytes() - rest) // 4
    elif most_bytes < rest:
        raise ConfigError(
            f"memory_limit_bytes is {most_bytes}, and the engine takes {rest} by itself, its whole "
            "KV cache included: set more, or lower max_total_tokens"
        )
    return MemoryCeiling(most_bytes)


def reserve_tokens(window_tokens: int) -> int:
    """Slots that a running sequence owns after its committed length.

    Twice the draft window, since the host may be one step behind, and one for the draft cache's
    slot of the newest token.
    """
    return 2 * window_tokens + 1


def preparation(core: EngineCore) -> Iterator[bool]:
    """Records what tiers lack, lest their first step wait for that (0.1 s and more), and measures
    them all before the first request: one thing at a time, while no request runs.

    Yields:
        Whether there was something to do.
    """
    worker, measures = core.worker, core.budgets.policy.weighs_cost
    while True:
        tiers = core.budgets.policy.tiers
        made = worker.do(prepare_next, tiers)
        worker.rest()
        # To measure is to write to pages.
        asked = not made.get() and measures and not core.scheduler.allocator.touched
        if asked:
            measures = False
            found = tier_costs(worker, nearest_tier(core.config, tiers), tiers)
            if found is not None:
                core.budgets.policy.calibrate(*found)
        yield asked or made.get()
