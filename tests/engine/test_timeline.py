"""The timeline: what is kept, what is measured, and its trace."""

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_spec.engine.grammar_manager import StepFigures
from overlap_spec.errors import ConfigError
from overlap_spec.timeline import LANES, Span, Timeline, union_ms
from tests.support.counted import lines_run

MS = 1_000_000


def span(start: int, end: int, lane: str = "lane", name: str = "fill", step: int = 0) -> Span:
    return Span(lane, name, start, end, step, {})


def example(steps: int = 4) -> Timeline:
    """Overlapped steps, the second with grammar work longer than its verify."""
    timeline = Timeline()
    at = 0
    for step in range(steps):
        slow = 3 * MS if step == 1 else 0
        timeline.record("host", "schedule", at - MS // 2, at, step)
        timeline.record("plan", "upload plan", at - MS // 4, at, step, bytes=4096)
        timeline.record("compute", "draft", at, at + 2 * MS, step)
        timeline.record("copy", "tree", at + 2 * MS, at + 2 * MS + MS // 3, step)
        timeline.record("compute", "verify", at + 2 * MS, at + 8 * MS, step)
        timeline.record("lane", "accept", at + MS // 2, at + MS, step)
        fill_end = at + 6 * MS + slow
        timeline.record("lane", "fill", at + 2 * MS + MS // 3, fill_end, step, nodes=16)
        timeline.record("plan", "upload masks", fill_end, fill_end + MS // 2, step)
        ready = max(at + 8 * MS, fill_end + MS // 2)
        if ready > at + 8 * MS:
            timeline.record("compute", "exposed", at + 8 * MS, ready, step)
        timeline.record("compute", "select", ready, ready + MS, step)
        timeline.record("compute", "extend", ready + MS, ready + 2 * MS, step)
        timeline.record("copy", "accepted", ready + MS, ready + MS + MS // 3, step)
        timeline.record("host", "publish", ready + MS + MS // 3, ready + 2 * MS, step)
        at = ready + 2 * MS
    return timeline


@given(st.lists(st.tuples(st.integers(-20, 60), st.integers(-20, 60))))
def test_union_counts_covered_ticks(pairs: list[tuple[int, int]]) -> None:
    covered = {tick for start, end in pairs for tick in range(start, end)}
    assert union_ms(span(start, end) for start, end in pairs) == len(covered) / 1e6


def test_hidden() -> None:
    for exposed_ms, grammar_ms, hidden in ((1.0, 8.0, 0.875), (0.0, 2.0, 1.0), (9.0, 2.0, 0.0)):
        assert StepFigures(1, grammar_ms, exposed_ms).hidden_fraction == hidden
    assert StepFigures().hidden_fraction is None


def test_ring_keeps_the_newest() -> None:
    timeline = Timeline(capacity=8)
    assert timeline.spans() == []
    assert timeline.dropped == 0
    for i in range(21):
        timeline.record("host", "work", i, i + 1, step=i, row=i)
    assert [s.step for s in timeline.spans()] == list(range(13, 21))
    assert timeline.spans()[-1] == Span("host", "work", 20, 21, 20, {"row": 20})
    assert timeline.dropped == 13
    with pytest.raises(ConfigError, match="capacity"):
        Timeline(0)


@pytest.mark.ci
def test_threads_lose_nothing() -> None:
    timeline = Timeline(capacity=40_000)
    seen: list[list[Span]] = []
    start = threading.Barrier(9)

    def write(lane: str) -> None:
        start.wait()
        for i in range(5_000):
            timeline.record(lane, "work", i, i + 1, i)

    def read() -> None:
        start.wait()
        seen.extend(timeline.spans() for _ in range(20))

    threads = [threading.Thread(target=write, args=(str(n),)) for n in range(8)]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = timeline.spans()
    assert len(kept) == 40_000
    for n in range(8):
        assert [s.step for s in kept if s.lane == str(n)] == list(range(5_000))
    assert all(isinstance(s, Span) for snapshot in seen for s in snapshot)


def test_recording_is_cheap() -> None:
    """Lines that a span runs, however many there were before."""
    timeline = Timeline(capacity=8)
    record = partial(timeline.record, "compute", "verify", 1, 2, 3, rows=4)
    assert {lines_run(record) for _ in range(20)} == {2}


def by_thread(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    names = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def test_trace(tmp_path: Path) -> None:
    timeline = example()
    timeline.write_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == timeline.chrome_trace()
    threads = by_thread(trace)
    assert tuple(threads) == LANES
    sort = [e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"].endswith("_index")]
    assert sort == sorted(sort)
    events = [event for rows in threads.values() for event in rows]
    assert len(events) == len(timeline.spans()) == trace["otherData"]["spans"]
    assert {event["pid"] for event in events} == {1}
    assert min(event["ts"] for event in events) == 0
    fill = next(e for e in events if e["name"] == "fill")
    assert fill["args"] == {"step": 0, "nodes": 16}
    assert fill["dur"] == pytest.approx((4 - 1 / 3) * 1000, abs=0.01)


def test_trace_keeps_overlaps_apart() -> None:
    """Nested spans share a thread; others that overlap, of several lane threads, do not."""
    timeline = Timeline()
    for start, end in ((0, 10), (2, 4), (5, 15), (12, 20), (20, 30)):
        timeline.record("lane", "fill", start, end, 0)
    threads = by_thread(timeline.chrome_trace())
    starts = {name: [e["ts"] * 1000 for e in rows] for name, rows in threads.items() if rows}
    assert starts == {"lane": [0, 2, 12, 20], "lane 2": [5]}


def test_argument_that_is_no_json(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.record("host", "work", 0, 1, 0, what=object())
    with pytest.raises(TypeError):
        timeline.write_trace(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
