"""Which drafts are accepted where a draft need not be the target's own choice."""

from __future__ import annotations

from math import exp, inf

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.kernels import Tree, accept_by_probability, coins, noise_keys, sampled_probs
from overlap_spec.kernels.sampling import ACCEPT, RESIDUAL, draw
from overlap_spec.worker.sampler import Masks, Nodes, filters
from overlap_spec.worker.tables import RowTables, SamplingFeatures


class AcceptanceRule:
    """The settings' rule, over all nodes of a step: it changes what is chosen after them.

    Thresholds are for sampled rows; relaxed acceptance is for all of them, inside the thinking.
    ``asks_thinking``: whether it wants to know which requests think.
    """

    def __init__(self, config: EngineConfig, tables: RowTables) -> None:
        self.tables, self.by_threshold = tables, config.by_threshold
        self.single, self.total = config.threshold_single, config.threshold_acc
        # The furthest below the best: a difference of logarithms is a share.
        self.top_k, self.share = config.relaxed_topk, exp(-config.relaxed_delta)
        self.asks_thinking = self.top_k > 0
        if self.single >= 1:
            # A draft that is certain passes anyhow; rounding must not make others so.
            self.single = inf

    def applies(self, features: SamplingFeatures, free: Tensor | None) -> bool:
        """Whether a step's choices are to be changed."""
        return free is not None or (features.sampled and self.by_threshold)

    def __call__(
        self,
        choices: Tensor,
        logits: Tensor,
        nodes: Nodes,
        features: SamplingFeatures,
        masks: Masks | None,
        free: Tensor | None,
    ) -> Tensor:
        """The tokens after the verified nodes.

        Args:
            choices: int64 ``(L,)``: the target's own, negative where there is none.
            logits: ``(L, V)``, masked and penalised.
            nodes: With their trees, of which there may be more than have nodes here.
            masks: Of the nodes.
            free: bool ``(S,)``: whether each tree's root is inside the thinking; None: none is.
        """
        tables, rows, tree = self.tables, nodes.rows, nodes.tree
        assert tree is not None
        heat = tables.temperature[rows]
        probs = sampled_probs(logits, heat, filters(tables, rows, features))
        places = _Places(nodes, tree)
        least, coin, others = torch.full_like(heat, inf), None, choices
        # A child that is the target's own choice comes first, but where a coin decides.
        settled = places.has_child(choices, tree)
        if features.sampled and self.by_threshold:
            warm = heat > 0
            thrown = coins(noise_keys(tables.seed[rows], nodes.positions, ACCEPT)) * self.total
            least = torch.where(warm, self.single, inf)
            coin = places.spread(torch.where(warm, thrown, inf))
            others = torch.where(warm, self._residual(probs, nodes, places, choices), choices)
            settled = settled & ~warm
        if free is not None and masks is not None:
            least = torch.minimum(least, self._relaxed(probs, places, masks, free))
        own, spread = places.own(probs, tree), places.spread(least)
        child = accept_by_probability(own, spread, tree, coin).flatten()[places.flat]
        first = places.tree * tree.tokens.shape[1]
        drafted = tree.tokens.flatten()[first + child.clamp(min=0)]
        chosen = torch.where(child >= 0, drafted, others)
        return torch.where(settled | (choices < 0), choices, chosen)

    def _residual(self, probs: Tensor, nodes: Nodes, places: _Places, choices: Tensor) -> Tensor:
        """Draws from the tokens that are no children; the target's own choice where rounding left
        none with mass."""
        tree = nodes.tree
        assert tree is not None
        above = places.above * probs.shape[1] + tree.tokens.clamp(min=0)
        gone = torch.where(tree.parents >= 0, 0.0, torch.inf)
        left = probs.view(-1).scatter_reduce(0, above.flatten(), gone.flatten(), "amin")
        left = left.view_as(probs)
        token = draw(left, noise_keys(self.tables.seed[nodes.rows], nodes.positions, RESIDUAL))
        # Lost to the draw: of a row without mass all quotients are 0.
        return torch.where(left.amin(-1) < 0, token, choices)

    def _relaxed(self, probs: Tensor, places: _Places, masks: Masks, free: Tensor) -> Tensor:
        """float32 ``(L,)``: the probability from which on relaxed acceptance takes a child: one of
        the ``top_k`` best, with log p₁ − log p at most ``relaxed_delta`` (TensorRT-LLM's rule)."""
        best = probs.topk(min(self.top_k, probs.shape[1])).values
        # Inside the thinking all mask rows are one; behind its end they are others.
        rows = masks.of(torch.arange(len(probs), device=probs.device))
        inside = free[places.tree] & (rows == rows[places.root]).all(-1)
        return torch.where(inside, torch.maximum(best[:, 0] * self.share, best[:, -1]), inf)


class _Places:
    """Where the verified nodes are among all of all trees: ``flat``, ``tree``, ``root`` int64
    ``(L,)``, each one's flat number, its tree, and which of the verified nodes is its root;
    ``above`` int64 ``(B, N)``: which of them is each node's parent."""

    def __init__(self, nodes: Nodes, tree: Tree) -> None:
        self.shape, count = tree.tokens.shape, len(nodes.rows)
        every = torch.arange(count, device=nodes.rows.device)
        self.flat = every if nodes.pack is None else nodes.pack
        self.tree = self.flat // self.shape[1]
        places = torch.zeros(self.shape, dtype=torch.int64, device=nodes.rows.device)
        place = places.view(-1).index_copy(0, self.flat, every)
        self.root = place[self.tree * self.shape[1]]
        first = torch.arange(self.shape[0], device=self.flat.device)[:, None] * self.shape[1]
        self._parents = first + tree.parents.clamp(min=0)
        self.above = place[self._parents]

    def spread(self, values: Tensor) -> Tensor:
        """``(L, ...)`` → ``(B, N, ...)``, 0 at nodes that are not verified."""
        every = values.new_zeros(self.shape[0] * self.shape[1], *values.shape[1:])
        return every.index_copy_(0, self.flat, values).view(*self.shape, *values.shape[1:])

    def own(self, probs: Tensor, tree: Tree) -> Tensor:
        """float32 ``(B, N)``: the probability of each living node's token at its parent, else 0."""
        found = probs[self.above, tree.tokens.clamp(min=0)]
        return torch.where(tree.parents >= 0, found, 0.0)

    def has_child(self, chosen: Tensor, tree: Tree) -> Tensor:
        """bool ``(L,)``: whether each node has a child that is what is chosen after it."""
        matching = (tree.parents >= 0) & (chosen[self.above] == tree.tokens)
        found = torch.zeros_like(matching.view(-1), dtype=torch.int32)
        found.index_add_(0, self._parents.flatten(), matching.flatten().to(torch.int32))
        return found[self.flat] > 0
