"""A picture of a trace: the spans of some steps, a row a stream.

``python -m bench.timeline_plot TRACE [--out FILE] [--steps FIRST LAST]`` draws what
``overlap-spec generate --trace TRACE`` wrote, as SVG or, by the suffix of FILE, as PNG.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import fail
from bench.plots import new_figure
from overlap_spec.errors import ConfigError
from overlap_spec.timeline import Span, lane_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXPOSED = "exposed"
EXPOSED_COLOUR = "#d62728"
# Distinguishable by eye and in grey, and none of them red: that means exposed.
COLOURS = (
    "#f2a541", "#76b7b2", "#59a14f", "#af7aa1", "#c7b42c", "#4e79a7", "#8cb0d9", "#9c755f",
    "#86bc86", "#d4a6c8", "#6b6ecf", "#a0a0a0",
)  # fmt: skip


def read_trace(path: Path) -> list[Span]:
    """The spans of a trace that ``Timeline.write_trace`` wrote; times in ns from the first.

    Raises:
        ConfigError: the file is no such trace.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return [_span(event) for event in events if event["ph"] == "X"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no trace of overlap-spec: {error!r}") from None


def _span(event: dict[str, Any]) -> Span:
    start = round(event["ts"] * 1e3)
    args = dict(event["args"])
    step = args.pop("step")
    return Span(event["cat"], event["name"], start, start + round(event["dur"] * 1e3), step, args)


def draw_timeline(spans: Iterable[Span], path: Path, steps: tuple[int, int] | None = None) -> None:
    """Draw the spans of some steps, as PNG or SVG by ``path``'s suffix.

    Args:
        steps: The first and the last one, both included; None is all.

    Raises:
        ConfigError: another suffix, no span in these steps, or no matplotlib.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"a timeline is drawn as .png or .svg: {path.name}")
    chosen = [s for s in spans if steps is None or steps[0] <= s.step <= steps[1]]
    if not chosen:
        raise ConfigError(
            "there are no spans" + (" in steps {} to {}".format(*steps) if steps else "")
        )
    _draw(chosen, path)


def _draw(spans: Sequence[Span], path: Path) -> None:
    origin = min(span.start_ns for span in spans)
    width_ms = max(max(span.end_ns for span in spans) - origin, 1) / 1e6
    lanes = lane_order(spans)
    steps = len({span.step for span in spans})
    width_inches = min(max(10.0, 3.2 * steps), 32.0)
    figure = new_figure(width_inches, 1.4 + 0.62 * len(lanes))
    axes = figure.add_subplot()
    colours = _colours(spans)
    inches_per_ms = 0.77 * width_inches / width_ms
    for index, lane in enumerate(lanes):
        axes.axhspan(index - 0.5, index + 0.5, color="#f6f7f9" if index % 2 == 0 else "white", lw=0)
        rows = _rows([span for span in spans if span.lane == lane])
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
    figure.savefig(path, dpi=140, facecolor="white")


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """``spans`` by start in as few rows as need be, so that none overlap within a row."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        row = next((row for row in rows if row[-1].end_ns <= span.start_ns), None)
        if row is None:
            row = []
            rows.append(row)
        row.append(span)
    return rows


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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.timeline_plot", description="A picture of a trace."
    )
    parser.add_argument("trace", type=Path, help="what generate --trace wrote")
    parser.add_argument("--out", type=Path, help="TRACE with the suffix .svg if absent")
    parser.add_argument("--steps", type=int, nargs=2, metavar=("FIRST", "LAST"), help="these alone")
    options = parser.parse_args(arguments)
    out: Path = options.out or options.trace.with_suffix(".svg")
    try:
        steps = tuple(options.steps) if options.steps else None
        draw_timeline(read_trace(options.trace), out, steps)
    except (ConfigError, OSError) as error:
        fail(str(error))
    print(out)


if __name__ == "__main__":
    main()
