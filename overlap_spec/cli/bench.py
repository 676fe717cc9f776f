"""``overlap-spec bench``: load on any server with OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_spec.cli.flags import with_flags
from overlap_spec.errors import ConfigError, EngineUnavailable, reason
from overlap_spec.load.settings import Load

if TYPE_CHECKING:
    from rich.table import Table

    from overlap_spec.load.measure import Target

SERVERS, LOAD = "Servers", "Load"
LOAD_FLAGS = {field.name: LOAD for field in fields(Load)}


@with_flags(Load, LOAD_FLAGS)
def bench(
    url: Annotated[
        list[str],
        typer.Option(
            help="A server, or NAME=URL; several take turns, and are compared with the first.",
            rich_help_panel=SERVERS,
        ),
    ],
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", help="Their key.", rich_help_panel=SERVERS),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model's name there; the first that is listed.", rich_help_panel=SERVERS
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Schemas with instances, .jsonl: id, schema, tests.",
            show_default="12 of our own",
            rich_help_panel=LOAD,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures there, and what each answer took."),
    ] = None,
    **flags: Any,
) -> None:
    """Ask servers for JSON under schemas, and tell times, rates and whether it is valid.

    Works with every server that speaks OpenAI's chat completions. The exit code is 1 if a request
    got no answer, or one that its schema does not allow.
    """
    import asyncio

    import httpx
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from overlap_spec.load.asks import OWN_SCHEMAS
    from overlap_spec.load.figures import rounded
    from overlap_spec.load.measure import draw_asks, measure, results

    load = Load(**flags)
    targets = read_targets(url, api_key, model)
    asks = draw_asks(load.workload, data or OWN_SCHEMAS, load.requests, load.max_tokens, load.seed)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        total = len(asks) * len(targets) * len(load.modes) * load.repetitions
        task = progress.add_task("first requests", total=total)

        def advance(server: str, loop: str) -> None:
            progress.update(task, advance=1, description=f"{server}: {loop} loop")

        try:
            rounds = asyncio.run(measure(targets, asks, load, advance))
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"--url: {type(error).__name__}: {error}") from None
    found = results(targets, rounds)
    if output is not None:
        told = asdict(load)
        del told["mode"], told["requests"]
        samples = [
            {"server": r.server, "mode": r.mode, "text": a.text, **a.sample()}
            for r in rounds
            for a in r.answers
        ]
        write(output, {**told, "servers": rounded(found), "samples": samples})
    out = Console()
    labels = short_names(found)
    for name, label in labels.items():
        if name != label:
            out.print(f"{label}: {name}", highlight=False, soft_wrap=True)
    out.print(table_of({labels[name]: modes for name, modes in found.items()}))
    faults = [answer.fault for each in rounds for answer in each.answers if answer.fault]
    if faults:
        console.print(f"{len(faults)} faults, the first: {faults[0]}", highlight=False)
        raise typer.Exit(1)


def read_targets(urls: Sequence[str], api_key: str | None, model: str | None) -> list[Target]:
    """The servers of ``--url``, named by their URLs where no name is given.

    Raises:
        ConfigError: no URL, or two of a name.
    """
    from overlap_spec.load.measure import Target

    targets = []
    for given in urls:
        name, sign, where = given.partition("=")
        if not sign or "://" in name:
            name, where = given, given
        where = where.rstrip("/").removesuffix("/v1")
        if not where.startswith(("http://", "https://")):
            raise ConfigError(f"--url must be http://… or NAME=http://…: {given!r}")
        targets.append(Target(name, where, api_key, model))
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise ConfigError(f"--url: two servers of one name: {', '.join(names)}")
    return targets


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record; ConfigError where that cannot be done."""
    try:
        path.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {reason(error)}") from None


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Each server's name → what a table calls it: a URL would take the figures' room."""
    return {
        name: f"server {number}" if "://" in name else name for number, name in enumerate(names, 1)
    }


def table_of(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Server → mode → figures, for reading: a column each; ``ratio`` where there is one."""
    from rich.table import Table

    columns = [(name, mode, each) for name, modes in found.items() for mode, each in modes.items()]
    table = Table("", *(f"{server}\n{mode} loop" for server, mode, _ in columns))
    for name, show in ROWS.items():
        cells = [show(figures) for *_, figures in columns]
        if any(cells) or name != RATIO:
            table.add_row(name, *(cell or "-" for cell in cells))
    return table


def pair(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Median and 99th percentile of a time in ms; empty where there is none."""
    return lambda figures: "{p50:.1f} / {p99:.1f}".format(**figures[name]) if figures[name] else ""


def one(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    """A number in its form; empty where there is none."""
    return lambda figures: "" if figures[name] is None else format(figures[name], form)


RATIO = "first ÷ this"
ROWS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "req/s": one("requests_per_second", ".2f"),
    "tok/s": one("output_tokens_per_second", ".1f"),
    RATIO: lambda figures: f"{figures['ratio']['median']:.2f}" if figures.get("ratio") else "",
    "TTFT p50 / p99 ms": pair("ttft_ms"),
    "TPOT p50 / p99 ms": pair("tpot_ms"),
    "ITL p50 / p99 ms": pair("itl_ms"),
    "valid": one("valid_share", ".1%"),
    "accept": one("accept_length", ".2f"),
}
