"""The target's choice at every node, with the history of that node's own path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec.kernels import Tree, apply_bitmask, apply_penalties, masked_choose, noise_keys
from overlap_spec.types import TokenLogprobs
from overlap_spec.worker.tables import RowTables, SamplingFeatures

# Entries of logits that are biased and penalised at once: of a vocabulary of 128k, 64 nodes.
BLOCK_ENTRIES = 1 << 23


@dataclass(frozen=True)
class Nodes:
    """Verified nodes: ``rows``, ``positions`` int64 ``(L,)``, each one's row and the position of
    the token chosen after it. ``tree``: whose they are; None: of no draft. ``pack`` int64 ``(L,)``:
    which of its nodes; None: the first."""

    rows: Tensor
    positions: Tensor
    tree: Tree | None
    pack: Tensor | None

    def numbers(self, here: slice) -> Tensor:
        """int64: the flat numbers of the nodes ``here`` among those of all trees."""
        if self.pack is not None:
            return self.pack[here]
        return torch.arange(here.start, here.stop, device=self.rows.device)


class Masks(NamedTuple):
    """Mask rows int32 ``(M, words)``, and which of them each node has: int64 ``(L,)``, -1 for none;
    None: each its own."""

    rows: Tensor
    places: Tensor | None

    def at(self, nodes: slice) -> Masks:
        """Those of these nodes."""
        if self.places is None:
            return Masks(self.rows[nodes], None)
        return Masks(self.rows, self.places[nodes])

    def packed(self, pack: Tensor, count: int) -> Masks:
        """Those of nodes ``pack``, of which those from node ``count`` on, padding, have none."""
        if self.places is None:
            return Masks(self.rows, torch.where(pack < count, pack, -1))
        return Masks(self.rows, self.places[pack])

    def of(self, index: Tensor) -> Tensor:
        """The rows of nodes ``index (n,)``: all ones where there is none."""
        if self.places is None:
            return self.rows[index]
        places = self.places[index]
        return torch.where((places >= 0)[:, None], self.rows[places.clamp(min=0)], -1)


class Sampler:
    """Bias, bans, minimum length, penalties, then the choice; skips what no row asks for."""

    def __init__(self, tables: RowTables) -> None:
        self.tables = tables

    def process(self, logits: Tensor, nodes: Nodes | None, features: SamplingFeatures) -> Tensor:
        """Logits as the choice sees them, but for the mask: ``(L, V)`` → ``(L, V)``; ``logits`` may
        be overwritten. ``nodes`` is needed where the features are ``by_node``."""
        if nodes is None or not features.changes_logits:
            return logits
        logits = logits.float()
        block = max(1, BLOCK_ENTRIES // logits.shape[1])
        for start in range(0, len(logits), block):
            here = slice(start, min(start + block, len(logits)))
            self._process_block(logits[here], nodes, here, features)
        return logits

    def _process_block(
        self, logits: Tensor, nodes: Nodes, here: slice, features: SamplingFeatures
    ) -> None:
        """:meth:`process` of the nodes ``here``, in place."""
        tables, rows = self.tables, nodes.rows[here]
        if features.biased:
            logits += tables.wide("bias", torch.float32)[rows]
        if features.banned:
            before = tables.recent[rows]
            if nodes.tree is not None:
                before = _along_path(before, nodes.tree, nodes.numbers(here))
            _ban(logits, tables.banned[rows], before)
        if features.min_tokens:
            early = nodes.positions[here] < tables.min_position[rows]
            stops = tables.wide("stops", torch.bool)[rows]
            logits.masked_fill_(stops.logical_and_(early[:, None]), -torch.inf)
        if features.penalised:
            counts = tables.output_counts[rows]
            if nodes.tree is not None:
                _add_path(counts, nodes.tree, nodes.numbers(here))
            factors = tables.repetition, tables.presence, tables.frequency
            apply_penalties(logits, counts, *(x[rows] for x in (tables.in_prompt, *factors)))

    def choose(
        self, logits: Tensor, nodes: Nodes | None, features: SamplingFeatures, masks: Masks | None
    ) -> Tensor:
        """The choice after each node: int64 ``(L,)``, -1 for an empty row, -2 for NaN. ``logits``
        may be overwritten."""
        allowed, places = (None, None) if masks is None else masks
        if nodes is None or not features.sampled:
            return masked_choose(logits, allowed, places)
        tables, rows = self.tables, nodes.rows
        keys, heat = noise_keys(tables.seed[rows], nodes.positions), tables.temperature[rows]
        kept = filters(tables, rows, features)
        return masked_choose(logits, allowed, places, heat, keys, kept)

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


def filters(
    tables: RowTables, rows: Tensor, features: SamplingFeatures
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Top-k, top-p and min-p of ``rows``; None where none asks for them."""
    if not features.filtered:
        return None
    return tables.top_k[rows], tables.top_p[rows], tables.min_p[rows]


def _along_path(recent: Tensor, tree: Tree, numbers: Tensor) -> Tensor:
    """int64 ``(L, K)``: the last tokens up to nodes ``numbers (L,)``: of ``recent (L, K)``, which
    end with the roots', and of the nodes' own paths."""
    nodes, count = tree.tokens.shape[1], recent.shape[1]
    trees, at = numbers // nodes, numbers % nodes
    depth, found = tree.depths[trees, at], []
    for above in range(count):
        own = tree.tokens[trees, at]
        known = recent.gather(1, (count - 1 - above + depth).clamp(max=count - 1)[:, None])
        found.append(torch.where(depth > above, own, known[:, 0]))
        at = tree.parents[trees, at].clamp(min=0)
    return torch.stack(found[::-1], 1)


def _ban(logits: Tensor, banned: Tensor, before: Tensor) -> None:
    """Forbid, in place, the last token of each sequence of ``banned (L, W, K)`` whose others are
    the last of ``before (L, K - 1)``."""
    first, last = banned[:, :, :-1], banned[:, :, -1]
    here = ((first < 0) | (first == before[:, None])).all(2) & (last >= 0)
    logits.scatter_add_(1, last.clamp(min=0), torch.where(here, -torch.inf, 0.0))


def _add_path(counts: Tensor, tree: Tree, numbers: Tensor) -> None:
    """Add to ``counts (L, vocab)`` each token on the paths of nodes ``numbers (L,)``, without the
    roots."""
    nodes = tree.tokens.shape[1]
    trees = numbers // nodes
    above = tree.ancestors[trees, numbers % nodes, 1:]
    counts.scatter_add_(1, tree.tokens[trees, 1:], above.to(counts.dtype))


def token_logprobs(own: Tensor, best: Tensor, ids: Tensor, top: int) -> tuple[TokenLogprobs, ...]:
    """One request's log-probabilities as values, of float32 ``own (n,)``, and of ``best`` and
    ``ids (n, k)``, k >= ``top``; tokens that the mask forbids are left out."""
    tops = zip(ids[:, :top].tolist(), best[:, :top].tolist(), strict=True)
    known = [tuple(p for p in zip(*each, strict=True) if p[1] != -torch.inf) for each in tops]
    return tuple(map(TokenLogprobs, own.tolist(), known))
