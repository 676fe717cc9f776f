"""What the compute stream does in a step: draft, verify, choose, accept, extend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec.drafters.base import Drafter, Roots
from overlap_spec.kernels import Tree, accept_path, apply_bitmask, build_chain
from overlap_spec.models.decoder import Decoder
from overlap_spec.worker.batch import Batch
from overlap_spec.worker.kv_pool import KVPool, PagedAttend, join
from overlap_spec.worker.sampler import Nodes, Sampler
from overlap_spec.worker.tables import Needs, RowTables


class Drafted(NamedTuple):
    """Trees behind the roots, or none where a step only prefills."""

    roots: Roots
    tree: Tree | None


class Verified(NamedTuple):
    """``logits (L, V)`` of the verified nodes, trees first; the drafter's ``features`` of all."""

    logits: Tensor
    features: Tensor | None


class Emitted(NamedTuple):
    """What every verified request got.

    ``lengths`` int64 ``(R,)``: accepted drafts. ``tokens`` int64 ``(R, W)``: the target's choices
    along the accepted path, of which ``lengths + 1`` count; the last may be negative. ``path``
    int64 ``(B, W)``: the trees' accepted nodes. ``logprobs``: log-probability of each of
    ``tokens``, and the best ones and their ids: ``(R, W)``, ``(R, W, n)``, ``(R, W, n)``.
    """

    lengths: Tensor
    tokens: Tensor
    path: Tensor | None
    logprobs: tuple[Tensor, Tensor, Tensor] | None


class Passes:
    """The models of a worker and what is computed with them."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        tables: RowTables,
        pool: KVPool,
        draft_pool: KVPool | None,
    ) -> None:
        self.target, self.drafter, self.tables = target, drafter, tables
        self.pool, self.draft_pool = pool, draft_pool
        self.sampler = Sampler(tables)
        self.device = tables.device
        self.last_position = target.config.max_position - 1
        if drafter is not None:
            # One feature a page, so that a prefix can be reused with the drafter's cache.
            width = len(drafter.feature_layers) * target.config.hidden_size
            self.page_features = pool.k.new_zeros(pool.k.shape[1], width)

    def draft(self, batch: Batch) -> Drafted:
        """Enter the plan's pages, then grow the trees."""
        plan, tables = batch.plan, self.tables
        tables.pages.view(-1)[batch.page_index] = batch.page_values
        for pool in (self.pool, self.draft_pool):
            if pool is not None:
                pool.see(plan.max_keys)
        rows = batch.tree_rows
        roots = Roots(rows, tables.roots[rows], tables.committed[rows])
        if not batch.trees:
            return Drafted(roots, None)
        if self.drafter is None or plan.tier.steps == 0:
            nothing = roots.tokens.new_zeros(batch.trees, 0)
            return Drafted(roots, build_chain(roots.tokens, nothing))
        return Drafted(roots, self.drafter.draft(roots, plan.tier))

    def verify(self, batch: Batch, drafted: Drafted) -> Verified:
        """The target over all nodes and all chunks in one pass."""
        roots, tree = drafted
        tokens, positions, parts = [batch.tokens], [batch.positions], []
        nodes = 0
        if tree is not None:
            nodes = tree.tokens.numel()
            place = self._within(roots.positions[:, None] + tree.depths)
            slots = roots.positions[:, None] + self._count(tree.tokens.shape[1])
            tokens.insert(0, tree.tokens.flatten())
            positions.insert(0, place.flatten())
            mask = tree.ancestors if batch.plan.tier.top_k > 1 else None
            parts.append(self.pool.attend(roots.rows, slots, roots.positions, place, mask))
        parts += self._chunk_parts(batch, self.pool)
        layers = self.drafter.feature_layers if self.drafter is not None else ()
        hidden, features = self.target(torch.cat(tokens), torch.cat(positions), join(parts), layers)
        if batch.plan.chunks:
            hidden = hidden[torch.cat([self._count(nodes), batch.last + nodes])]
        return Verified(self.target.logits(hidden), features)

    def choose(
        self,
        batch: Batch,
        drafted: Drafted,
        verified: Verified,
        needs: Needs,
        masks: tuple[Tensor, Tensor, Tensor] | None,
    ) -> Emitted:
        """Mask, choose at every node, accept, and commit: the step's one decision.

        Args:
            masks: Mask rows int32 ``(L, words)``, depth limits int64 ``(R,)`` and the rows to
                which masks apply; None where no request has a grammar.
        """
        logits, tree = verified.logits, drafted.tree
        limits = None
        if masks is not None:
            apply_bitmask(logits, masks[0], masks[2])
            limits = masks[1][: batch.trees]
        if needs.plain:
            own = self.tables.depth_limit[batch.tree_rows]
            limits = own if limits is None else torch.minimum(limits, own)
        nodes = self._nodes(batch, drafted)
        logits = self.sampler.process(logits, nodes, needs)
        choices = self.sampler.choose(logits, nodes, needs)
        emitted = self._accept(batch, drafted, choices, limits)
        if needs.top_logprobs is None:
            return emitted
        index = len(choices) - len(batch.final_rows) + self._count(len(batch.final_rows))
        index = index[:, None].expand(-1, emitted.tokens.shape[1])
        if tree is not None and emitted.path is not None:
            first = self._count(batch.trees)[:, None] * tree.tokens.shape[1]
            index = torch.cat([first + emitted.path, index])
        log_probs = logits[index].log_softmax(-1)
        own = log_probs.gather(2, emitted.tokens.clamp(min=0)[:, :, None])[:, :, 0]
        best = log_probs.topk(min(needs.top_logprobs, logits.shape[1]))
        return Emitted(emitted.lengths, emitted.tokens, emitted.path, (own, *best))

    def _accept(
        self, batch: Batch, drafted: Drafted, choices: Tensor, limits: Tensor | None
    ) -> Emitted:
        tables, (roots, tree), plan = self.tables, drafted, batch.plan
        singles = choices[len(choices) - len(batch.final_rows) :]
        tokens, lengths, path = singles[:, None], torch.zeros_like(singles), None
        tables.committed[batch.chunk_rows] = batch.chunk_starts + batch.chunk_sizes
        if tree is not None:
            width = plan.tier.steps + 1
            accepted = accept_path(
                choices[: tree.tokens.numel()].view_as(tree.tokens), tree, width, limits
            )
            path = accepted.path
            along = choices[: tree.tokens.numel()].view_as(tree.tokens).gather(1, path)
            tokens = torch.cat([along, tokens.expand(-1, width)])
            lengths = torch.cat([accepted.lengths, lengths])
            if plan.tier.top_k > 1:
                base = roots.positions[:, None]
                self.pool.move(roots.rows, base + path, base + self._count(width))
            tables.committed[roots.rows] += accepted.lengths + 1
        tables.roots[batch.rows] = tokens.gather(1, lengths[:, None])[:, 0].clamp(min=0)
        return Emitted(lengths, tokens, path, None)

    def extend(self, batch: Batch, drafted: Drafted, verified: Verified, emitted: Emitted) -> None:
        """Feed the drafter what was committed: each token with the feature before it."""
        pool, features, roots = self.draft_pool, verified.features, drafted.roots
        if self.drafter is None or features is None or pool is None:
            return
        chosen = emitted.tokens.clamp(min=0)
        own = features[len(features) - len(batch.tokens) :]
        following = batch.extend_tokens.clone()
        following[batch.chosen] = chosen[batch.trees :, 0]
        before = torch.cat([self.page_features[batch.chunk_pages], own])[batch.extend_features]
        tokens, positions, parts = [following], [self._within(batch.extend_positions)], []
        last, kept = [batch.chosen], [before]
        self._keep_features(batch.token_rows, batch.positions, own)
        if drafted.tree is not None and emitted.path is not None:
            width, nodes = chosen.shape[1], drafted.tree.tokens.shape[1]
            each = self._count(batch.trees)[:, None]
            slots = roots.positions[:, None] + 1 + self._count(width)
            place = self._within(slots)
            along = features[(each * nodes + emitted.path).flatten()]
            tokens.insert(0, chosen[: batch.trees].flatten())
            positions.insert(0, place.flatten())
            parts.append(pool.attend(roots.rows, slots, slots[:, 0], place, None))
            last = [
                each[:, 0] * width + emitted.lengths[: batch.trees],
                batch.chosen + batch.trees * width,
            ]
            kept.insert(0, along)
            rows = roots.rows[:, None].expand(-1, width).flatten()
            self._keep_features(rows, (slots - 1).flatten(), along)
        parts += self._chunk_parts(batch, pool, chosen=True)
        self.drafter.extend(
            torch.cat(tokens),
            torch.cat(kept),
            torch.cat(positions),
            join(parts),
            batch.rows,
            torch.cat(last),
        )

    def _keep_features(self, rows: Tensor, positions: Tensor, features: Tensor) -> None:
        """Keep the feature of every page's last token, for who starts behind that page.

        Tokens that a tree rejected write to pages that are not full yet, and are overwritten.
        """
        size = self.pool.page_size
        page = self.tables.pages[rows, positions // size]
        ends = (positions + 1) % size == 0
        self.page_features[torch.where(ends, page, 0)] = features

    def count_output(self, batch: Batch, emitted: Emitted, needs: Needs) -> None:
        """Enter the emitted tokens into the penalties' counts."""
        if needs.penalised:
            self.tables.count_output(batch.rows, emitted.tokens, emitted.lengths)

    def _nodes(self, batch: Batch, drafted: Drafted) -> Nodes:
        rows = batch.final_rows
        positions = batch.positions[batch.last] + 1
        if drafted.tree is not None:
            after = drafted.roots.positions[:, None] + drafted.tree.depths + 1
            rows = torch.cat([drafted.roots.rows.repeat_interleave(after.shape[1]), rows])
            positions = torch.cat([after.flatten(), positions])
        return Nodes(rows, positions, drafted.tree)

    def _chunk_parts(self, batch: Batch, pool: KVPool, chosen: bool = False) -> list[PagedAttend]:
        """Causal attention of each chunk; ``chosen``: with the token to be chosen behind it."""
        parts, first = [], 0
        slots = batch.extend_positions if chosen else batch.positions
        for index, chunk in enumerate(batch.plan.chunks):
            here = slice(first, first + len(chunk.tokens) + (chosen and chunk.final))
            parts.append(
                pool.attend(
                    batch.chunk_rows[index : index + 1],
                    slots[None, here],
                    batch.chunk_starts[index : index + 1],
                    self._within(slots[None, here]),
                    None,
                )
            )
            first = here.stop
        return parts

    def _within(self, positions: Tensor) -> Tensor:
        """Positions inside the context; what lies behind it is drafted in vain."""
        return positions.clamp(max=self.last_position)

    def _count(self, end: int) -> Tensor:
        return torch.arange(end, device=self.device)
