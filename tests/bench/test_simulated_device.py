"""The device that is a table: what it waits for follows from the table and the host's clock."""

from collections.abc import Callable
from typing import Any

import pytest

from bench import simulated_device
from bench.device_model import COPY_US, LAUNCH_US, Device, HostClock, Oracle, TableStreams
from bench.simulated_device import simulated, summary
from bench.workloads import Ask
from overlap_spec.grammar.matching.pool import FillItem, MatcherPool
from overlap_spec.grammar.spec import Grammar

SLOW = Device({1: 9000}, {1: 1000}, {1: 100}, {1: 300}, {1: 5000})
PROMPT = "abc"
SAID = ("abcdef" * 7)[:40]
CODE = Grammar.regex("[a-f]{40}")


class Hand:
    """A host's clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def streams_of(hand: Callable[[], int]) -> TableStreams:
    return TableStreams(SLOW, lambda *_: None, HostClock(hand))


def test_work_begins_when_it_is_queued_and_what_it_waits_for_has_passed() -> None:
    hand = Hand()
    streams = streams_of(hand)
    first, uploaded, last = (streams.event() for _ in range(3))
    streams.compute.record(first)
    streams.plan.run("upload", int)
    streams.plan.record(uploaded)
    assert uploaded.time_ns == COPY_US * 1e3
    streams.compute.wait(uploaded)
    # A pass without a table's time: 10 us, as its launch.
    streams.compute.run("other", int)
    streams.compute.record(last)
    assert last.time_ns == 20_000
    # It stood idle until it was launched.
    assert first.idle_ms(last) == pytest.approx(0.010)
    assert streams.clock.waited_ns == 0
    last.synchronize()
    assert streams.clock.now() == 20_000
    assert streams.clock.waited_ns == 10_000
    hand.ns += 50_000
    streams.compute.run("other", int)
    streams.compute.record(uploaded)
    assert last.idle_ms(uploaded) == pytest.approx(0.060)
    last.reset()
    with pytest.raises(RuntimeError, match="never recorded"):
        streams.compute.wait(last)


def test_what_the_simulation_computes_takes_the_host_a_launch() -> None:
    hand = Hand()
    streams = streams_of(hand)

    def compute() -> None:
        hand.ns += 10**9

    streams.compute.run("verify", compute)
    assert streams.clock.now() == LAUNCH_US["verify"] * 1e3
    # What a plan takes to pack is the host's own.
    streams.plan.run("upload", compute)
    assert streams.clock.now() == LAUNCH_US["verify"] * 1e3 + 10**9


def window(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, grammar_ms: float, **more: Any
) -> Any:
    """Of a request whose grammar takes so long a step, on a host that takes no time else."""
    hand = Hand()
    monkeypatch.setattr("bench.device_model.HostClock.__init__.__defaults__", (hand,))
    fixed = {"adaptive": "static", "mask_deadline_ms": None}
    monkeypatch.setattr(simulated_device, "SETTINGS", fixed)
    oracle = Oracle({}, 1.0)
    settings = {**tiny, "lane_threads": 0, "threads": 1, "max_total_tokens": 4096, **more}
    weights = {name: settings.pop(name) for name in ("model", "draft")}
    with simulated(weights, SLOW, oracle, **settings) as side:
        ask = Ask(PROMPT, CODE, 40)
        tokenizer = side.engine.tokenizer
        said = [*tokenizer.encode(SAID), min(tokenizer.eos_ids)]
        oracle.tell({simulated_device.prompt_ids(side.engine, ask): said})
        pool = side.engine.core.grammar.pool

        def slow(calls: Any) -> None:
            hand.ns += int(grammar_ms * 1e6) * any(isinstance(c, FillItem) for c in calls)
            MatcherPool.run(pool, calls)

        pool.run = side.shared(slow)  # type: ignore[method-assign]
        found = side.run([ask])
        assert found is not None
        return found


@pytest.mark.parametrize("mode", ["once-sync", "double-sync", "none"])
def test_a_grammar_is_exposed_by_what_it_takes_beyond_verify(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    quick, slow = (window(tiny, monkeypatch, ms, overlap=mode) for ms in (2.0, 15.0))
    for found in (quick, slow):
        # All drafts are right: 40 tokens, the first of which a prefill gives.
        assert found["tokens"] / found["steps"] > 5
    idle = [found["idle_ms"] / found["steps"] for found in (quick, slow)]
    if mode == "none":
        assert idle[0] > 1.5
    else:
        # Nothing of 2 ms shows under a verify of 9 ms, some 6 of 15 do.
        assert idle[0] < 0.2
        assert 4 < idle[1] < 7


def test_a_summary_is_of_its_samples() -> None:
    figures = dict.fromkeys(
        ("tokens_s", "accept_length", "idle_share", "exposed_share", "grammar_ms", "host_ms"), 2.0
    )
    samples: list[dict[str, Any]] = [
        {"device": "d", "kind": kind, "batch": 1, "mode": "once-sync", "step_ms": ms, **figures}
        for kind, ms in (("json", 5.0), ("json", 5.0), ("free", 4.0))
    ]
    found = summary(samples)
    assert found["devices"]["d"]["json"]["1"]["once-sync"]["step_ms"] == 5.0
    assert found["under_grammar"] == {"d": {"1": {"tokens_s": 1.0, "at_equal_length": 0.8}}}
