"""What ran when: spans of the step's streams, their trace and picture, and what was hidden.

Times are ``time.perf_counter_ns()`` or anything else on one clock, in nanoseconds.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from overlap_spec.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANES = ("host", "plan", "compute", "copy", "lane")
EXPOSED = "exposed"
EXPOSED_COLOUR = "#d62728"
# Distinguishable by eye and in grey, and none of them red: that means exposed.
COLOURS = (
    "#f2a541", "#76b7b2", "#59a14f", "#af7aa1", "#c7b42c", "#4e79a7", "#8cb0d9", "#9c755f",
    "#86bc86", "#d4a6c8", "#6b6ecf", "#a0a0a0",
)  # fmt: skip


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
    """Keeps the newest spans; cheap enough to be always on (under 1 µs a span).

    Any thread may record. There is no lock: ``next`` of an ``itertools.count`` hands every call a
    number of its own, and one list assignment stores the finished tuple, each a single operation
    of the interpreter, so that a reader sees a whole span or none. A thread that is stopped
    between the two for a full turn of the ring loses a span, and no more.

    Args:
        capacity: Spans that are kept.

    Raises:
        ConfigError: a capacity below 1.
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
        self._ring[number % self.capacity] = (
            number,
            Span(lane, name, start_ns, end_ns, step, args),
        )

    def spans(self) -> list[Span]:
        """The kept spans in the order in which they were recorded."""
        return [span for _, span in self._kept()]

    @property
    def dropped(self) -> int:
        """Spans that newer ones have overwritten."""
        kept = self._kept()
        return kept[-1][0] + 1 - len(kept) if kept else 0

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
        for lane in lane_order(spans):
            rows = _rows([span for span in spans if span.lane == lane], nested=True)
            for index, row in enumerate(rows or [[]]):
                thread += 1
                title = lane if index == 0 else f"{lane} {index + 1}"
                events.append(_metadata("thread_name", thread, name=title))
                events.append(_metadata("thread_sort_index", thread, sort_index=thread))
                events.extend(_event(span, origin, thread) for span in row)
        dropped = kept[-1][0] + 1 - len(kept) if kept else 0
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"spans": len(spans), "dropped": dropped, "origin_ns": origin},
        }

    def write_trace(self, path: str | Path) -> None:
        """Write :meth:`chrome_trace` as JSON, to be opened in chrome://tracing or Perfetto.

        Raises:
            TypeError: an argument of a span that JSON cannot hold.
        """
        # Written at once, so that an argument that is no JSON leaves no broken file.
        text = json.dumps(self.chrome_trace())
        Path(path).write_text(text, encoding="utf-8")

    def draw(
        self, path: str | Path, first_step: int | None = None, last_step: int | None = None
    ) -> None:
        """Draw the spans of some steps, a row a stream, as PNG or SVG by ``path``'s suffix.

        Args:
            first_step, last_step: Both included; None is the first or last one kept.

        Raises:
            ConfigError: another suffix, no span in these steps, or no matplotlib.
        """
        path = Path(path)
        if path.suffix.lower() not in (".png", ".svg"):
            raise ConfigError(f"a timeline is drawn as .png or .svg: {path.name}")
        low = -math.inf if first_step is None else first_step
        high = math.inf if last_step is None else last_step
        spans = [span for span in self.spans() if low <= span.step <= high]
        if not spans:
            raise ConfigError(f"no spans were recorded in steps {first_step} to {last_step}")
        _draw(spans, path)


def lane_order(spans: Iterable[Span]) -> list[str]:
    """LANES, then every other lane that ``spans`` name, sorted."""
    return [*LANES, *sorted({span.lane for span in spans} - set(LANES))]


def union_ms(spans: Iterable[Span]) -> float:
    """Wall-clock time in ms during which at least one of ``spans`` ran."""
    total = 0
    covered: float = -math.inf
    for start, end in sorted((span.start_ns, span.end_ns) for span in spans):
        if end > max(start, covered):
            total += end - int(max(start, covered))
            covered = end
    return total / 1e6


def exposed_ms(masks_ready_ns: int, verify_end_ns: int) -> float:
    """Time in ms for which compute stood idle for the grammar: masks ready - verify ended, or 0."""
    return max(0, masks_ready_ns - verify_end_ns) / 1e6


def hidden_fraction(exposed_ms: Iterable[float], grammar_ms: Iterable[float]) -> float | None:
    """Share of the grammar's time that ran under other work: ``1 - Σ exposed / Σ grammar``.

    In [0, 1] (waiting for more than the grammar counts as nothing hidden); None without grammar.

    Raises:
        ValueError: a time that is negative or not finite.
    """
    exposed, grammar = list(exposed_ms), list(grammar_ms)
    for value in (*exposed, *grammar):
        if not 0 <= value < math.inf:
            raise ValueError(f"times must be finite and not negative: {value}")
    total = math.fsum(grammar)
    if total == 0:
        return None
    return max(0.0, 1 - math.fsum(exposed) / total)


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


def _rows(spans: Iterable[Span], nested: bool) -> list[list[Span]]:
    """``spans`` by start in as few rows as need be, so that none overlap within a row.

    With ``nested``, one may lie within another.
    """
    rows: list[tuple[list[Span], list[int]]] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        for _, ends in rows:
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
        fits = (r for r in rows if not r[1] or (nested and span.end_ns <= r[1][-1]))
        row = next(fits, None)
        if row is None:
            row = ([], [])
            rows.append(row)
        row[0].append(span)
        row[1].append(span.end_ns)
    return [row for row, _ in rows]


def _draw(spans: Sequence[Span], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing a timeline needs matplotlib: pip install matplotlib") from None
    origin = min(span.start_ns for span in spans)
    width_ms = max(max(span.end_ns for span in spans) - origin, 1) / 1e6
    lanes = lane_order(spans)
    steps = len({span.step for span in spans})
    width_inches = min(max(10.0, 3.2 * steps), 32.0)
    figure = Figure(figsize=(width_inches, 1.4 + 0.62 * len(lanes)), dpi=140)
    axes = figure.add_subplot()
    colours = _colours(spans)
    inches_per_ms = 0.77 * width_inches / width_ms
    for index, lane in enumerate(lanes):
        axes.axhspan(index - 0.5, index + 0.5, color="#f6f7f9" if index % 2 == 0 else "white", lw=0)
        rows = _rows([span for span in spans if span.lane == lane], nested=False)
        for number, row in enumerate(rows):
            height = 0.72 / len(rows)
            bottom = index - 0.36 + number * height
            _draw_row(axes, row, bottom, height, origin, colours, inches_per_ms)
    _draw_steps(axes, spans, origin, len(lanes))
    axes.set_xlim(-0.005 * width_ms, 1.005 * width_ms)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=10)
    axes.set_xlabel("ms", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _legend(axes, colours)
    figure.savefig(path, bbox_inches="tight", facecolor="white")


def _colours(spans: Iterable[Span]) -> dict[str, str]:
    """A colour for each name, in order of first appearance; exposed comes last, in red."""
    names = list(dict.fromkeys(s.name for s in sorted(spans, key=lambda s: s.start_ns)))
    others = [name for name in names if name != EXPOSED]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)}
    return colours | ({EXPOSED: EXPOSED_COLOUR} if EXPOSED in names else {})


def _draw_row(
    axes: Axes,
    row: Sequence[Span],
    bottom: float,
    height: float,
    origin: int,
    colours: dict[str, str],
    inches_per_ms: float,
) -> None:
    """One row of bars, with their names in those that are long enough to hold them."""
    bars = [((s.start_ns - origin) / 1e6, max(s.end_ns - s.start_ns, 0) / 1e6) for s in row]
    faces = [colours[span.name] for span in row]
    # A white edge parts neighbours, and would swallow a bar that is hardly wider than it.
    edges = [
        "white" if length * inches_per_ms > 0.03 else face
        for (_, length), face in zip(bars, faces, strict=True)
    ]
    axes.broken_barh(
        bars, (bottom, height * 0.94), facecolors=faces, edgecolors=edges, linewidth=0.4, zorder=2
    )
    for span, (start, length) in zip(row, bars, strict=True):
        if height > 0.3 and length * inches_per_ms > 0.075 * len(span.name) + 0.06:
            axes.text(
                start + length / 2,
                bottom + height * 0.47,
                span.name,
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if _dark(colours[span.name]) else "#202020",
                zorder=3,
                clip_on=True,
            )


def _dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _draw_steps(axes: Axes, spans: Sequence[Span], origin: int, lanes: int) -> None:
    """A line where each step starts on ``compute`` (or at all), with its number above."""
    starts: dict[int, int] = {}
    for lane in ("compute", None):
        found: dict[int, int] = {}
        for span in spans:
            if lane is None or span.lane == lane:
                found[span.step] = min(found.get(span.step, span.start_ns), span.start_ns)
        starts = found | starts
    # Numbers of steps that are too many to be read are left out evenly.
    skip = -(-len(starts) // 40)
    for index, (step, start) in enumerate(sorted(starts.items())):
        at = (start - origin) / 1e6
        axes.axvline(at, color="#555555", lw=0.8, ls=(0, (4, 3)), zorder=1)
        if index % skip == 0:
            axes.text(at, -0.56, f" step {step}", fontsize=8, va="bottom", color="#555555")
    axes.hlines([i + 0.5 for i in range(lanes - 1)], *axes.get_xlim(), colors="#e3e5e8", lw=0.6)


def _legend(axes: Axes, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour, label="exposed (compute waits for masks)" if n == EXPOSED else n)
        for n, colour in colours.items()
    ]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=min(len(handles), 7),
        frameon=False,
        fontsize=8,
        handlelength=1.2,
    )
