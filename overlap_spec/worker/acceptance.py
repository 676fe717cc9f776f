"""Which drafts are accepted where a draft need not be the target's own choice."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.kernels import (
    Odds,
    Tree,
    accept_by_rejection,
    accept_by_threshold,
    coins,
    noise_keys,
    relaxed_children,
    sampled_probs,
)
from overlap_spec.kernels.sampling import ACCEPT, RESIDUAL, draw, negative_exponentials
from overlap_spec.worker.sampler import Masks, Nodes
from overlap_spec.worker.tables import RowTables, SamplingFeatures

# Tokens from which a draft is drawn under rejection: real odds, of a truncated distribution.
SUPPORT = 32


class AcceptanceRule:
    """The settings' rule, over all nodes of a step: it changes what is chosen after them.

    Only sampled rows have a rule but the exact one; relaxed acceptance is for all rows.
    """

    def __init__(self, config: EngineConfig, tables: RowTables) -> None:
        self.tables, self.name = tables, config.acceptance
        self.single, self.total = config.threshold_single, config.threshold_acc
        self.top_k, self.delta = config.relaxed_topk, config.relaxed_delta
        if self.single >= 1 or self.name != "threshold":
            # A draft that is certain passes anyhow; rounding must not make others so.
            self.single = 2.0

    @property
    def support(self) -> int:
        """:attr:`overlap_spec.drafters.base.Roots.support` of sampled rows."""
        return SUPPORT if self.name == "rejection" else 0

    @property
    def coupled(self) -> bool:
        """Whether drafts share the noise of the target's choices; else they are the likeliest."""
        return self.name != "threshold"

    def applies(self, features: SamplingFeatures, free: Tensor | None) -> bool:
        """Whether a step's choices are to be changed."""
        return free is not None or (features.sampled and self.name != "exact")

    def __call__(
        self,
        choices: Tensor,
        logits: Tensor,
        nodes: Nodes,
        features: SamplingFeatures,
        odds: Odds | None,
        masks: Masks | None,
        free: Tensor | None,
    ) -> Tensor:
        """The tokens after the verified nodes.

        Args:
            choices: int64 ``(L,)``: the target's own, negative where there is none.
            logits: ``(L, V)``, masked and penalised.
            nodes: With their trees, of which there may be more than have nodes here.
            odds: Of the trees' drafts; None where they were not drawn.
            masks: Of the nodes.
            free: bool ``(S,)``: whether each tree's root is inside the thinking; None: none is.
        """
        tables, rows = self.tables, nodes.rows
        assert nodes.tree is not None
        tree, heat = nodes.tree, tables.temperature[rows]
        filters = None
        if features.filtered:
            filters = (tables.top_k[rows], tables.top_p[rows], tables.min_p[rows])
        probs = sampled_probs(logits, heat, filters)
        places = _Places(nodes, tree)
        chosen = choices
        if features.sampled and self.name != "exact":
            if odds is None:
                drawn = self._by_threshold(probs, nodes, tree, places, choices)
            else:
                drawn = self._by_rejection(probs, nodes, tree, places, odds, choices)
            chosen = torch.where((heat > 0) & (choices >= 0), drawn, choices)
        if free is None or masks is None:
            return chosen
        return self._relaxed(probs, tree, places, chosen, masks, free)

    def _by_threshold(
        self, probs: Tensor, nodes: Nodes, tree: Tree, places: _Places, choices: Tensor
    ) -> Tensor:
        tables = self.tables
        coin = coins(noise_keys(tables.seed[nodes.rows], nodes.positions, ACCEPT))
        own = places.own(probs, tree)
        child = accept_by_threshold(own, places.spread(coin), tree, self.single, self.total)
        # What no child was accepted of is drawn from the other tokens.
        above = places.above(tree) * probs.shape[1] + tree.tokens.clamp(min=0)
        gone = torch.where(tree.parents >= 0, 0.0, torch.inf)
        left = probs.view(-1).scatter_reduce(0, above.flatten(), gone.flatten(), "amin")
        return self._emitted(child, left.view_as(probs), nodes, tree, places, choices)

    def _by_rejection(
        self,
        probs: Tensor,
        nodes: Nodes,
        tree: Tree,
        places: _Places,
        odds: Odds,
        choices: Tensor,
    ) -> Tensor:
        ids = odds.ids.flatten(0, 1)[places.flat]
        keys = noise_keys(self.tables.seed[nodes.rows], nodes.positions, ACCEPT)
        rounds = torch.arange(_most_children(tree, odds), dtype=torch.int32, device=ids.device)
        uniform = negative_exponentials(keys, rounds).exp_()
        left = accept_by_rejection(
            places.spread(probs.gather(1, ids)), places.spread(uniform), odds, tree
        )
        own, scale = left.own.flatten(0, 1)[places.flat], left.scale.flatten()[places.flat]
        real = odds.probs.flatten(0, 1)[places.flat] > 0
        own = torch.where(real, own, probs.gather(1, ids) * scale[:, None])
        weights = (probs * scale[:, None]).scatter_(1, ids, own)
        return self._emitted(left.child, weights, nodes, tree, places, choices)

    def _emitted(
        self,
        child: Tensor,
        weights: Tensor,
        nodes: Nodes,
        tree: Tree,
        places: _Places,
        choices: Tensor,
    ) -> Tensor:
        """The accepted children's tokens; where none is, a draw from ``weights``, and the target's
        own choice where rounding left these without mass."""
        token = draw(weights, noise_keys(self.tables.seed[nodes.rows], nodes.positions, RESIDUAL))
        # Lost to the draw: of a row without mass all quotients are 0.
        token = torch.where(weights.amin(-1) < 0, token, choices)
        child = child.flatten()[places.flat]
        drafted = tree.tokens.flatten()[places.tree * tree.tokens.shape[1] + child.clamp(min=0)]
        return torch.where(child >= 0, drafted, token)

    def _relaxed(
        self,
        probs: Tensor,
        tree: Tree,
        places: _Places,
        chosen: Tensor,
        masks: Masks,
        free: Tensor,
    ) -> Tensor:
        best = probs.topk(min(self.top_k, probs.shape[1])).values
        own = places.own(probs, tree)
        child = relaxed_children(
            own, places.spread(best[:, 0]), places.spread(best[:, -1]), tree, self.delta
        ).flatten()[places.flat]
        # Inside the thinking all mask rows are one; behind its end they are others.
        rows = masks.of(torch.arange(len(probs), device=probs.device))
        inside = free[places.tree] & (rows == rows[places.root]).all(-1)
        first = places.tree * tree.tokens.shape[1]
        drafted = tree.tokens.flatten()[first + child.clamp(min=0)]
        # A child that is the target's own choice comes first.
        kept = places.has_child(chosen, tree)
        return torch.where(inside & ~kept & (child >= 0) & (chosen >= 0), drafted, chosen)


class _Places:
    """Where the verified nodes are among all nodes of all trees.

    ``flat``, ``tree``, ``root`` int64 ``(L,)``: each one's flat number, its tree, and which of the
    verified nodes is its root.
    """

    def __init__(self, nodes: Nodes, tree: Tree) -> None:
        self.shape, count = tree.tokens.shape, len(nodes.rows)
        every = torch.arange(count, device=nodes.rows.device)
        self.flat = every if nodes.pack is None else nodes.pack
        self.tree = self.flat // self.shape[1]
        places = torch.zeros(self.shape, dtype=torch.int64, device=nodes.rows.device)
        self._place = places.view(-1).index_copy(0, self.flat, every)
        self.root = self._place[self.tree * self.shape[1]]

    def spread(self, values: Tensor) -> Tensor:
        """``(L, ...)`` → ``(B, N, ...)``, 0 at nodes that are not verified."""
        every = values.new_zeros(self.shape[0] * self.shape[1], *values.shape[1:])
        return every.index_copy_(0, self.flat, values).view(*self.shape, *values.shape[1:])

    def above(self, tree: Tree) -> Tensor:
        """int64 ``(B, N)``: which of the verified nodes is each one's parent."""
        first = torch.arange(self.shape[0], device=self.flat.device)[:, None] * self.shape[1]
        return self._place[first + tree.parents.clamp(min=0)]

    def own(self, probs: Tensor, tree: Tree) -> Tensor:
        """float32 ``(B, N)``: the probability of each living node's token at its parent, else 0."""
        found = probs[self.above(tree), tree.tokens.clamp(min=0)]
        return torch.where(tree.parents >= 0, found, 0.0)

    def has_child(self, chosen: Tensor, tree: Tree) -> Tensor:
        """bool ``(L,)``: whether each node has a child that is what is chosen after it."""
        matching = (tree.parents >= 0) & (chosen[self.above(tree)] == tree.tokens)
        first = torch.arange(self.shape[0], device=self.flat.device)[:, None] * self.shape[1]
        found = torch.zeros_like(matching.view(-1), dtype=torch.int32)
        place = (first + tree.parents.clamp(min=0)).flatten()
        found.index_add_(0, place, matching.flatten().to(torch.int32))
        return found[self.flat] > 0


def _most_children(tree: Tree, odds: Odds) -> int:
    """A bound on the children of any node: those that can be drawn, and those that a tree has."""
    return min(odds.ids.shape[2], tree.tokens.shape[1] - 1)
