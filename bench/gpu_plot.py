"""The figures of ``bench.gpu`` as one SVG, each with its target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MET, MISSED, OPEN, TARGET = "#59a14f", "#f2a541", "#4e79a7", "#d62728"
COLUMNS = 4


def draw(record: dict[str, Any], path: Path) -> bool:
    """Write the plot; False where matplotlib is missing or there is no figure."""
    figures: dict[str, dict[str, Any]] = record["figures"]
    if not figures:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = -(-len(figures) // COLUMNS)
    sheet = Figure(figsize=(15, 0.6 + 3.1 * rows), layout="constrained")
    grid = sheet.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axes in grid:
        axes.set_axis_off()
    for axes, (name, figure) in zip(grid, figures.items(), strict=False):
        axes.set_axis_on()
        _panel(axes, name.replace("_", " "), figure)
    what = "Rehearsal, not a measurement" if record["rehearsal"] else record["machine"]["device"]
    sheet.suptitle(f"{what}, {record['date'][:10]}, at the cost of {record['like']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path, format="svg", metadata={"Date": None})
    return True


def _panel(axes: Axes, title: str, figure: dict[str, Any]) -> None:
    """One figure's bars, and its target as a line."""
    labels, values = list(figure["by"]), list(figure["by"].values())
    colour = OPEN if figure["met"] is None else MET if figure["met"] else MISSED
    bars = axes.bar(range(len(values)), values, color=colour, width=0.6)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8)
    axes.set_xticks(range(len(labels)), [t.replace(", ", "\n") for t in labels], fontsize=8)
    axes.set_ylabel(figure["unit"], fontsize=8)
    axes.margins(x=0.1, y=0.15)
    if figure["target"] is not None:
        axes.axhline(figure["target"], color=TARGET, lw=1.2, ls="--")
        title += f" ({figure['goal']} {figure['target']})"
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
