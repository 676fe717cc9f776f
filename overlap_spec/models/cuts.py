"""What a rank reads of a file's tensors: see :mod:`overlap_spec.models.shard`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """What is read of a file's tensor: runs of dimension ``dim``, one behind the other.

    Attributes:
        runs: First entry and length of each.
        size: Entries of the file's tensor.
    """

    dim: int
    runs: tuple[tuple[int, int], ...]
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """The runs of ``tensor``; a view where there is one, so that no more of a mapped file is
        read."""
        views = [tensor.narrow(self.dim, *run) for run in self.runs]
        return views[0] if len(views) == 1 else torch.cat(views, self.dim)

    def whole(self, shape: torch.Size) -> torch.Size:
        """Shape of the file's tensor, whose runs have ``shape``."""
        return torch.Size(self.size if i == self.dim else n for i, n in enumerate(shape))


def rows(run: tuple[int, int], count: int, width: int = 1) -> Cut:
    """A run of ``count`` groups of ``width`` rows."""
    return Cut(0, ((run[0] * width, run[1] * width),), count * width)


def columns(run: tuple[int, int], count: int, width: int = 1, dim: int = 1) -> Cut:
    """A run of ``count`` groups of ``width`` entries of dimension ``dim``."""
    return Cut(dim, ((run[0] * width, run[1] * width),), count * width)


def behind_each_other(cuts: Iterator[Cut] | list[Cut]) -> Cut:
    """The cut of a tensor that holds the cuts' tensors as one, row behind row."""
    runs, start = [], 0
    for cut in cuts:
        runs += [(start + first, length) for first, length in cut.runs]
        start += cut.size
    return Cut(0, tuple(runs), start)
