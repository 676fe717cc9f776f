"""``overlap-spec train``: an EAGLE-3, EAGLE or P-EAGLE head for the user's own target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_spec.cli.flags import with_flags
from overlap_spec.cli.terminal import stops
from overlap_spec.config import EMBEDDED
from overlap_spec.training.settings import HeadSettings

if TYPE_CHECKING:
    from overlap_spec.training.acceptance import Acceptance

# The target has a default here, which is no part of the settings.
HEAD_FLAGS = {name: "Training" for name in HeadSettings.__dataclass_fields__ if name != "target"}


@with_flags(HeadSettings, HEAD_FLAGS)
def train(
    target: Annotated[
        Path, typer.Option(help="Folder of the target.", show_default="the embedded model's")
    ] = EMBEDDED / "target",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU; by default torch's choice.")
    ] = None,
    **flags: Any,
) -> None:
    """Train a draft head for a target; the same command goes on after a stop."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from overlap_spec.training.own_head import train_head
    from overlap_spec.training.progress import COLUMNS, Bars
    from overlap_spec.worker.site import pick_device

    if threads is not None:
        torch.set_num_threads(threads)
    settings = HeadSettings(target, **flags)
    console = Console()
    # Elsewhere it would end in an empty line, of bars that were never shown too.
    shown = Progress(*COLUMNS, console=console, disable=not console.is_terminal)
    with stops() as asked, shown as progress:
        bars = Bars(progress, asked)
        try:
            found = train_head(settings, pick_device(device), bars)
        except KeyboardInterrupt:
            bars.note(f"stopped; the same command goes on from {settings.out}")
            raise
    show(found, settings.out)


def show(found: Acceptance, out: Path) -> None:
    """Print what the head's drafts are worth."""
    from rich.console import Console
    from rich.table import Table

    table = Table("position", "tried", "accepted", title="drafts on prompts kept apart, greedy")
    for place, (tried, share) in enumerate(zip(found.tried, found.by_position, strict=True), 1):
        table.add_row(str(place), str(tried), f"{share:.3f}")
    console = Console()
    console.print(table)
    if not any(found.accepted):
        console.print(
            "none of its drafts was accepted: with this head decoding is slower than without. "
            "Give it more --minutes or --epochs, or prompts like those that it will see.",
            style="yellow",
            soft_wrap=True,
        )
    console.print(
        f"accept length {found.length:.2f} with a chain of {len(found.tried)}; head: {out}",
        highlight=False,
        soft_wrap=True,
    )
