"""One HTML page of all records of a folder, with plots; nothing in it is loaded from elsewhere.

``python -m bench.report FOLDER [--out FILE.html]`` reads every ``*.json`` record of the folder,
with its raw samples where they are, and writes ``report.html`` there. Benchmarks have tables and
plots of their own in ``bench.report_sections``; one that is not there has its record as a table.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import fail, samples_path
from bench.report_sections import SECTIONS, Page, plain
from overlap_spec.errors import ConfigError

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #202124; background: #fff }
h1 { font-size: 1.6rem } h2 { margin-top: 2.6rem; border-bottom: 1px solid #ddd }
h3 { margin-bottom: .3rem } p { max-width: 48rem } svg { max-width: 100%; height: auto }
table { border-collapse: collapse; margin: .6rem 0 1rem; font-size: 14px; display: block;
  overflow-x: auto }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #eee }
th:first-child, td:first-child { text-align: left }
td { white-space: nowrap } th { background: #f6f7f9 }
.meta { color: #5f6368; font-size: 13px } .bad { color: #b3261e; font-weight: 600 }
code { background: #f6f7f9; padding: 0 .2rem }
"""
ORDER = ("overlap", "adaptive", "gsm8k", "json_schema", "peers", "maskbench", "soak")
INTRO = (
    "Every number here was measured by the command above its section, on the machine named there. "
    "Things that are compared took turns within one run, and ratios are of neighbours in time. "
    "Times are in milliseconds where nothing else is said; TTFT is the time to the first token, "
    "TPOT the time per token after it, and accept length the tokens that a verify pass emits."
)


def read_records(folder: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Records of a folder with their samples, in the order of the report.

    Raises:
        ConfigError: there is none, or a file is no record.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            name = record["bench"]
            raw = samples_path(path)
            lines = raw.read_text(encoding="utf-8").splitlines() if raw.exists() else []
            found.append((name, record, [json.loads(line) for line in lines]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no record of a benchmark: {error!r}") from None
    if not found:
        raise ConfigError(f"{folder} holds no records (*.json): run benchmarks with --json first")
    rank = {name: index for index, name in enumerate(ORDER)}
    found.sort(key=lambda entry: (rank.get(entry[0], len(ORDER)), entry[0]))
    return [(record, samples) for _, record, samples in found]


def render(folder: Path) -> str:
    """The page, as text.

    Raises:
        ConfigError: as :func:`read_records`.
    """
    records = read_records(folder)
    parts = [f"<h1>overlap-spec: benchmarks</h1><p>{INTRO}</p>{_contents(records)}"]
    for number, (record, samples) in enumerate(records):
        page = Page(f"s{number}")
        try:
            SECTIONS.get(record["bench"], plain)(page, record, samples)
        except KeyError as error:
            # An older record may lack what its section shows now; it is shown as it is.
            page = Page(f"s{number}")
            page.text(f"This record has no {error}, which its section shows: it is shown as it is.")
            plain(page, record, samples)
        parts.append(_head(number, record) + page.html())
    title = "<title>overlap-spec: benchmarks</title>"
    head = f'<meta charset="utf-8">{title}<style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'
    )


def _contents(records: Sequence[tuple[dict[str, Any], Any]]) -> str:
    links = (
        f'<a href="#bench-{number}">{html.escape(record["bench"])}</a>'
        for number, (record, _) in enumerate(records)
    )
    return f"<p>{' · '.join(links)}</p>"


def _head(number: int, record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    kept = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    words = [
        f"<code>{html.escape(record['command'])}</code>",
        html.escape(
            f"{record['date']} · {machine['cpu']}, {machine['cores']} cores, "
            f"{machine['memory_gib']} GiB, device {machine['device']}, load before the run "
            f"{machine['load_1m']} · commit {record['commit'] or 'unknown'} · {kept} · "
            f"repetitions {record['repetitions']}"
        ),
    ]
    title = f'<h2 id="bench-{number}">{html.escape(record["bench"])}</h2>'
    return f'{title}<p class="meta">{"<br>".join(words)}</p>'


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
    except ConfigError as error:
        fail(str(error))
    except OSError as error:
        fail(f"the report cannot be written: {error}")
    print(out, file=sys.stderr)


if __name__ == "__main__":
    main()
