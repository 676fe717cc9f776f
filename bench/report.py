"""One HTML page of all records of a folder, with plots; nothing in it is loaded from elsewhere.

``python -m bench.report FOLDER [--out FILE.html]`` reads every ``*.json`` record of the folder,
with its raw samples where they are, and writes ``report.html`` there. What is shown of a benchmark
is said in ``report.html.j2``; one that is not there has its record as a table. The plots need
matplotlib, of the extra ``bench``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from bench import sections
from bench.common import fail, samples_path
from overlap_spec.errors import ConfigError

ORDER = (
    "overlap",
    "adaptive",
    "traces",
    "gsm8k",
    "json_schema",
    "peers",
    "drafters",
    "scaling",
    "maskbench",
    "soak",
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
        ConfigError: as :func:`read_records`, or matplotlib is missing.
    """
    records = read_records(folder)
    template = sections.template()
    shown = []
    for number, (record, samples) in enumerate(records):
        lacks = ""
        try:
            body = getattr(template, record["bench"], template.plain)(record, samples)
        except (jinja2.UndefinedError, KeyError) as error:
            # An older record may lack what its section shows now; it is shown as it is.
            lacks, body = str(error), template.plain(record, samples)
        shown.append(template.section(number, record, body, lacks))
    return str(template.page([record["bench"] for record, _ in records], shown))


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
