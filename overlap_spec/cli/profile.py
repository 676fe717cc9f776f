"""``overlap-spec profile``: what steps cost on this machine."""

from __future__ import annotations

from typing import Any

from overlap_spec.cli.flags import engine_flags, with_flags
from overlap_spec.config import EngineConfig


@with_flags(
    EngineConfig,
    engine_flags(
        "model", "dtype", "device", "threads", "algorithm", "draft", "max_running_requests"
    ),
)
def profile(**engine_flags: Any) -> None:
    """Measure what steps cost here, for the policies auto and adaspec; kept in the user's cache."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from overlap_spec.engine.cost_model import profile as measure

    console = Console(stderr=True)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring")

        def show_progress(done: tuple[int, int]) -> None:
            bar.update(task, completed=done[0], total=done[1])

        model, path = measure(EngineConfig.build(**engine_flags), show_progress)
    table = Table("cost", "ms", title="overlap-spec profile")
    for name, value in model.to_dict().items():
        if isinstance(value, float) and "error" not in name:
            table.add_row(name.replace("_", " "), f"{value:.5f}")
    Console().print(table)
    knee = f"from {model.knee_nodes} rows on" if model.knee_nodes else "none"
    print(f"knee of verify: {knee}")
    print(f"error of the fit: median {model.error or 0:.1%}, worst {model.worst_error or 0:.1%}")
    print(f"saved as {path}")
