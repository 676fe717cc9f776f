"""What accept tells the host of a step's rows: columns of int64, packed on the device and read on
the host. A row is a tree's, or a final chunk's, which is a tree of its root alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overlap_spec.steps import RUN_TOKENS

SCORE_UNIT = 2.0**20
DEAD_SCORE = -(2.0**62)
NO_SCORE = DEAD_SCORE / SCORE_UNIT / 2


def row_width(steps: int) -> int:
    """Columns of a row whose tree was at most ``steps`` deep."""
    return 2 + (steps + 1) + (steps + 2) + RUN_TOKENS


def pack_rows(
    lengths: Tensor, living: Tensor, tokens: Tensor, scores: Tensor, behind: Tensor
) -> Tensor:
    """int64 ``(R, row_width(W - 1))``.

    Args:
        lengths: int64 ``(R,)``: accepted drafts.
        living: int64 ``(R,)``: drafts that were verified.
        tokens: int64 ``(R, W)``: the choices along the accepted path.
        scores: float32 ``(R, W + 1)``: along that path; last the best of what was refused behind
            it, -inf where nothing was.
        behind: int64 ``(R, RUN_TOKENS)``: as :meth:`GrammarDrafts.enter` tells it of the new root.
    """
    # Fixed point, since they travel among integers; -inf is far below any score.
    fixed = (scores * SCORE_UNIT).clamp(min=DEAD_SCORE).long()
    return torch.cat([lengths[:, None], living[:, None], tokens, fixed, behind], 1)


class PackedRow(NamedTuple):
    """One row, as the host reads it. ``tokens``: the accepted drafts and what was chosen behind
    them, negative where nothing was. ``behind``: the run behind the new root, and how many nodes of
    its trie are left, -1: it has none. ``confidences``: as of :class:`RowResult`."""

    drafted: int
    accepted: int
    tokens: list[int]
    behind: tuple[list[int], int]
    confidences: tuple[float, ...]


def read_rows(packed: Tensor, steps: int) -> Iterator[PackedRow]:
    """The rows of what :func:`pack_rows` made of trees at most ``steps`` deep, on the host."""
    numbers = packed.numpy()
    scores = numbers[:, 3 + steps : -RUN_TOKENS] / SCORE_UNIT
    last = scores[np.arange(len(scores)), numbers[:, 0]]
    with np.errstate(over="ignore"):
        # Behind the accepted ones there is no path.
        sure = np.exp(np.diff(scores[:, :-1])).tolist()
        refused = np.exp(scores[:, -1] - last).tolist()
    there = (scores[:, -1] > NO_SCORE).tolist()
    for told, accepted, best, is_there in zip(numbers.tolist(), sure, refused, there, strict=True):
        length = told[0]
        run = told[-RUN_TOKENS:-1]
        if run[-1] == -1:
            del run[run.index(-1) :]
        known = (*accepted[:length], best) if is_there else tuple(accepted[:length])
        yield PackedRow(told[1], length, told[2 : 3 + length], (run, told[-1]), known)
