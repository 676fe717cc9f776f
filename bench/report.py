"""One HTML page of all records of a folder, with plots; nothing in it is loaded from elsewhere.

``python -m bench.report FOLDER [--out FILE.html]`` reads every ``*.json`` record of the folder,
with its raw samples where they are, and writes ``report.html`` there. What is shown of a benchmark
is said in ``report.html.j2``; one that is not there has its record as a table. The plots need
matplotlib, of the extra ``bench``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bench import plots
from bench.common import fail, samples_path
from overlap_spec.errors import ConfigError

TEMPLATE = "report.html.j2"
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
# Every record has these, and the section's head shows them.
HEAD = {"bench", "date", "command", "quick", "seed", "machine", "versions", "commit",
        "repetitions", "samples"}  # fmt: skip


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


def _embedded(draw: Callable[..., Any], numbers: Iterator[int]) -> Callable[..., Markup]:
    """``draw``, as SVG in the page itself."""

    def embed(*args: Any) -> Markup:
        return Markup(f"<figure>{plots.svg(draw(*args), f'p{next(numbers)}')}</figure>")

    return embed


def _template() -> Any:
    """The template's macros."""
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
    drawn: dict[str, Callable[..., Any]]
    drawn = {
        "bars": plots.bars,
        "calibration_plot": plots.calibration,
        "scaling_plot": plots.scaling,
        "soak_plot": plots.soak,
        "targets_plot": plots.targets,
    }
    environment.globals |= {name: _embedded(draw, numbers) for name, draw in drawn.items()}
    environment.globals["one"] = {"median": 1.0}
    return environment.get_template(TEMPLATE).module


def render(folder: Path) -> str:
    """The page, as text.

    Raises:
        ConfigError: as :func:`read_records`, or matplotlib is missing.
    """
    records = read_records(folder)
    template = _template()
    sections = []
    for number, (record, samples) in enumerate(records):
        lacks = ""
        try:
            body = getattr(template, record["bench"], template.plain)(record, samples)
        except (jinja2.UndefinedError, KeyError) as error:
            # An older record may lack what its section shows now; it is shown as it is.
            lacks, body = str(error), template.plain(record, samples)
        sections.append(template.section(number, record, body, lacks))
    return str(template.page([record["bench"] for record, _ in records], sections))


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
