"""What attention's kernels take on each architecture, compiled without a GPU.

``python -m tests.support.attention_figures [--sm 90 ...] [--head-dim 128 ...]`` prints a table:
waits for copies inside the loop (how many later copies may still be under way then), registers a
thread, what is spilt, shared memory a program, and how many programs a multiprocessor holds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.kernel_work import Draw, Work, attention, ragged
from overlap_spec.kernels import tuning
from overlap_spec.kernels.tuning import Config
from tests.support.kernel_ir import KIB, Figures, figures, noted

CAPABILITIES = (80, 89, 90, 100, 120)
HEAD_DIMS = (32, 64, 128, 256)
HALF = Draw(torch.device("cpu"), torch.bfloat16, 0)


def sliding(work: Work) -> Work:
    """The same within a window of 1024 tokens."""

    def draw() -> tuple[Any, ...]:
        return *work.draw(), 1024

    return replace(work, name=f"{work.name}/sliding", draw=draw)


def works(head_dim: int) -> dict[str, Work]:
    """A tree's 64 rows, a larger tree's 256, a prefill's, and the draft cache's."""
    tree = partial(attention, HALF, 1, tree=True, head_dim=head_dim)
    found = {
        "tree of 16": tree(16, 32768),
        "tree of 64": tree(64, 32768),
        "prefill": attention(HALF, 1, 2048, 6144, head_dim=head_dim),
        "draft": tree(8, 4096, first=1),
    }
    if head_dim == 128:
        found["sliding tree"] = sliding(tree(16, 32768))
        found["sliding prefill"] = sliding(attention(HALF, 1, 2048, 6144))
        found["ragged trees"] = ragged(HALF, (16, 3, 9), 4096, 16)
        found["chunks"] = ragged(HALF, (1536, 300, 212), 1024)
    return found


def compiled(work: Work, capability: int, folder: Path, **blocks: int) -> Figures:
    """Attention's own kernel, by the table of an architecture with ``blocks`` in place of its."""
    table = tuning.table(f"sm_{capability}")
    assert work.config is not None
    entry: Config = table[work.config] | blocks
    launches = noted(work, {**table, work.config: entry})
    (one,) = (one for one in launches if one.kernel.__name__ == "_attend")
    return figures(one, capability, folder)


def rows(capabilities: Sequence[int], head_dims: Sequence[int]) -> Iterator[str]:
    """The table's lines, in Markdown."""
    yield "| head size, work | sm | waits | registers | spilt | shared memory | programs an SM |"
    yield "|---|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for dim in head_dims:
            for name, work in works(dim).items():
                for sm in capabilities:
                    found = compiled(work, sm, Path(folder))
                    waits = ", ".join(map(str, found.waits))
                    yield (
                        f"| {dim}, {name} | {sm} | {waits} | {found.registers} "
                        f"| {found.stack_bytes} B | {found.shared_bytes / KIB:.1f} KiB "
                        f"| {found.programs} |"
                    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.attention_figures")
    parser.add_argument("--sm", type=int, nargs="+", default=CAPABILITIES, choices=CAPABILITIES)
    parser.add_argument(
        "--head-dim", type=int, nargs="+", default=HEAD_DIMS, choices=(16, *HEAD_DIMS)
    )
    options = parser.parse_args(arguments)
    for line in rows(options.sm, options.head_dim):
        print(line, flush=True)


if __name__ == "__main__":
    main()
