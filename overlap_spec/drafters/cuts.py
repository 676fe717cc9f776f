"""The cuts of forced text into tokens: which ones a branch of a draft may go on with.

A number of a table is ``token << 5 | bytes``, -1 is none; entry ``[p, i]`` is a token with which
the text can go on from its byte p on (`grammar/cuts.py` makes them). What a branch has of the text
is the byte behind its last token: CUT_BYTES where nothing is known of what follows it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.drafters.base import Roots
from overlap_spec.types import CUT_BYTES

LENGTH_BITS = 5
LENGTH = (1 << LENGTH_BITS) - 1


class Known(NamedTuple):
    """Tokens that may follow each of ``T`` branches, ``(T, CUT_TOKENS)`` each.

    ``own``: int64, draft ids. ``ids``: int64, target ids, -1 is none. ``bias``: float32, 0 or,
    where the drafter has no such token, -inf. ``ends``: int64, the bytes behind them.
    """

    own: Tensor
    ids: Tensor
    bias: Tensor
    ends: Tensor


class Cuts:
    """The cuts behind each root; where no root has any, all that this tells is None.

    Args:
        draft_ids: int64: of each target id the draft id, -1 is none; None: they are one.

    Attributes:
        start: int64 ``(B, 1)``: the byte behind the root.
    """

    start: Tensor | None = None

    def __init__(self, roots: Roots, draft_ids: Tensor | None) -> None:
        if roots.cuts is None or roots.cut_at is None:
            return
        self.start = roots.cut_at[:, None]
        # A last byte, behind which nothing is known.
        numbers = F.pad(roots.cuts, (0, 0, 0, 1), value=-1).long()
        byte = torch.arange(CUT_BYTES + 1, device=numbers.device)
        ids = numbers >> LENGTH_BITS
        own = ids
        if draft_ids is not None:
            last = draft_ids.shape[0] - 1
            own = torch.where(ids <= last, draft_ids[ids.clamp(min=0, max=last)], -1)
            own = torch.where(ids >= 0, own, -1)
        there = own >= 0
        bias = torch.where(there, 0.0, -torch.inf)
        ends = (byte[:, None] + (numbers & LENGTH)).clamp(max=CUT_BYTES)
        tables = torch.where(there, own, 0), ids, bias, ends
        self._tables = Known(*(table.flatten(0, 1) for table in tables))
        self._first = torch.arange(numbers.shape[0], device=byte.device)[:, None] * len(byte)

    def at(self, place: Tensor | None) -> Known | None:
        """What may follow branches whose last token ends at the bytes ``place (B, m)``."""
        if place is None:
            return None
        row = (self._first + place).flatten()
        return Known(*(table[row] for table in self._tables))

    def after(self, known: Known | None, tokens: Tensor) -> Tensor | None:
        """The bytes behind children ``tokens (T, c)`` of branches: ``(T, c)``."""
        if known is None:
            return None
        same = known.ids[:, None] == tokens[:, :, None]
        return torch.where(same, known.ends[:, None], CUT_BYTES).amin(-1)


def cuts_after(cuts: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """What is known behind new roots: the table and the byte, as in :class:`Roots`.

    Args:
        cuts: int32 ``(S, CUT_BYTES * CUT_TOKENS)``: those behind the last accepted nodes.
        chosen: int64 ``(S,)``: the bonus tokens.
    """
    table = cuts.view(cuts.shape[0], CUT_BYTES, -1)
    first = table[:, 0]
    same = (first >> LENGTH_BITS == chosen[:, None]) & (first >= 0)
    return table, torch.where(same, (first & LENGTH).long(), CUT_BYTES).amin(-1)
