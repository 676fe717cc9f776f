"""What a reader sees of a record: its section of ``report.html.j2``, as HTML or on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from bench import plots

TEMPLATE = "report.html.j2"
TERMINAL_WIDTH = 150
# Every record has these, and the section's head shows them.
HEAD = {"bench", "date", "command", "quick", "seed", "machine", "versions", "commit",
        "repetitions", "samples"}  # fmt: skip
PLOTS: dict[str, Callable[..., Any]] = {
    "bars": plots.bars,
    "calibration_plot": plots.calibration,
    "scaling_plot": plots.scaling,
    "soak_plot": plots.soak,
    "targets_plot": plots.targets,
}


def show(value: Any) -> str:
    """A cell: numbers at four digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def at(times: Mapping[str, float] | None, name: str = "p50") -> float | None:
    """One of the percentiles, None where there are none."""
    return None if times is None else times[name]


def flat(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A record's own fields, with the paths of their leaves."""
    return list(_leaves({key: value for key, value in record.items() if key not in HEAD}, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path} › {key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path} › {index}")
    elif isinstance(value, list):
        yield path, ", ".join(show(item) for item in value)
    else:
        yield path, value


def template(plotted: bool = True) -> Any:
    """The template's macros.

    Args:
        plotted: With plots, as SVG in the page itself; else without them.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"show": show, "at": at, "flat": flat}
    numbers = itertools.count()

    def drawn(draw: Callable[..., Any]) -> Callable[..., Markup]:
        def embed(*args: Any) -> Markup:
            if not plotted:
                return Markup("")
            return Markup(f"<figure>{plots.svg(draw(*args), f'p{next(numbers)}')}</figure>")

        return embed

    environment.globals |= {name: drawn(draw) for name, draw in PLOTS.items()}
    environment.globals["one"] = {"median": 1.0}
    return environment.get_template(TEMPLATE).module


class _Terminal(HTMLParser):
    """Headings, paragraphs and tables of a section."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str | Table] = []
        self._text, self._heads, self._row = "", list[str](), list[str]()
        self._rows: list[list[str]] = []

    def handle_starttag(self, tag: str, _: Any) -> None:
        if tag in ("th", "td", "p", "h3"):
            self._text = ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        said = " ".join(self._text.split())
        if tag in ("p", "h3"):
            self.shown.append(said)
        elif tag in ("th", "td"):
            (self._heads if tag == "th" else self._row).append(said)
        elif tag == "tr" and self._row:
            self._rows.append(self._row)
            self._row = []
        elif tag == "table":
            table = Table(*self._heads)
            for row in self._rows:
                table.add_row(*row)
            self.shown.append(table)
            self._heads, self._rows = [], []


def tell(record: Mapping[str, Any], samples: list[dict[str, Any]]) -> None:
    """Show a record on standard error, if its benchmark has a section."""
    section = getattr(template(plotted=False), record["bench"], None)
    if section is None:
        return
    parser = _Terminal()
    parser.feed(str(section(record, samples)))
    console = Console(stderr=True, width=TERMINAL_WIDTH)
    for part in parser.shown:
        console.print(part, markup=False)
