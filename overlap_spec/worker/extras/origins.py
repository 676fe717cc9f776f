"""How an output token came: drafted, grafted, chosen by the target, or forced by its mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlap_spec.steps import Int32s, Int64s
from overlap_spec.types import Delta, Origin, Request
from overlap_spec.worker.extras.base import Extra, Row, Surroundings


class Origins(Extra):
    """Tells of each output token how it came."""

    reads_rows = True

    def __init__(self, request: Request, engine: Surroundings) -> None:
        super().__init__(request, engine)
        self._origins: list[Origin] = []

    @staticmethod
    def read_row(row: Row) -> tuple[Origin, ...]:
        """One entry a token; the tree is walked again, along the tokens."""
        plain: list[Origin] = ["grafted"] * row.grafted
        plain += ["drafted"] * (row.accepted - row.grafted)
        plain += ["bonus"] * (len(row.tokens) - row.accepted)
        if row.masks is None:
            return tuple(plain)
        return token_origins(row.tokens, plain, row.links, row.masks)

    def take(self, told: Sequence[Origin], kept: int) -> None:
        self._origins += told[:kept]

    def attach(self, delta: Delta, first: int) -> Delta:
        return delta._replace(origins=tuple(self._origins[first:]))


def token_origins(
    tokens: Sequence[int], plain: Sequence[Origin], links: Int64s | None, rows: Int32s
) -> tuple[Origin, ...]:
    """``plain``, how ``tokens`` came as far as the drafts tell, with `forced` where one was all
    that its mask row allowed; ``tokens``, ``links`` and ``rows``: as of :class:`Row`."""
    node, origins = 0, list(plain)
    for index, token in enumerate(tokens):
        if node < 0:
            break
        if np.bitwise_count(rows[node].view(np.uint32)).sum() == 1:
            origins[index] = "forced"
        node = -1 if links is None else _child(links, node, token)
    return tuple(origins)


def _child(links: Int64s, node: int, token: int) -> int:
    """The child of ``node`` that drafts ``token``, or -1."""
    drafted, first_child, next_sibling = links
    child = int(first_child[node])
    while child >= 0 and drafted[child] != token:
        child = int(next_sibling[child])
    return child
