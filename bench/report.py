"""Records as tables: on a terminal, and of all records of a folder as one HTML page.

``python -m bench.report FOLDER [--out FILE.html]`` reads every ``*.json`` record of the folder and
writes ``report.html`` there. Nothing in the page is loaded from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
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
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.6rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; margin: .6rem 0 1rem; font-size: 14px; display: block;
  overflow-x: auto }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #eee }
th:first-child, td:first-child { text-align: left }
td { white-space: nowrap } th { background: #f6f7f9 }
.meta { color: #5f6368; font-size: 13px } code { background: #f6f7f9; padding: 0 .2rem }
"""
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


def tell(record: Mapping[str, Any]) -> None:
    """Show a record on standard error."""
    console = Console(stderr=True, width=TERMINAL_WIDTH)
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


def _section(number: int, record: Mapping[str, Any]) -> Iterator[str]:
    machine = record["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items() if v)
    on = (
        f"{record['date']} · {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} "
        f"GiB, device {machine['device']}, load before the run {machine['load_1m']} · commit "
        f"{record['commit'] or 'unknown'} · {versions} · repetitions {record['repetitions']}"
    )
    yield f'<h2 id="bench-{number}">{escape(record["bench"])}</h2>'
    yield f'<p class="meta"><code>{escape(record["command"])}</code><br>{escape(on)}</p>'
    for heads, rows in tables(record):
        yield f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"
        for row in rows:
            yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        yield "</table>"


def render(folder: Path) -> str:
    """The page, as text; ConfigError as :func:`read_records`."""
    records = read_records(folder)
    links = (f'<a href="#bench-{n}">{escape(r["bench"])}</a>' for n, r in enumerate(records))
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f"<title>overlap-spec: benchmarks</title><style>{STYLE}</style></head><body>",
            f"<h1>overlap-spec: benchmarks</h1><p>{ABOUT}</p><p>{' · '.join(links)}</p>",
            *(line for number, record in enumerate(records) for line in _section(number, record)),
            "</body></html>\n",
        )
    )


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
