"""``overlap-spec train``: an EAGLE-3, EAGLE or P-EAGLE head for the user's own target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overlap_spec.cli.terminal import stops
from overlap_spec.config import EMBEDDED

if TYPE_CHECKING:
    from overlap_spec.training.acceptance import Acceptance


def train(
    data: Annotated[
        Path, typer.Option(help="File with a chat (messages) or a text (text) a line, .jsonl.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the head; a stopped one is gone on with.")],
    target: Annotated[
        Path, typer.Option(help="Folder of the target.", show_default="the embedded model's")
    ] = EMBEDDED / "target",
    algorithm: Annotated[
        str,
        typer.Option(
            "--algorithm",
            "--head",
            help="Kind of head: eagle3, eagle (EAGLE-1 and EAGLE-2) or parallel (P-EAGLE).",
        ),
    ] = "eagle3",
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data; 1 by default.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="From start to end, answers and check too; in place of epochs."),
    ] = None,
    own_answers: Annotated[
        bool, typer.Option("--own-answers", help="Learn from the target's own greedy answers.")
    ] = False,
    max_length: Annotated[int, typer.Option(help="Longer rows are cut, in tokens.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step, with padding.")] = 4096,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Most tokens that the head can draft: the data's most frequent.")
    ] = 32000,
    cache_features: Annotated[
        bool, typer.Option("--cache-features", help="Keep the target's features on disk.")
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the passes: slow to start, faster then.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same order of the data.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU; by default torch's choice.")
    ] = None,
) -> None:
    """Train a draft head for a target; the same command goes on after a stop."""
    import torch
    from rich.progress import Progress

    from overlap_spec.training.own_head import HeadSettings, train_head
    from overlap_spec.training.progress import COLUMNS, Bars
    from overlap_spec.worker.build import pick_device

    if threads is not None:
        torch.set_num_threads(threads)
    settings = HeadSettings(
        target=target,
        data=data,
        out=out,
        algorithm=algorithm,
        epochs=1.0 if epochs is None and minutes is None else epochs,
        minutes=minutes,
        own_answers=own_answers,
        max_length=max_length,
        batch_tokens=batch_tokens,
        draft_vocab_size=draft_vocab_size,
        cache_features=cache_features,
        compile=compile,
        seed=seed,
    )
    with stops() as asked, Progress(*COLUMNS) as progress:
        bars = Bars(progress, asked)
        try:
            found = train_head(settings, pick_device(device), bars)
        except KeyboardInterrupt:
            bars.note(f"stopped; the same command goes on from {out}")
            raise
    show(found, out)


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
