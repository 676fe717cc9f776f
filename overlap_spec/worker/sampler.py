"""The target's choice at every node, with the history of that node's own path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec.kernels import Tree, apply_bitmask, apply_penalties, masked_choose, noise_keys
from overlap_spec.types import TokenLogprobs
from overlap_spec.worker.tables import RowTables, SamplingFeatures


@dataclass(frozen=True)
class Nodes:
    """Verified nodes.

    ``rows``, ``positions`` int64 ``(L,)``: row of each node, and the position of the token chosen
    after it. ``tree``: whose nodes they are; None: of no draft. ``pack`` int64 ``(L,)``: which of
    its nodes; None: the first.
    """

    rows: Tensor
    positions: Tensor
    tree: Tree | None
    pack: Tensor | None


class Masks(NamedTuple):
    """Mask rows int32 ``(L, words)``, and whether each applies: bool ``(L,)``; None: all do."""

    rows: Tensor
    flags: Tensor | None

    def first(self, count: int) -> Masks:
        """Those of the first ``count`` nodes."""
        return Masks(self.rows[:count], None if self.flags is None else self.flags[:count])

    def last(self, count: int) -> Masks:
        """Those of the last ``count`` nodes."""
        start = len(self.rows) - count
        return Masks(self.rows[start:], None if self.flags is None else self.flags[start:])

    def packed(self, pack: Tensor, count: int) -> Masks:
        """Those of nodes ``pack``; none applies from node ``count`` on: padding."""
        inside = pack < count
        index = torch.where(inside, pack, 0)
        return Masks(self.rows[index], inside if self.flags is None else inside & self.flags[index])

    def of(self, index: Tensor) -> Tensor:
        """The rows of nodes ``index (n,)``: all ones where they do not apply."""
        rows = self.rows[index]
        return rows if self.flags is None else torch.where(self.flags[index, None], rows, -1)


class Sampler:
    """Bias, minimum length, penalties, then the choice; skips what no row of a step asks for."""

    def __init__(self, tables: RowTables) -> None:
        self.tables = tables

    def process(self, logits: Tensor, nodes: Nodes | None, features: SamplingFeatures) -> Tensor:
        """Logits as the choice sees them, but for the mask: ``(L, V)`` → ``(L, V)``.

        ``nodes`` is needed where the features are :attr:`SamplingFeatures.by_node`.
        """
        if nodes is None:
            return logits
        tables, rows = self.tables, nodes.rows
        if features.biased or features.min_tokens or features.penalised:
            logits = logits.float()
        if features.biased:
            logits = logits + tables.wide("bias", torch.float32)[rows]
        if features.min_tokens:
            early = nodes.positions < tables.min_position[rows]
            stops = tables.wide("stops", torch.bool)[rows]
            logits = logits.masked_fill(early[:, None] & stops, -torch.inf)
        if features.penalised:
            counts = tables.output_counts[rows]
            if nodes.tree is not None:
                drafted = _path_counts(nodes.tree, self.tables.vocab_size)
                pack = nodes.pack
                counts += drafted[: len(counts)] if pack is None else drafted[pack]
            logits = apply_penalties(
                logits,
                counts,
                tables.in_prompt[rows] | (counts > 0),
                tables.repetition[rows],
                tables.presence[rows],
                tables.frequency[rows],
            )
        return logits

    def choose(
        self,
        logits: Tensor,
        nodes: Nodes | None,
        features: SamplingFeatures,
        masks: Masks | None,
    ) -> Tensor:
        """The choice after each node: int64 ``(L,)``, -1 for an empty row, -2 for NaN.

        ``logits`` may be overwritten.
        """
        allowed, flags = (None, None) if masks is None else masks
        if nodes is None or not features.sampled:
            return masked_choose(logits, allowed, flags)
        tables, rows = self.tables, nodes.rows
        filters = None
        if features.filtered:
            filters = (tables.top_k[rows], tables.top_p[rows], tables.min_p[rows])
        keys = noise_keys(tables.seed[rows], nodes.positions)
        return masked_choose(logits, allowed, flags, tables.temperature[rows], keys, filters)

    def logprobs(
        self, logits: Tensor, index: Tensor, chosen: Tensor, top: int, masks: Masks | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the ``chosen (R, W)`` tokens after nodes ``index (R, W)``, and the
        ``top`` best ones and their ids: ``(R, W)``, ``(R, W, n)``, ``(R, W, n)``."""
        flat = index.flatten()
        found = logits[flat].float()
        if masks is not None:
            apply_bitmask(found, masks.of(flat))
        found = found.log_softmax(-1).view(*index.shape, -1)
        own = found.gather(2, chosen.clamp(min=0)[:, :, None])[:, :, 0]
        return own, *found.topk(min(top, logits.shape[1]))


def _path_counts(tree: Tree, vocab_size: int) -> Tensor:
    """Occurrences of each token on each node's path below the root: int32 ``(B * N, vocab)``."""
    batch, nodes = tree.tokens.shape
    counts = torch.zeros(batch, nodes, vocab_size, dtype=torch.int32, device=tree.tokens.device)
    drafted = tree.tokens[:, None, 1:].expand(batch, nodes, nodes - 1)
    counts.scatter_add_(2, drafted, tree.ancestors[:, :, 1:].to(torch.int32))
    return counts.flatten(0, 1)


def token_logprobs(own: Tensor, best: Tensor, ids: Tensor, top: int) -> tuple[TokenLogprobs, ...]:
    """One request's log-probabilities as values; tokens that the mask forbids are left out.

    Args:
        own: float32 ``(n,)`` of its tokens; ``best``, ``ids``: ``(n, k)`` with k >= ``top``.
    """
    rows = zip(own.tolist(), best[:, :top].tolist(), ids[:, :top].tolist(), strict=True)
    return tuple(
        TokenLogprobs(
            value,
            tuple((i, p) for i, p in zip(ids_row, best_row, strict=True) if p != -torch.inf),
        )
        for value, best_row, ids_row in rows
    )
