"""Prometheus metrics: ended requests, and the engine's state at the time of a scrape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.server.loop_turns import Buckets, TurnTimes

PREFIX = "overlap_spec:"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
HISTOGRAMS = {
    "time_to_first_token_seconds": "Until the first token.",
    "time_per_output_token_seconds": "After the first token.",
    "e2e_request_latency_seconds": "Until the last token.",
    "grammar_compile_seconds": "Until a request's grammar was compiled.",
}
# Counter → the figure of each request's statistics that it adds, and what it is.
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "cached_tokens": ("cached_tokens", "Tokens of prompts found in the cache."),
    "generation_tokens": ("output_tokens", "Tokens generated."),
    "spec_draft_tokens": ("drafted_tokens", "Tokens drafted and verified."),
    "spec_accepted_tokens": ("accepted_drafts", "Drafted tokens accepted."),
    "spec_grafted_tokens": ("grafted_tokens", "Drafted tokens that the grammar had forced."),
    "spec_accepted_grafted_tokens": (
        "accepted_grafts", "Drafted tokens that the grammar had forced, accepted."
    ),
    "spec_illegal_draft_tokens": (
        "illegal_drafts", "Drafted tokens that the grammar forbade, or their path."
    ),
    "spec_verifies": ("verifies", "Verify passes, counted for each request."),
}  # fmt: skip
# Gauge of the engine → the figure of its state, and what it is.
GAUGES = {
    "num_requests_running": ("running", "Running requests."),
    "num_requests_waiting": ("waiting", "Requests that wait for a batch slot or pages."),
    "num_requests_compiling": ("compiling", "Requests whose grammar is being compiled."),
    "kv_pages_in_use": ("pages_in_use", "Pages of the KV cache in use."),
    "kv_pages": ("pages", "Pages of the KV cache."),
    "kv_bytes": ("kv_bytes", "Memory of the KV cache."),
    "kv_touched_bytes": (
        "kv_touched_bytes",
        "Memory of the pages that were in use so far: on a CPU, what the cache has taken.",
    ),
    "state_bytes": ("state_bytes", "Memory of the states of layers without keys."),
    "engine_resident_bytes": ("rss_bytes", "Resident memory of the engine's process."),
}


@dataclass(frozen=True)
class FrontState:
    """What the HTTP process knows without asking the engine."""

    engine_up: bool = False
    engine_restarts: int = 0
    engine_silence_s: float = 0.0
    open_requests: int = 0
    resident_bytes: int = 0


class Metrics(Collector):
    """All metrics of one server.

    What has thousands of values a request is counted outside prometheus_client, which would take a
    microsecond for each. The engine's own counters restart at zero with it, as Prometheus allows.

    Attributes:
        snapshot: The engine's state at the last scrape.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = TurnTimes()
        self.itl, self.lengths = Buckets(SECONDS), Buckets(LENGTHS)
        self.snapshot: dict[str, Any] | None = None
        self._front = FrontState()
        self._verified_tokens = self._verifies = 0
        self.registry.register(self)
        self.histograms = {name: self._histogram(name, about) for name, about in HISTOGRAMS.items()}
        self.counters = {name: self._counter(name, about) for name, (_, about) in COUNTERS.items()}
        self.requests = self._counter("requests", "Ended requests.", ("finish_reason",))
        self.rejected = self._counter("requests_rejected", "Rejected HTTP requests.", ("status",))
        self.refused = self._counter(
            "connections_refused", "Connections closed because too many were open."
        )
        self.gone = self._counter("client_disconnects", "Clients that disconnected before the end.")

    @property
    def accept_length(self) -> float | None:
        """Mean tokens a verify emitted so far, bonus included; None before the first verify."""
        return self._verified_tokens / self._verifies if self._verifies else None

    def observe(self, handle: AsyncRequestHandle) -> None:
        """Count a request that has ended; one without an output counts as aborted."""
        output = handle.output
        if output is None:
            self.requests.labels("abort").inc()
            return
        stats = output.stats
        self.requests.labels(output.finish_reason).inc()
        for name, (figure, _) in COUNTERS.items():
            self.counters[name].inc(getattr(stats, figure))
        self._verified_tokens += stats.verified_tokens
        self._verifies += stats.verifies
        took_ms: dict[str, float] = {}
        if handle.request.grammar is not None:
            took_ms["grammar_compile_seconds"] = stats.grammar_compile_ms
        if stats.output_tokens:
            took_ms["time_to_first_token_seconds"] = stats.ttft_ms
            took_ms["e2e_request_latency_seconds"] = stats.end_to_end_ms
        if stats.output_tokens > 1:
            took_ms["time_per_output_token_seconds"] = stats.tpot_ms
        for name, ms in took_ms.items():
            self.histograms[name].observe(ms / 1e3)
        self.itl.add_all([gap_ms / 1e3 for gap_ms in stats.itl_ms])
        for drafts, count in enumerate(stats.accept_histogram):
            self.lengths.add(drafts + 1, count)

    def render(self, snapshot: dict[str, Any] | None, front: FrontState) -> bytes:
        """The text that Prometheus reads; ``snapshot`` is None while there is no engine."""
        self.snapshot, self._front = snapshot, front
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        front, turns = self._front, self.turns
        yield _buckets("inter_token_latency_seconds", "Between runs of tokens.", self.itl)
        about = "Tokens that a verify emitted, bonus included."
        yield _buckets("spec_accept_length", about, self.lengths)
        about = "Processor time of the event loop's turns."
        yield _buckets("front_turn_seconds", about, turns.took)
        about = "Processor time of the longest turn of the event loop."
        yield _gauge("front_turn_worst_seconds", about, turns.worst_s)
        about = "Wall-clock time of the longest turn of the event loop."
        yield _gauge("front_turn_worst_wall_seconds", about, turns.worst_wall_s)
        yield _gauge("engine_up", "Whether the engine accepts requests.", float(front.engine_up))
        yield _count("engine_restarts", "Restarts of the engine.", front.engine_restarts)
        about = "Time since the engine's last message."
        yield _gauge("engine_silence_seconds", about, front.engine_silence_s)
        yield _gauge("open_requests", "Requests that the server has open.", front.open_requests)
        about = "Resident memory of the HTTP process."
        yield _gauge("front_resident_bytes", about, front.resident_bytes)
        if self.snapshot is not None:
            yield from _engine(self.snapshot)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(PREFIX + name, about, registry=self.registry, buckets=SECONDS)

    def _counter(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self.registry)


def _engine(state: dict[str, Any]) -> Iterable[Metric]:
    """The engine's own figures."""
    for name, (key, about) in GAUGES.items():
        yield _gauge(name, about, float(state[key]))
    usage = state["pages_in_use"] / state["pages"]
    yield _gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", usage)
    if state["hidden_fraction"] is not None:
        about = "Share of grammar time hidden under verify, 0 to 1."
        yield _gauge("grammar_hidden_fraction", about, state["hidden_fraction"])
    yield _count("steps", "Steps of the engine.", state["steps"])
    yield _count("preemptions", "Preempted requests.", state["preemptions"])
    yield _count("grammar_seconds", "Time spent on masks and accepts.", state["grammar_ms"] / 1e3)
    yield _count(
        "grammar_exposed_seconds", "Time compute waited for masks.", state["exposed_ms"] / 1e3
    )
    about = "Time compute stood idle between steps that follow each other, for any reason."
    yield _count("compute_idle_seconds", about, state["idle_ms"] / 1e3)
    drafter = state["drafter"]
    yield _gauge("drafter_paused", "Whether drafts are off after a fault.", drafter["paused"])
    yield _count("drafter_faults", "How often the drafter was paused.", drafter["faults"])
    yield from _compiles(state["compiler"])
    yield from _tiers(state["speculation"])


def _buckets(name: str, about: str, found: Buckets) -> Metric:
    ends = [*(str(float(end)) for end in found.ends), "+Inf"]
    family = HistogramMetricFamily(PREFIX + name, about)
    family.add_metric([], list(zip(ends, accumulate(found.counts), strict=True)), found.sum)
    return family


def _compiles(compiler: dict[str, Any]) -> Iterable[Metric]:
    about = "Bytes of compiled grammars in the cache."
    yield _gauge("grammar_cache_bytes", about, compiler["cache_bytes"])
    yield _count("grammar_compiles", "Compiled grammars.", compiler["compiles"])
    yield _count("grammar_cache_hits", "Grammars found in the cache.", compiler["hits"])
    failures = CounterMetricFamily(
        f"{PREFIX}grammar_failures", "Grammars that failed to compile.", labels=["kind"]
    )
    for kind, count in compiler["failures"].items():
        failures.add_metric([kind], float(count))
    yield failures


def _tiers(speculation: dict[str, Any]) -> Iterable[Metric]:
    steps = GaugeMetricFamily(
        f"{PREFIX}spec_num_steps", "Draft steps by smallest batch size.", labels=["min_batch_size"]
    )
    for slot in speculation.get("slots", []):
        steps.add_metric([str(slot["min_batch_size"])], float(slot["steps"]))
    yield steps
    yield _count("spec_tier_switches", "Changes of the draft length.", speculation["switches"])
    active = speculation["active"]
    yield _gauge("spec_active_num_steps", "Draft steps of the last batch size.", active["steps"])
    yield _gauge("spec_active_nodes", "Nodes of a tree of the last batch size.", active["nodes"])
    lengths = GaugeMetricFamily(
        f"{PREFIX}spec_step_accept_length", "Tokens of a verify, bonus included.", labels=["kind"]
    )
    times = GaugeMetricFamily(f"{PREFIX}spec_step_seconds", "Time of a step.", labels=["kind"])
    for kind, figures in (("estimated", active), ("observed", speculation)):
        if figures[f"{kind}_accept_length"] is not None:
            lengths.add_metric([kind], figures[f"{kind}_accept_length"])
        if figures[f"{kind}_step_ms"] is not None:
            times.add_metric([kind], figures[f"{kind}_step_ms"] / 1e3)
    yield lengths
    yield times
    about = "Requests with a TPOT target that have ended."
    yield _count("tpot_slo_requests", about, speculation["tpot_requests"])
    about = "Of these, requests that kept it."
    yield _count("tpot_slo_attained", about, speculation["tpot_attained"])


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, about, value=value)


def _count(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, about, value=value)
