"""What ran when: spans of the step's streams, their trace, and what was hidden.

Times are ``time.perf_counter_ns()`` or anything else on one clock, in nanoseconds.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from overlap_spec.errors import ConfigError

LANES = ("host", "plan", "compute", "prefill", "copy", "lane")


class Span(NamedTuple):
    """One piece of work: ``lane`` is the stream or thread, ``[start_ns, end_ns)`` its time."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    step: int
    args: dict[str, Any]


# A plain tuple is cheaper to make than a Span, which is built when it is read.
_Fields = tuple[str, str, int, int, int, dict[str, Any]]


class Timeline:
    """Keeps the newest ``capacity`` spans; cheap enough to be always on (under 1 µs a span).

    Any thread may record. There is no lock: ``next`` of an ``itertools.count`` hands every call a
    number of its own, and one list assignment stores the finished tuple, each a single operation
    of the interpreter, so that a reader sees a whole span or none. A thread that is stopped
    between the two for a full turn of the ring loses a span, and no more. ConfigError: a capacity
    below 1.
    """

    def __init__(self, capacity: int = 65536) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity must be at least 1: {capacity}")
        self.capacity = capacity
        self._numbers = itertools.count()
        self._ring: list[tuple[int, _Fields] | None] = [None] * capacity

    def record(
        self, lane: str, name: str, start_ns: int, end_ns: int, step: int, **args: Any
    ) -> None:
        """Keep one span; ``args`` (JSON values) go into the trace. An end before the start is an
        empty span."""
        number = next(self._numbers)
        self._ring[number % self.capacity] = (number, (lane, name, start_ns, end_ns, step, args))

    def spans(self) -> list[Span]:
        """The kept spans in the order in which they were recorded."""
        return [span for _, span in self._kept()]

    @property
    def dropped(self) -> int:
        """Spans that newer ones have overwritten."""
        return _overwritten(self._kept())

    def _kept(self) -> list[tuple[int, Span]]:
        entries = sorted((e for e in list(self._ring) if e is not None), key=lambda e: e[0])
        oldest = entries[-1][0] - self.capacity if entries else 0
        return [(number, Span(*fields)) for number, fields in entries if number > oldest]

    def chrome_trace(self) -> dict[str, Any]:
        """The spans in Chrome's and Perfetto's trace format; times in µs from the first start.

        One process; one named thread a lane, in the order of LANES and then by name. Spans of a
        lane that overlap without one holding the other, which the format cannot show in one
        thread, go into further threads of that lane.
        """
        kept = self._kept()
        spans = [span for _, span in kept]
        origin = min((span.start_ns for span in spans), default=0)
        events = [_metadata("process_name", 0, name="overlap-spec")]
        thread = 0
        # Every other lane that the spans name comes behind.
        for lane in [*LANES, *sorted({span.lane for span in spans} - set(LANES))]:
            rows = _rows([span for span in spans if span.lane == lane])
            for index, row in enumerate(rows or [[]]):
                thread += 1
                title = lane if index == 0 else f"{lane} {index + 1}"
                events.append(_metadata("thread_name", thread, name=title))
                events.append(_metadata("thread_sort_index", thread, sort_index=thread))
                events.extend(_event(span, origin, thread) for span in row)
        told = {"spans": len(spans), "dropped": _overwritten(kept), "origin_ns": origin}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}

    def write_trace(self, path: str | Path) -> None:
        """Write :meth:`chrome_trace` as JSON, to be opened in chrome://tracing or Perfetto.
        TypeError: an argument of a span that JSON cannot hold, which leaves no broken file."""
        text = json.dumps(self.chrome_trace())
        Path(path).write_text(text, encoding="utf-8")


def _overwritten(kept: Sequence[tuple[int, Span]]) -> int:
    """How many spans were recorded before the oldest that is kept."""
    return kept[-1][0] + 1 - len(kept) if kept else 0


def union_ns(times: Iterable[tuple[int, int]]) -> int:
    """Time during which at least one of the spans from start to end ran."""
    total, covered = 0, -math.inf
    for start, end in sorted(times):
        if end > max(start, covered):
            total += end - int(max(start, covered))
            covered = end
    return total


def union_ms(spans: Iterable[Span]) -> float:
    """Wall-clock time in ms during which at least one of ``spans`` ran."""
    return union_ns((span.start_ns, span.end_ns) for span in spans) / 1e6


def _metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": thread, "args": args}


def _event(span: Span, origin: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": 1,
        "tid": thread,
        "ts": (span.start_ns - origin) / 1e3,
        "dur": max(0, span.end_ns - span.start_ns) / 1e3,
        "args": {"step": span.step, **span.args},
    }


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """``spans`` by start in as few rows as need be, so that those of a row that overlap lie one
    within the other."""
    rows: list[tuple[list[Span], list[int]]] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        for _, ends in rows:
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
        row = next((r for r in rows if not r[1] or span.end_ns <= r[1][-1]), None)
        if row is None:
            rows.append(row := ([], []))
        row[0].append(span)
        row[1].append(span.end_ns)
    return [row for row, _ in rows]
