"""Finding block sizes on this GPU, and writing them as its table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench.common import ROOT
from bench.kernel_work import Draw, Work, attention, latents, works
from overlap_spec.kernels.tuning import Config, Table, own_table, trial

FOLDER = ROOT / "kernels" / "tuning"
Measure = Callable[[Work], float]
Grid = dict[str, tuple[int, ...]]
# Attention that tables are tuned on: requests, queries of each, and the prefix before them.
SIZES = ((1, 16, 4096), (32, 16, 2048), (8, 1, 2048), (1, 64, 16384), (1, 1024, 1024))


def grids(name: str) -> tuple[Grid, ...]:
    """What is tried for an entry, one grid after the other: each around the best so far."""
    if name.startswith("attention."):
        blocks: Grid = {
            "rows": (64, 128) if ".prefill/" in name else (16, 32, 64),
            "keys": (16, 32, 64),
            "num_warps": (4, 8),
            "num_stages": (2, 3, 4),
        }
        return blocks, {"waves": (1, 2, 4), "split_keys": (128, 256, 512)}
    if name.startswith("experts"):
        rows = (32, 64, 128) if name.endswith("/many") else (16, 32)
        blocks = {"rows": rows, "columns": (32, 64, 128), "depth": (32, 64, 128)}
        return blocks, {"num_warps": (2, 4, 8), "num_stages": (2, 3, 4)}
    if name in ("rms_norm", "rope", "move_kv"):
        return ({"elements": (1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8)},)
    return ({"block": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)},)


def candidates(now: Config, grid: Grid) -> Iterator[Config]:
    """All of a grid around ``now``, which comes first."""
    yield now
    for values in itertools.product(*grid.values()):
        tried = now | dict(zip(grid, values, strict=True))
        if tried != now:
            yield tried


def tuning_works(device: torch.device, seed: int) -> dict[str, list[Work]]:
    """Entry → works that it is tuned on: all that it rules, and attention at every head size."""
    found: dict[str, list[Work]] = {}
    draw = Draw(device, torch.bfloat16, seed)
    both = draw, Draw(device, torch.float32, seed)
    extra = [
        attention(d, batch, queries, prefix, tree=queries <= 64, head_dim=dim)
        for d in both
        for dim in (32, 64, 128, 256)
        for batch, queries, prefix in SIZES
    ]
    extra += [latents(d, *size, tree=size[1] <= 64) for d in both for size in SIZES]
    for work in [*works(draw), *extra]:
        if work.config is not None:
            found.setdefault(work.config, []).append(work)
    return found


def tune(
    entries: dict[str, list[Work]], now: Table, measure: Measure, tell: Callable[[str], None]
) -> Table:
    """The best of the candidates of each entry.

    Best is the least geometric mean of its works' times, each over what serves now; a candidate
    must win by 2 in 100, or what serves now stays.
    """
    best: Table = {}
    for name, group in entries.items():
        base: list[float] = []
        winner, lead = now[name], 0.98
        for grid in grids(name):
            for config in candidates(winner, grid):
                try:
                    with trial(**{name.replace("/", "__"): config}):
                        times = [measure(work) for work in group]
                except Exception as error:
                    # Too much shared memory, or too many registers: only the compiler knows.
                    if not base or "out of resource" not in str(error):
                        raise
                    continue
                base = base or times
                ratios = [t / b for t, b in zip(times, base, strict=True)]
                score = float(torch.tensor(ratios, dtype=torch.float64).log().mean().exp())
                if score < lead:
                    winner, lead = config, score
        best[name] = winner
        tell(f"{name}: {winner}, {1 - min(lead, 1.0):.0%} faster" if base else name)
    return best


def source(found: Table, about: str) -> str:
    """A table as Python source."""
    lines = [f'"""Block sizes measured by `python -m bench.kernels --tune`: {about}."""', ""]
    lines += ["from __future__ import annotations", "", "TABLE: dict[str, dict[str, int]] = {"]
    for name, config in found.items():
        lines.append(f'    "{name}": {{')
        lines += [f'        "{key}": {value},' for key, value in config.items()]
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def write(architecture: str, found: Table, about: str, folder: Path = FOLDER) -> Path:
    """Write the table of an architecture, beside the entries that it has; its path."""
    path = folder / f"{architecture}.py"
    path.write_text(source(own_table(architecture) | found, about), encoding="utf-8")
    return path
