"""``overlap-spec profile``: what steps cost on this machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from overlap_spec.cli.flags import engine_flags, with_flags
from overlap_spec.config import EngineConfig

if TYPE_CHECKING:
    from overlap_spec.speculation.cost import CostModel

# A fit that is off by more than this says little.
UNSURE = 0.5


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

    from overlap_spec.engine.profile import profile as measure

    console = Console(stderr=True)
    config = EngineConfig.build(**engine_flags)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring")

        def show_progress(done: tuple[int, int]) -> None:
            bar.update(task, completed=done[0], total=done[1])

        model, path = measure(config, show_progress)
    table = Table("cost", "time", title="overlap-spec profile")
    for about, ms in costs(model):
        table.add_row(about, in_units(ms))
    Console().print(table)
    for line in verdict(model, config.max_running_requests):
        print(line)
    print(f"saved as {path}")


def costs(model: CostModel) -> list[tuple[str, float]]:
    """What costs time, and its milliseconds; what was not measured is left out."""
    found = [
        ("a verify pass by itself", model.verify),
        ("each row in it", model.verify_node),
        (f"each row beyond {model.knee_nodes} besides", model.knee_node),
        ("each 1,000 tokens of context", 1000 * model.verify_context),
        ("a draft step by itself", model.draft),
        ("each token in it", model.draft_branch),
        ("each 1,000 tokens of context in it", 1000 * model.draft_context),
    ]
    return [(about, ms) for about, ms in found if ms > 0]


def in_units(ms: float) -> str:
    """A time in the unit that fits it, of three digits."""
    for unit, size in (("s", 1e3), ("ms", 1.0), ("µs", 1e-3)):
        if ms >= 0.9995 * size:
            value = ms / size
            return f"{value:.{max(0, 2 - int(math.log10(value * 1.0005)))}f} {unit}"
    return f"{ms * 1e6:.0f} ns"


def verdict(model: CostModel, rows: int) -> list[str]:
    """What the costs mean for drafts, at one request and at ``rows``."""
    from overlap_spec.speculation.cost import StepShape

    told = []
    for batch in sorted({1, rows}):
        plain, chain = (
            model.step_ms(StepShape(batch, 0, steps, 1, batch * (steps + 1))) for steps in (0, 5)
        )
        alone = f"{batch} at once: a step without drafts takes {in_units(plain)}"
        if model.draft or model.draft_branch:
            told.append(
                f"{alone}, with 5 {in_units(chain)}: they pay where a verify gives over "
                f"{chain / plain:.2f} tokens"
            )
        else:
            told.append(f"{alone}; nothing drafts: name a --draft")
    if (model.worst_error or 0) > UNSURE:
        told.append(
            f"the worst of the measured times is {model.worst_error:.0%} off: measure again "
            "without other work"
        )
    return told
