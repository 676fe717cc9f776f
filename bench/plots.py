"""The benchmarks' plots, as matplotlib figures and as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_spec.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4e79a7", "#f2a541", "#59a14f", "#af7aa1", "#76b7b2", "#9c755f", "#8cb0d9", "#e15759")
MET, MISSED, OPEN, TARGET = "#59a14f", "#f2a541", "#4e79a7", "#d62728"
COLUMNS = 4
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install -e '.[bench]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure, name: str) -> str:
    """The figure as an ``<svg>`` element; its ids begin with ``name``, since ids are unique in a
    document and a page has many plots."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata=NO_METADATA)
    text = buffer.getvalue()
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text[text.index("<svg") :])


def write_svg(figure: Figure, path: Path) -> None:
    """Write the figure as an SVG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(figure, path.stem), encoding="utf-8")


def bars(label: str, groups: Mapping[str, Any], *path: str | Sequence[str]) -> Figure:
    """Grouped bars: a group for each item of ``groups``.

    Args:
        label: Of the values.
        path: Keys that lead from a group to its value, None where it has none. Where a part is a
            list of keys, each of them is a series: a bar in every group.
    """
    series: dict[str, list[float | None]] = {}
    names = next((part for part in path if not isinstance(part, str)), [""])
    for name in names:
        steps = [part if isinstance(part, str) else name for part in path]
        series[name] = [_follow(group, steps) for group in groups.values()]
    figure = new_figure(8.5, 3.4)
    axes = figure.subplots()
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        at = [g - 0.4 + (index + 0.5) * width for g in range(len(groups))]
        heights = [0.0 if value is None else value for value in values]
        colour = COLOURS[index % len(COLOURS)]
        drawn = axes.bar(at, heights, width * 0.94, label=name, color=colour)
        said = ["–" if value is None else f"{value:.3g}" for value in values]
        axes.bar_label(drawn, said, fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), [re.sub("[ _]", "\n", name) for name in groups])
    axes.set_ylabel(label)
    axes.margins(y=0.15)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    _open(axes)
    return figure


def _follow(value: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        value = value[step]
    return value


def soak(samples: Sequence[Mapping[str, Any]]) -> Figure:
    """Memory, pages and matchers of ``bench.soak`` over its requests."""
    done = [sample["requests"] for sample in samples]
    figure = new_figure(8, 5.2)
    memory, held = figure.subplots(2, 1, sharex=True)
    memory.plot(done, [s["rss_mib"] for s in samples], color=COLOURS[0], lw=1.2)
    memory.set_ylabel("resident memory, MiB")
    memory.set_ylim(0, 1.1 * max(s["rss_mib"] for s in samples))
    held.plot(done, [s["pages_in_use"] for s in samples], color=COLOURS[1], lw=0.9, label="pages")
    held.plot(done, [s["matchers"] for s in samples], color=COLOURS[2], lw=0.9, label="matchers")
    held.set_ylabel("in use")
    held.set_xlabel("requests ended")
    held.set_ylim(bottom=0)
    held.legend(frameon=False, loc="center right")
    for axes in (memory, held):
        axes.grid(alpha=0.25)
        _open(axes)
    return figure


def scaling(sweep: Mapping[str, Any]) -> Figure:
    """Times of a step, and memory, over one size, both axes logarithmic; the legend has the fitted
    exponents."""
    points, fits = sweep["points"], sweep["fits"]
    figure = new_figure(8.5, 3.4)
    times, memory = figure.subplots(1, 2, width_ratios=(2, 1))
    shown = [name for name in fits if name.endswith("_ms") and fits[name] is not None]
    for index, name in enumerate(shown):
        at = [(p["x"], p[name]) for p in points if p[name] > 0]
        label = f"{name[:-3]}: x^{fits[name]['exponent']:.2f}"
        times.plot(*zip(*at, strict=True), "o-", color=COLOURS[index], ms=3, lw=1.2, label=label)
    resident = [p["rss_mib"] for p in points]
    memory.plot([p["x"] for p in points], resident, "o-", color=COLOURS[0], ms=3, lw=1.2)
    label = f"resident MiB: x^{fits['rss_mib']['exponent']:.2f}"
    for axes, title in ((times, "ms"), (memory, label)):
        axes.set_xscale("log")
        axes.set_xlabel(sweep["unit"])
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.25)
        _open(axes)
    times.set_yscale("log")
    memory.set_ylim(0, 1.1 * max(resident))
    times.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def calibration(policies: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> Figure:
    """How often drafts of each confidence were accepted, by policy and kind of text; a dot's area
    is its trials (AdaSpec, SoCC 2025, has the like of its drafters)."""
    figure = new_figure(4.2, 3.8)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=TARGET, lw=1, ls="--", label="as confident as right")
    kinds = [(f"{p}: {k}", bins) for p, by_kind in policies.items() for k, bins in by_kind.items()]
    for index, (name, bins) in enumerate(kinds):
        most = max((b["trials"] for b in bins), default=1.0)
        x, y = [b["confidence"] for b in bins], [b["accepted"] for b in bins]
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(x, y, color=colour, lw=1)
        axes.scatter(x, y, [4 + 60 * b["trials"] / most for b in bins], color=colour, label=name)
    axes.set_xlabel("the drafter's probability")
    axes.set_ylabel("share accepted")
    axes.legend(frameon=False, fontsize=8)
    _open(axes)
    return figure


def targets(record: Mapping[str, Any]) -> Figure:
    """The figures of ``bench.gpu``, each with its target as a line.

    Raises:
        ConfigError: the record has no figures.
    """
    figures: Mapping[str, Mapping[str, Any]] = record["figures"]
    if not figures:
        raise ConfigError("there are no figures to plot")
    rows = -(-len(figures) // COLUMNS)
    sheet = new_figure(15, 0.6 + 3.1 * rows)
    grid = sheet.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axes in grid[len(figures) :]:
        axes.set_axis_off()
    for axes, (name, figure) in zip(grid, figures.items(), strict=False):
        _target(axes, name.replace("_", " "), figure)
    what = "Rehearsal, not a measurement" if record["rehearsal"] else record["machine"]["device"]
    sheet.suptitle(f"{what}, {record['date'][:10]}, at the cost of {record['like']}")
    return sheet


def _target(axes: Axes, title: str, figure: Mapping[str, Any]) -> None:
    labels, values = list(figure["by"]), list(figure["by"].values())
    colour = OPEN if figure["met"] is None else MET if figure["met"] else MISSED
    drawn = axes.bar(range(len(values)), values, color=colour, width=0.6)
    axes.bar_label(drawn, [f"{value:.3g}" for value in values], fontsize=8)
    axes.set_xticks(range(len(labels)), [t.replace(", ", "\n") for t in labels], fontsize=8)
    axes.set_ylabel(figure["unit"], fontsize=8)
    axes.margins(x=0.1, y=0.15)
    if figure["target"] is not None:
        axes.axhline(figure["target"], color=TARGET, lw=1.2, ls="--")
        title += f" ({figure['goal']} {figure['target']})"
    axes.set_title(title, fontsize=10)
    _open(axes)


def _open(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
