"""What the worker asks of a drafter, and what it lends to one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from overlap_spec.kernels import Tree
from overlap_spec.models.decoder import Attend
from overlap_spec.types import Tier


class DraftCache(Protocol):
    """The worker's paged cache for a drafter with keys of its own.

    Slot i of a sequence holds (feature of position i - 1, token i): slot 0 does not exist, and a
    page's content depends on nothing behind it.
    """

    def attend(
        self, pages: Tensor, slots: Tensor, prefix: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Attend:
        """Attention of one rectangle of queries.

        Args:
            pages: int64 ``(B, P)``: :attr:`Roots.pages`.
            slots: int64 ``(B, Q)``: logical slots into which the queries' own keys go.
            prefix, positions, mask: As in :class:`overlap_spec.kernels.KeySpan`.
        """


@dataclass(frozen=True)
class Roots:
    """The trees' roots, int64: ``rows (B,)`` and their ``pages (B, P)``, last committed
    ``tokens (B,)`` and their ``positions (B,)``."""

    rows: Tensor
    pages: Tensor
    tokens: Tensor
    positions: Tensor


class Drafter(nn.Module, ABC):
    """Proposes a tree behind each root; learns what was accepted.

    Both are recorded once and replayed for batches of other sizes: what they do depends on shapes
    and on the tier alone, sizes are taken from ``tensor.shape``, no result is read on the host,
    and what they keep between calls is a registered buffer, written in place.

    ``feature_layers``: layers of the target whose inputs :meth:`extend` receives.
    """

    feature_layers: tuple[int, ...] = ()

    @abstractmethod
    def draft(self, roots: Roots, tier: Tier) -> Tree:
        """Trees of ``tier.nodes`` nodes, at most ``tier.steps`` deep; ``tier.steps`` >= 1."""

    @abstractmethod
    def extend(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor,
        last: Tensor,
    ) -> None:
        """Take in committed tokens, so that the next draft can start behind them.

        Args:
            tokens, positions: int64 ``(T,)``: tokens and their positions.
            features: ``(T, len(feature_layers) * hidden)`` of the positions before.
            attend: Attention over the drafter's cache for these tokens.
            rows, last: int64 ``(B,)``: the new root of ``rows[b]`` is token number ``last[b]``.
        """
