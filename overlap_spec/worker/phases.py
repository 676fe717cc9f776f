"""What the compute stream does in a step: draft, verify, accept, extend.

A step's trees and its prompts' chunks run apart: the trees' passes are recorded and replayed, the
chunks run beside them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.errors import ConfigError
from overlap_spec.kernels import Tree, apply_bitmask, select_nodes
from overlap_spec.steps import StepPlan
from overlap_spec.tiers import DraftStop, Tier
from overlap_spec.worker.batch import Batch
from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.extras import base as extras
from overlap_spec.worker.graph_runner import GraphRunner
from overlap_spec.worker.graphs import Tensors
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.passes import (
    Accepted,
    AcceptResult,
    Drafted,
    GrammarRows,
    Prefilled,
    Verified,
)
from overlap_spec.worker.sampler import Nodes, Sampler
from overlap_spec.worker.stepwise import kept_nodes, reached
from overlap_spec.worker.tables import RowTables, SamplingFeatures


def acceptance_rule(config: EngineConfig, tables: RowTables) -> Any:
    """The rule by which a draft may be accepted that is not the target's own choice; None: there is
    none.

    Raises:
        ConfigError: its file is not there.
    """
    if not (config.by_threshold or config.relaxed_topk):
        return None
    try:
        rules = importlib.import_module("overlap_spec.worker.acceptance")
    except ModuleNotFoundError:
        raise ConfigError(
            "threshold_single, threshold_acc and relaxed_topk need overlap_spec/worker/"
            "acceptance.py, which is not there: leave them out, or install overlap-spec again"
        ) from None
    return rules.AcceptanceRule(config, tables)


class Phases:
    """A step's phases, over what the runner computes and the graphs have recorded.

    Args:
        guard: Around all that the drafter does.
    """

    def __init__(
        self, runner: ModelRunner, graphs: GraphRunner, guard: DrafterGuard, config: EngineConfig
    ) -> None:
        self.runner, self.graphs, self.guard, self.tables = runner, graphs, guard, runner.tables
        self.sampler, self.rule = Sampler(runner.tables), acceptance_rule(config, runner.tables)

    # Draft

    def enter_pages(self, batch: Batch) -> None:
        """Enter the plan's new pages into the page tables."""
        self.tables.pages.view(-1)[batch.page_index] = batch.page_values
        if self.runner.adapters is not None:
            rows = batch.page_index // self.tables.pages.shape[1]
            self.runner.adapters.enter(rows, batch.page_values)

    def draft(
        self,
        batch: Batch,
        sampled: bool = False,
        proposed: Draft | None = None,
        over: Draft | None = None,
    ) -> Drafted | None:
        """Grow the trees; None where a step only prefills.

        Args:
            sampled: Whether any row draws its tokens: drafts share its noise.
            proposed: What a host drafter proposed for the first rows of the batch.
            over: What it proposed for some of them, in the place of what the drafter behind it
                drafts.
        """
        plan, tables, rows = batch.plan, self.tables, batch.rows
        if not batch.trees:
            return None
        pages = tables.pages[rows, : self._visible(plan)]
        # Where nobody has a grammar, none is asked: it takes its time.
        told = self.runner.reads_states and any(plan.grammar[: batch.trees])
        tier, stop = plan.tier, plan.budget.stop
        outputs: Tensors | None = None
        stopped = False
        if stop is not None and proposed is None and self.guard.fault is None:
            with self.guard:
                steps = self.graphs.find_steps(sampled, told)
                if steps is not None:
                    outputs = steps(rows, pages, stop)
                    nodes = outputs[-1].shape[1]
                    tier, stopped = Tier(nodes - 1, 1, nodes), True
        recorded = None if outputs else self.graphs.find_draft(tier, len(rows), sampled, told)
        if proposed is None and recorded is not None and self.guard.fault is None:
            with self.guard:
                outputs = recorded(rows, pages)
                rows, pages = recorded.kept(rows, pages)
        if outputs is None:
            outputs = self.draft_trees(tier, sampled, told, rows, pages, proposed)
        if over is not None:
            outputs = self.runner.overlay(outputs, rows, over, tier)
        tokens, positions, forced, links, *tree = outputs
        roots = Roots(rows, pages, tokens, positions, forced)
        drafted = Drafted(roots, Tree(*tree), links, None, tier)
        wanted, worth = plan.budget.nodes, drafted.tree.scores
        if stopped and stop is not None and stop.rows is not None:
            chances = _chances(drafted.tree.scores, stop)
            kept = kept_nodes(chances[: batch.trees, 1:], stop.costs_ms[tier.steps], stop.rows)
            if kept is not None:
                wanted, worth = kept if wanted is None else min(kept, wanted), chances.log()
                drafted = drafted._replace(nodes=wanted)
        return drafted if wanted is None else self._select(batch, drafted, wanted, worth)

    def draft_trees(
        self,
        tier: Tier,
        sampled: bool,
        told: bool,
        rows: Tensor,
        pages: Tensor,
        proposed: Draft | None = None,
    ) -> Tensors:
        """The runner's; dead trees where the drafter raises, or has lately."""
        if self.guard.fault is None:
            with self.guard:
                return self.runner.draft_trees(tier, sampled, told, rows, pages, proposed)
        return self.runner.dead_trees(tier, rows, pages)

    def _select(self, batch: Batch, drafted: Drafted, wanted: int, worth: Tensor) -> Drafted:
        """Keep the ``wanted`` nodes of the whole batch that are worth most: float32 ``(S, N)``, of
        a child at most what its parent is."""
        roots, tree = drafted.roots, drafted.tree
        rows, nodes = tree.tokens.shape
        # Rows of padding bring their roots.
        wanted += rows - batch.trees
        # A recording for every number of nodes would be too many.
        count = self.graphs.packed_size(drafted.tier, rows, wanted)
        bounds = (None, None) if batch.plan.budget.nodes is None else (batch.least, batch.most)
        selected = select_nodes(worth, count, *bounds)
        scores = tree.scores.masked_fill(selected.scores == -torch.inf, -torch.inf)
        draft = Draft(tree.tokens[:, 1:], tree.parents[:, 1:], scores[:, 1:])
        links, *kept = self.runner.link(roots.tokens, draft, drafted.tier.steps)
        pack = selected.pack if count < rows * nodes else None
        return drafted._replace(tree=Tree(*kept), links=links, pack=pack)

    # Verify

    def verify(self, drafted: Drafted | None) -> Verified | None:
        """The target over the trees."""
        if drafted is None:
            return None
        roots, tree, pack = drafted.roots, drafted.tree, drafted.pack
        inputs = (roots.pages, roots.positions, tree.tokens, tree.depths, tree.ancestors)
        tier = drafted.tier
        if pack is None:
            logits, *rest = self.graphs.find_verify(tier, len(roots.rows))(*inputs)
        else:
            logits, *rest = self.graphs.find_packed(tier, len(roots.rows), len(pack))(pack, *inputs)
        return Verified(logits, rest[0] if rest else None)

    def prefill(self, batch: Batch) -> Prefilled:
        """The target over all chunks in one pass."""
        chunks, runner = batch.chunks, self.runner
        assert chunks is not None
        hidden, features = runner.read_chunks(chunks)
        told = extras.compute(runner, batch, hidden)
        if not len(chunks.last):
            return Prefilled(None, features, told)
        return Prefilled(runner.target.logits(hidden[chunks.last]), features, told)

    # Accept

    def accept(
        self,
        batch: Batch,
        drafted: Drafted | None,
        verified: Verified | None,
        prefilled: Prefilled | None,
        features: SamplingFeatures,
        grammar: GrammarRows | None,
        free: Tensor | None = None,
    ) -> Accepted:
        """Mask, choose at every node, accept, and commit: the step's one decision.

        Args:
            grammar: None where no request has one.
            free: bool ``(S,)``: whether each tree's root is inside the thinking; None: none is.
        """
        trees = chunks = None
        if drafted is not None and verified is not None:
            trees = self._accept_trees(batch, drafted, verified, features, grammar, free)
        if prefilled is not None:
            chunks = self._accept_chunks(batch, prefilled, features, grammar)
        return Accepted(trees, chunks)

    def _accept_trees(
        self,
        batch: Batch,
        drafted: Drafted,
        verified: Verified,
        features: SamplingFeatures,
        grammar: GrammarRows | None,
        free: Tensor | None,
    ) -> AcceptResult:
        roots, tree, pack, logits = drafted.roots, drafted.tree, drafted.pack, verified.logits
        rows, nodes = tree.tokens.shape
        count = batch.trees * nodes
        limits = self.tables.depth_limit[roots.rows]
        allowed, runs = None, self.runner.no_run.expand(rows * nodes, -1)
        if grammar is not None:
            masks, runs = grammar.masks, grammar.behind(slice(rows * nodes))
            limits = torch.minimum(limits, grammar.limits)
            allowed = masks.first(count) if pack is None else masks.packed(pack, count)
        if pack is None:
            logits = logits[:count]
        rule = self.rule if self.rule is not None and self.rule.applies(features, free) else None
        place = self._nodes(drafted, len(logits)) if features.by_node or rule else None
        logits = self.sampler.process(logits, place, features)
        if rule and allowed is not None:
            apply_bitmask(logits, *allowed)
        choices = self.sampler.choose(logits, place, features, None if rule else allowed)
        if rule:
            assert place is not None
            choices = rule(choices, logits, place, features, allowed, free)
        every = choices.new_full((rows * nodes,), -1)
        every = every.index_copy_(0, self._count(count) if pack is None else pack, choices)
        commit = self.graphs.find_commit(drafted.tier, rows)
        lengths, tokens, path, packed = commit(
            roots.rows, roots.pages, roots.positions, *tree, every, limits, runs
        )
        accepted = AcceptResult(lengths, tokens, path, packed)
        count = batch.trees
        real = AcceptResult(lengths[:count], tokens[:count], path[:count], packed[:count])
        self._note_output(roots.rows[: batch.trees], real.tokens, real.lengths, features)
        if features.top_logprobs is None:
            return accepted
        index = self._count(batch.trees)[:, None] * nodes + real.path
        if pack is not None:
            inverse = torch.zeros_like(every).index_copy_(0, pack, self._count(len(pack)))
            index = inverse[index]
        return accepted._replace(
            logprobs=self.sampler.logprobs(
                logits, index, real.tokens, features.top_logprobs, allowed
            )
        )

    def _accept_chunks(
        self,
        batch: Batch,
        prefilled: Prefilled,
        features: SamplingFeatures,
        grammar: GrammarRows | None,
    ) -> AcceptResult | None:
        chunks, logits = batch.chunks, prefilled.logits
        assert chunks is not None
        self.tables.committed[chunks.rows] = chunks.starts + chunks.sizes
        if logits is None:
            return None
        rows, count = chunks.final_rows, len(chunks.final_rows)
        allowed, runs = None, self.runner.no_run.expand(count, -1)
        if grammar is not None:
            allowed, runs = grammar.masks.last(count), grammar.behind(slice(-count, None))
        place = Nodes(rows, chunks.positions[chunks.last] + 1, None, None)
        logits = self.sampler.process(logits, place, features)
        tokens = self.sampler.choose(logits, place, features, allowed)
        accepted = self.runner.commit_chunks(rows, tokens, runs)
        lengths, tokens, *_ = accepted
        self._note_output(rows, tokens, lengths, features)
        if features.top_logprobs is None:
            return accepted
        index, top = self._count(count)[:, None], features.top_logprobs
        return accepted._replace(
            logprobs=self.sampler.logprobs(logits, index, tokens, top, allowed)
        )

    def _note_output(
        self, rows: Tensor, emitted: Tensor, lengths: Tensor, features: SamplingFeatures
    ) -> None:
        """Enter what a step has given into the tables that the next choice reads."""
        if features.penalised:
            self.tables.count_output(rows, emitted, lengths)
        if features.banned:
            self.tables.push_output(rows, emitted, lengths)

    def _nodes(self, drafted: Drafted, count: int) -> Nodes:
        """Rows and positions of the first ``count`` verified nodes."""
        roots, tree, pack = drafted.roots, drafted.tree, drafted.pack
        rows = roots.rows.repeat_interleave(tree.tokens.shape[1])
        after = (roots.positions[:, None] + tree.depths + 1).flatten()
        if pack is None:
            return Nodes(rows[:count], after[:count], tree, None)
        return Nodes(rows[pack], after[pack], tree, pack)

    # Extend

    def extend(self, drafted: Drafted, verified: Verified, accepted: Accepted) -> None:
        """Feed the drafter what the trees committed: each token with the feature before it."""
        if not self.runner.extends or self.guard.fault is not None or accepted.trees is None:
            return
        with self.guard:
            roots, (lengths, tokens, path, *_) = drafted.roots, accepted.trees
            recorded = self.graphs.find_extend(drafted.tier, len(roots.rows))
            features = () if verified.features is None else (verified.features,)
            inputs = (roots.rows, roots.pages, roots.positions, tokens, path, lengths)
            if recorded is not None:
                recorded(*inputs, *features)
            else:
                self.runner.extend_trees(*inputs, *features)

    def extend_chunks(self, batch: Batch, prefilled: Prefilled, accepted: Accepted) -> None:
        """Feed the drafter what the chunks committed."""
        if not self.runner.extends or self.guard.fault is not None:
            return
        assert batch.chunks is not None
        with self.guard:
            self.runner.extend_chunks(batch.chunks, prefilled.features, accepted.chunks)

    def _visible(self, plan: StepPlan) -> int:
        """Columns of the page tables that the trees read: all of them where shapes are recorded."""
        columns = self.tables.pages.shape[1]
        if self.tables.device.type == "cuda":
            return columns
        return min(-(-plan.max_keys // self.runner.pool.page_size), columns)

    def _count(self, end: int) -> Tensor:
        return torch.arange(end, device=self.tables.device)


def _chances(scores: Tensor, stop: DraftStop) -> Tensor:
    """How likely each node of chains is to be accepted, by a stop's curves: float32 ``(S, N)``, of
    ``scores`` as in :class:`Tree`; 0 of padding's drafts."""
    found = torch.zeros_like(scores)
    found[:, 0] = 1.0
    trees = len(stop.expected)
    # Behind a dead node no difference is a number.
    own = scores[:trees].diff(dim=1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    found[:trees, 1:] = reached(own, torch.from_numpy(stop.curves))
    return found
