"""``overlap-spec doctor``: what is installed here, and what would be used."""

from __future__ import annotations

from typing import Any

import typer

from overlap_spec.cli.flags import engine_flags, with_flags
from overlap_spec.config import EngineConfig


@with_flags(EngineConfig, engine_flags("model", "algorithm", "draft"))
def doctor(**paths: Any) -> None:
    """Show the installed libraries, and the device, kernels and weights that would be used."""
    from rich.console import Console
    from rich.table import Table

    from overlap_spec.doctor import examine

    table = Table("what", "finding", "ok", title="overlap-spec doctor")
    findings = examine(**paths)
    for what, finding, good in findings:
        table.add_row(what, finding, "[green]yes[/]" if good else "[red]no[/]")
    console = Console()
    console.print(table)
    wrong = [f"{what}: {finding}" for what, finding, good in findings if not good]
    if wrong:
        for line in ("to mend:", *wrong):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1)
    console.print('all is fine; try: overlap-spec generate "Hello"', highlight=False)
