"""An engine from its settings: the one place that knows how its parts fit together."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace

from overlap_spec.config import EngineConfig
from overlap_spec.engine.budgets import Budgets
from overlap_spec.engine.core import EngineCore
from overlap_spec.engine.grammar_drafts import GrammarDrafts
from overlap_spec.engine.start_up import batches, preparation, warm_up, with_wide
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.compile import GrammarCompiler
from overlap_spec.grammar.drafting.forced import ForcedRuns
from overlap_spec.grammar.isolation.limits import CompileLimits
from overlap_spec.grammar.matching.pool import MatcherPool
from overlap_spec.memory import MemoryCeiling
from overlap_spec.models.config import read_config
from overlap_spec.scheduler.scheduler import Scheduler
from overlap_spec.speculation.presets import nearest_tier, policy_of
from overlap_spec.steps import RUN_TOKENS
from overlap_spec.timeline import Timeline
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.worker.build import Room, build_streams, build_worker
from overlap_spec.worker.site import overlap_mode

# Prompt tokens of a step, if nobody says: running requests wait for them. A CPU computes longer
# chunks no faster, token by token.
GPU_CHUNK_TOKENS, CPU_CHUNK_TOKENS = 1024, 256


def build(config: EngineConfig) -> tuple[Tokenizer, EngineCore, GrammarCompiler, Iterator[bool]]:
    """The model's tokenizer, the engine's core, ready for its first step, what compiles its
    grammars, and its :func:`preparation`; raises as :class:`overlap_spec.engine.Engine`."""
    tokenizer = Tokenizer(config.target_path, read_config(config.target_path).vocab_size)
    backend, isolated = load(config.grammar_backend)(tokenizer.vocabulary), config.grammar_isolated
    limits = CompileLimits(
        time_s=config.grammar_compile_timeout_s, memory_bytes=config.grammar_compile_memory_bytes
    )
    compiler = GrammarCompiler(
        backend, config.grammar_cache_bytes, isolated=isolated, limits=limits
    )
    # Its processes start while the weights are read.
    compiler.warm()
    try:
        core = _core(config, tokenizer)
        traits, pages = core.worker.traits, core.scheduler.allocator
        # How much is left to grammars is known, now that the rest is there. Pages take their memory
        # when they are first written.
        untouched = traits.state_bytes + (pages.total - pages.touched) * traits.page_bytes
        compiler.ceiling = MemoryCeiling.beside(
            config.memory_limit_bytes, 0 if traits.on_gpu else untouched
        )
    except BaseException:
        compiler.close()
        raise
    compiler.makes_states = traits.reads_states or traits.guided
    # Else the collector of reference cycles goes over what all imports brought under an early
    # request, which waits for 0.2 s.
    gc.collect()
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

    vocabulary = tokenizer.vocabulary
    forced = None
    if drafts:
        # A drafter that reads states keeps to what is forced by itself.
        known = vocabulary, tokenizer.encode, RUN_TOKENS
        forced = ForcedRuns(*known, weighed=traits.reads_states)
    pool = MatcherPool(lanes, config.mask_deadline_ms, config.mask_timeout_s, forced)
    told = GrammarDrafts(worker, pool, vocabulary)
    scheduler = Scheduler(
        pages=traits.pages,
        page_size=config.page_size,
        max_rows=config.max_running_requests,
        chunk_tokens=chunk_tokens,
        reserve_tokens=wider if widens else reserve,
        assign=told.enter,
        reuse=config.prefix_cache,
        state_slots=traits.state_slots,
    )
    fixed = nearest_tier(config, tiers)
    budgets = Budgets(policy, fixed, worker.guard, told, widens, config.tpot_slo_ms)
    core = EngineCore(config, worker, scheduler, budgets, pool, timeline)
    warm_up(core, chunk_tokens, load_s)
    return core


def reserve_tokens(window_tokens: int) -> int:
    """Slots that a running sequence owns after its committed length: twice the draft window, since
    the host may be one step behind, and one for the draft cache's slot of the newest token."""
    return 2 * window_tokens + 1
