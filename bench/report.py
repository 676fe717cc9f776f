"""Records as tables: on a terminal, and of all records of a folder as one HTML page.

``python -m bench.report FOLDER [--out FILE.html]`` reads every ``*.json`` record of the folder and
writes ``report.html`` there, as ``rich`` shows it. Nothing in it is loaded from elsewhere.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import table as rich_table
from rich.console import Console

from overlap_spec.errors import ConfigError

TERMINAL_WIDTH, LONGEST_CELL, MOST_HEADS = 150, 160, 8
# Of a spread and of percentiles: the middle, and what is shown behind it.
SPREAD = ("median", "p50", "p10", "p90", "p99", "min", "max")
# Every record has these, and the head of its section shows them.
HEAD = frozenset(
    ("bench", "date", "command", "quick", "seed", "machine", "versions", "commit", "repetitions",
     "samples")
)  # fmt: skip
ABOUT = """Every number here was measured by the command above its section, on the machine named
there. Things that are compared took turns within one run, and ratios are of neighbours in time:
their median, with least and most; of times the median, with p90 and p99. Times are in the unit that
their name ends in; TTFT is the time to the first token, TPOT the time per token after it, and
accept length the tokens that a verify pass emits."""


class Table(NamedTuple):
    """Rows of figures that are alike: ``heads`` are those of all columns, the first one's the
    field of the record that they stand in."""

    heads: list[str]
    rows: list[list[str]]


def show(value: Any) -> str:
    """A cell: numbers at four digits, None as a dash; of a spread or of percentiles the middle
    first."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        middle, *rest = (name for name in SPREAD if name in value)
        return f"{show(value[middle])} ({' – '.join(show(value[name]) for name in rest)})"
    if isinstance(value, list):
        value = ", ".join(map(show, value))
    return str(value)[:LONGEST_CELL]


def _is_cell(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and ({"median", "min", "max"} <= value.keys() or "p50" in value)
    return not isinstance(value, list) or not any(isinstance(v, dict | list) for v in value)


def tables(record: Mapping[str, Any]) -> list[Table]:
    """A record's own fields: what has the same figures is a table, in the order of the record. One
    of many figures of few things has the figures below each other."""
    found: dict[tuple[str, tuple[str, ...]], Table] = {}

    def walk(path: tuple[str, ...], value: Any) -> None:
        items = dict(enumerate(value)) if isinstance(value, list) else value
        cells = {str(name): show(inner) for name, inner in items.items() if _is_cell(inner)}
        if cells:
            field = path[0] if path else ""
            table = found.setdefault((field, tuple(cells)), Table([field, *cells], []))
            table.rows.append([" › ".join(path[1:]), *cells.values()])
        for name, inner in items.items():
            if not _is_cell(inner):
                walk((*path, str(name)), inner)

    walk((), {name: value for name, value in record.items() if name not in HEAD})
    return [
        _turned(t) if len(t.heads) > max(len(t.rows), MOST_HEADS) else t for t in found.values()
    ]


def _turned(table: Table) -> Table:
    heads, *rows = map(list, zip(table.heads, *table.rows, strict=True))
    return Table(heads, rows)


def tell(record: Mapping[str, Any], console: Console | None = None) -> None:
    """Show a record, on standard error if nowhere else."""
    console = console or Console(stderr=True, width=TERMINAL_WIDTH)
    for heads, rows in tables(record):
        shown = rich_table.Table(*heads)
        for row in rows:
            shown.add_row(*row)
        console.print(shown, markup=False)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Records of a folder, in the order of their benchmarks' names.

    Raises:
        ConfigError: there is none, or a file is no record.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            found.append((record["bench"], record))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no record of a benchmark: {error!r}") from None
    if not found:
        raise ConfigError(f"{folder} holds no records (*.json): run benchmarks with --json first")
    return [record for _, record in sorted(found, key=lambda entry: entry[0])]


def render(folder: Path) -> str:
    """The page, as text; ConfigError as :func:`read_records`."""
    console = Console(record=True, width=TERMINAL_WIDTH, file=io.StringIO())
    console.print(ABOUT)
    for record in read_records(folder):
        machine, versions = record["machine"], record["versions"]
        told = (
            record["command"], record["date"], f"{machine['cpu']}, {machine['cores']} cores",
            f"{machine['memory_gib']} GiB", f"device {machine['device']}",
            f"load before the run {machine['load_1m']}", f"commit {record['commit'] or 'unknown'}",
            ", ".join(f"{name} {version}" for name, version in versions.items() if version),
            f"repetitions {record['repetitions']}",
        )  # fmt: skip
        console.rule(record["bench"])
        console.print(" · ".join(told), markup=False, highlight=False)
        tell(record, console)
    return console.export_html()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description="A page of records")
    parser.add_argument("folder", type=Path, help="folder of records")
    parser.add_argument("--out", type=Path, help="FOLDER/report.html if absent")
    options = parser.parse_args(arguments)
    out: Path = options.out or options.folder / "report.html"
    try:
        page = render(options.folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
    print(out, file=sys.stderr)


if __name__ == "__main__":
    main()
