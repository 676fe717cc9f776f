"""The cuts of forced text into tokens: which ones a branch of a draft may go on with.

A number of a table is ``token << 5 | bytes``, -1 is none; entry ``[p, i]`` is a token with which
the text can go on from its byte p on (`grammar/cuts.py` makes them). What a branch has of the text
is the byte behind its last token: CUT_BYTES where nothing is known of what follows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.drafters.base import Roots
from overlap_spec.types import CUT_BYTES

LENGTH_BITS = 5
LENGTH = (1 << LENGTH_BITS) - 1


class Cuts:
    """The cuts behind each root.

    Attributes:
        start: int64 ``(B, 1)``: the byte behind the root.
    """

    def __init__(self, roots: Roots) -> None:
        if roots.cuts is None or roots.cut_at is None:
            self.start = torch.full_like(roots.tokens, CUT_BYTES)[:, None]
            self._table = self.start[:, :, None].to(torch.int32)
        else:
            self._table, self.start = roots.cuts, roots.cut_at[:, None]

    def at(self, place: Tensor) -> Tensor:
        """The numbers from the bytes ``place (B, m)`` on: ``(B, m, CUT_TOKENS)``."""
        index = place.clamp(max=CUT_BYTES - 1)[:, :, None].expand(-1, -1, self._table.shape[2])
        return torch.where(place[:, :, None] < CUT_BYTES, self._table.gather(1, index), -1)

    def after(self, place: Tensor, numbers: Tensor, tokens: Tensor) -> Tensor:
        """The bytes behind children ``tokens (B, m, c)`` of nodes at ``place (B, m)``, of which
        ``numbers`` are :meth:`at` their places: ``(B, m, c)``."""
        return _moved(place[:, :, None], numbers[:, :, None], tokens)


def cuts_after(cuts: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """What is known behind new roots: the table and the byte, as in :class:`Roots`.

    Args:
        cuts: int32 ``(S, CUT_BYTES * CUT_TOKENS)``: those behind the last accepted nodes.
        chosen: int64 ``(S,)``: the bonus tokens.
    """
    table = cuts.view(cuts.shape[0], CUT_BYTES, -1)
    return table, _moved(torch.zeros_like(chosen), table[:, 0], chosen)


def _moved(place: Tensor, numbers: Tensor, tokens: Tensor) -> Tensor:
    """``place (...)`` behind ``tokens (...)``, where these are among ``numbers (..., K)``."""
    same = (numbers >> LENGTH_BITS == tokens[..., None]) & (numbers >= 0)
    length = torch.where(same, numbers & LENGTH, 0).amax(-1).long()
    return torch.where(length > 0, place + length, CUT_BYTES).clamp(max=CUT_BYTES)
