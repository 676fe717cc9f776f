"""``overlap-spec bench``: load on any server with OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_spec.cli.flags import with_flags
from overlap_spec.cli.request import reason
from overlap_spec.errors import ConfigError, EngineUnavailable
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
    Console().print(table_of(found))
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


def table_of(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Server → mode → figures, for reading; ``ratio`` where there is one."""
    from rich.table import Table

    compared = any("ratio" in figures for modes in found.values() for figures in modes.values())
    heads = ("server", "loop", "req/s", "tok/s", *(("first ÷ this",) if compared else ()))
    times = ("TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "ITL p50 / p99 ms")
    table = Table(*heads, *times, "valid", "accept")
    for server, modes in found.items():
        for mode, figures in modes.items():
            ratio, accept = figures.get("ratio"), figures["accept_length"]
            valid = figures["valid_share"]
            pairs = [
                f"{figures[name]['p50']:.1f} / {figures[name]['p99']:.1f}" if figures[name] else "-"
                for name in ("ttft_ms", "tpot_ms", "itl_ms")
            ]
            table.add_row(
                server,
                mode,
                f"{figures['requests_per_second']:.2f}",
                f"{figures['output_tokens_per_second']:.1f}",
                *((f"{ratio['median']:.2f}" if ratio else "-",) if compared else ()),
                *pairs,
                "-" if valid is None else f"{valid:.1%}",
                "-" if accept is None else f"{accept:.2f}",
            )
    return table
