"""What the compute stream does in a step: draft, verify, accept, extend; the trees' passes are
recorded and replayed, the prompts' chunks run beside them."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.errors import ConfigError
from overlap_spec.kernels import Tree, apply_bitmask, select_nodes
from overlap_spec.steps import StepPlan
from overlap_spec.tiers import Tier
from overlap_spec.worker.batch import Batch, uploaded
from overlap_spec.worker.drafts import link
from overlap_spec.worker.extras import base as extras
from overlap_spec.worker.graphs import Eager, Recorded, Tensors
from overlap_spec.worker.host_drafts import Forecast, Proposal
from overlap_spec.worker.passes import (
    AcceptResult,
    Drafted,
    Prefilled,
    StepTensors,
    Verified,
)
from overlap_spec.worker.recordings import Recordings
from overlap_spec.worker.sampler import Nodes, Sampler


def optional(name: str) -> Any:
    """An optional file of the worker's; None where it is not there."""
    try:
        return importlib.import_module(f"overlap_spec.worker.{name}")
    except ModuleNotFoundError:
        return None


class Phases:
    """A step's phases, over the recorded passes; each takes from the step's tensors what the ones
    before have left there.

    Attributes:
        stop: Ends drafts within a step (``worker/draft_stop.py``); None where it is not there.
        rule: By which a draft may be accepted that is not the target's own choice; None: none may.

    Raises:
        ConfigError: the rule's file is not there.
    """

    def __init__(self, recordings: Recordings, config: EngineConfig) -> None:
        self.recordings, self.runner, self.guard = recordings, recordings.runner, recordings.guard
        self.tables = self.runner.tables
        self.sampler, self.stop, self.rule = Sampler(self.tables), optional("draft_stop"), None
        if config.by_threshold or config.relaxed_topk:
            rules = optional("acceptance")
            if rules is None:
                raise ConfigError(
                    "threshold_single, threshold_acc and relaxed_topk need overlap_spec/worker/"
                    "acceptance.py, which is not there: leave them out, or install overlap-spec "
                    "again"
                )
            self.rule = rules.AcceptanceRule(config, self.tables)

    def enter_pages(self, step: StepTensors) -> None:
        """Enter the plan's new pages into the page tables."""
        self.tables.pages.view(-1)[step.batch.page_index] = step.batch.page_values
        if self.runner.adapters is not None:
            rows = step.batch.page_index // self.tables.pages.shape[1]
            self.runner.adapters.enter(rows, step.batch.page_values)

    # Draft

    def draft(self, step: StepTensors, proposal: Proposal | Forecast | None = None) -> None:
        """Grow the trees, if the step has any.

        Args:
            proposal: Of a drafter on the host, for the first rows of the batch. Those for which it
                has foreseen nothing are left to the drafter behind it.
        """
        batch, plan, rows = step.batch, step.batch.plan, step.batch.rows
        if not batch.trees:
            return
        pages, tier, stop = self.runner.tables.pages[rows, : self._visible(plan)], plan.tier, None
        # Rows that draw their tokens share their noise with the drafts. And where nobody has a
        # grammar, none is asked: it takes its time.
        kind = step.features.sampled, self.runner.reads_states and any(plan.grammar[: batch.trees])
        proposed: Draft | None = None
        over: Draft | None = None
        drafts, device = self.recordings.drafts, self.runner.device
        if proposal is not None:
            given = [uploaded(torch.from_numpy(part), device) for part in proposal]
            if isinstance(proposal, Forecast):
                over = drafts.foreseen(rows[: batch.trees], given, tier.own)
                # To know that it is for all or none, a GPU's host would have to wait.
                there = over.scores[:, 0] > -torch.inf
                if device.type == "cpu" and there.all():
                    proposed, over = over, None
                elif device.type == "cpu" and not there.any():
                    over = None
            else:
                proposed = Draft(*given)
        if proposed is not None:
            draft: Recorded = Eager(partial(drafts.trees, tier, *kind, proposed=proposed))
        elif plan.budget.stop is not None and self.stop is not None:
            stop = plan.budget.stop
            draft = self.stop.StoppedDraft(partial(self.recordings.chain, *kind), stop)
        else:
            draft = self.recordings.draft(tier, len(rows), *kind)
        outputs, rows, pages = self.grow(draft, tier, rows, pages)
        if stop is not None:
            nodes = outputs[-1].shape[1]
            tier = Tier(nodes - 1, 1, nodes)
        if over is not None:
            outputs = drafts.overlay(outputs, rows, over, tier)
        tokens, positions, forced, links, *tree = outputs
        roots = Roots(rows, pages, tokens, positions, forced)
        step.drafted = Drafted(roots, Tree(*tree), links, None, tier)
        wanted, worth = plan.budget.nodes, step.drafted.tree.scores
        if stop is not None and (kept := self.stop.kept(worth, stop)) is not None:
            wanted, worth = kept[0] if wanted is None else min(kept[0], wanted), kept[1]
            step.drafted = step.drafted._replace(nodes=wanted)
        if wanted is not None:
            step.drafted = self._select(batch, step.drafted, wanted, worth)

    def grow(
        self, draft: Recorded, tier: Tier, rows: Tensor, pages: Tensor
    ) -> tuple[Tensors, Tensor, Tensor]:
        """What ``draft`` gives, and rows and pages where they are now; dead trees where the drafter
        raises, or has lately."""
        if self.guard.fault is None:
            with self.guard:
                outputs = draft(rows, pages)
                rows, pages = draft.kept(rows, pages)
                return outputs, rows, pages
        return self.recordings.drafts.dead(tier, rows, pages), rows, pages

    def _select(self, batch: Batch, drafted: Drafted, wanted: int, worth: Tensor) -> Drafted:
        """Keep the ``wanted`` nodes of the whole batch that are worth most: float32 ``(S, N)``, of
        a child at most what its parent is."""
        roots, tree = drafted.roots, drafted.tree
        rows, nodes = tree.tokens.shape
        # Rows of padding bring their roots.
        wanted += rows - batch.trees
        # A recording for every number of nodes would be too many.
        count = self.recordings.packed_size(drafted.tier, rows, wanted)
        most = None if batch.plan.budget.nodes is None else batch.most
        selected = select_nodes(worth, count, most)
        scores = tree.scores.masked_fill(selected.scores == -torch.inf, -torch.inf)
        draft = Draft(tree.tokens[:, 1:], tree.parents[:, 1:], scores[:, 1:])
        links, *kept = link(roots.tokens, draft, drafted.tier.steps)
        pack = selected.pack if count < rows * nodes else None
        return drafted._replace(tree=Tree(*kept), links=links, pack=pack)

    def _visible(self, plan: StepPlan) -> int:
        """Columns of the page tables that the trees read: all of them where shapes are recorded."""
        columns = self.runner.tables.pages.shape[1]
        if self.runner.tables.device.type == "cuda":
            return columns
        return min(-(-plan.max_keys // self.runner.pool.page_size), columns)

    # Verify

    def verify(self, step: StepTensors) -> None:
        """The target over the trees."""
        if step.drafted is None:
            return
        roots, tree, _, pack, tier, _ = step.drafted
        given = (roots.rows, roots.pages, roots.positions)
        inputs = (*given, tree.tokens, tree.depths, tree.ancestors)
        if pack is None:
            logits, *rest = self.recordings.verify(tier, len(roots.rows))(*inputs)
        else:
            recorded = self.recordings.packed(tier, len(roots.rows), len(pack))
            logits, *rest = recorded(pack, *inputs)
        features = rest.pop(0) if self.runner.feature_layers else None
        step.verified = Verified(logits, features, tuple(rest))

    def prefill(self, step: StepTensors) -> None:
        """The target over all chunks in one pass."""
        chunks, runner = step.batch.chunks, self.runner
        assert chunks is not None
        hidden, features = runner.read_chunks(chunks)
        told = extras.compute(runner, step.batch, hidden)
        logits = runner.target.logits(hidden[chunks.last]) if len(chunks.last) else None
        step.prefilled = Prefilled(logits, features, told)

    # Accept

    def accept(self, step: StepTensors) -> None:
        """Mask, choose at every node, accept, and commit: the step's one decision."""
        trees = chunks = None
        if step.drafted is not None and step.verified is not None:
            trees = self._accept_trees(step, step.drafted, step.verified)
        if step.prefilled is not None:
            chunks = self._accept_chunks(step, step.prefilled.logits)
        step.decided = trees, chunks

    def _accept_trees(
        self, step: StepTensors, drafted: Drafted, verified: Verified
    ) -> AcceptResult:
        roots, tree, pack, features = drafted.roots, drafted.tree, drafted.pack, step.features
        logits = verified.logits
        (rows, nodes), trees = tree.tokens.shape, step.batch.trees
        count = trees * nodes
        limits = self.tables.depth_limit[roots.rows]
        allowed, runs = None, self.runner.no_run.expand(rows * nodes, -1)
        if step.grammar is not None:
            masks, runs = step.grammar.masks, step.grammar.behind(slice(rows * nodes))
            limits = torch.minimum(limits, step.grammar.limits)
            allowed = masks.at(slice(count)) if pack is None else masks.packed(pack, count)
        if pack is None:
            logits = logits[:count]
        free = self._free(step)
        rule = self.rule if self.rule is not None and self.rule.applies(features, free) else None
        place = _nodes(drafted, len(logits)) if features.by_node or rule else None
        logits = self.sampler.process(logits, place, features)
        if rule and allowed is not None:
            apply_bitmask(logits, *allowed)
        choices = self.sampler.choose(logits, place, features, None if rule else allowed)
        if rule:
            assert place is not None
            choices = rule(choices, logits, place, features, allowed, free)
        every = choices.new_full((rows * nodes,), -1)
        every = every.index_copy_(0, self.runner.count(count) if pack is None else pack, choices)
        commit = self.recordings.commit(drafted.tier, rows)
        given = (roots.rows, roots.pages, roots.positions)
        found = commit(*given, *tree, every, limits, runs, *verified.writes)
        lengths, tokens, path, packed = found
        accepted = AcceptResult(lengths, tokens, path, packed)
        real = AcceptResult(lengths[:trees], tokens[:trees], path[:trees], packed[:trees])
        self._note_output(step, roots.rows[:trees], real)
        if features.top_logprobs is not None:
            index = self.runner.count(trees)[:, None] * nodes + real.path
            if pack is not None:
                inverse = torch.zeros_like(every).index_copy_(0, pack, self.runner.count(len(pack)))
                index = inverse[index]
            asked = index, real.tokens, features.top_logprobs, allowed
            accepted = accepted._replace(logprobs=self.sampler.logprobs(logits, *asked))
        return accepted

    def _accept_chunks(self, step: StepTensors, logits: Tensor | None) -> AcceptResult | None:
        chunks, features = step.batch.chunks, step.features
        assert chunks is not None
        self.tables.committed[chunks.rows] = chunks.starts + chunks.sizes
        if logits is None:
            return None
        rows, count = chunks.final_rows, len(chunks.final_rows)
        allowed, runs = None, self.runner.no_run.expand(count, -1)
        if step.grammar is not None:
            behind = slice(-count, None)
            allowed, runs = step.grammar.masks.at(behind), step.grammar.behind(behind)
        place = Nodes(rows, chunks.positions[chunks.last] + 1, None, None)
        logits = self.sampler.process(logits, place, features)
        tokens = self.sampler.choose(logits, place, features, allowed)
        accepted = self.runner.commit_chunks(rows, tokens, runs)
        self._note_output(step, rows, accepted)
        if features.top_logprobs is not None:
            asked = (
                self.runner.count(count)[:, None],
                accepted.tokens,
                features.top_logprobs,
                allowed,
            )
            accepted = accepted._replace(logprobs=self.sampler.logprobs(logits, *asked))
        return accepted

    def _free(self, step: StepTensors) -> Tensor | None:
        """bool ``(S,)``: whether each tree's root is inside the thinking; None: none is."""
        own = step.free[: step.batch.trees]
        if not any(own):
            return None
        padding = len(step.batch.rows) - len(own)
        return uploaded(torch.tensor([*own, *[False] * padding]), self.tables.device)

    def _note_output(self, step: StepTensors, rows: Tensor, accepted: AcceptResult) -> None:
        """Enter what a step has given into the tables that the next choice reads."""
        if step.features.penalised:
            self.tables.count_output(rows, accepted.tokens, accepted.lengths)
        if step.features.banned:
            self.tables.push_output(rows, accepted.tokens, accepted.lengths)

    # Extend

    def extend(self, step: StepTensors) -> None:
        """Feed the drafter what the trees committed: each token with the feature before it."""
        drafted, accepted = step.drafted, step.decided[0]
        if not self._extends or drafted is None or step.verified is None or accepted is None:
            return
        roots, features = drafted.roots, step.verified.features
        extend = self.recordings.extend(drafted.tier, len(roots.rows))
        given = roots.rows, roots.pages, roots.positions
        told = accepted.tokens, accepted.path, accepted.lengths
        with self.guard:
            extend(*given, *told, *(() if features is None else (features,)))

    def extend_chunks(self, step: StepTensors) -> None:
        """Feed the drafter what the chunks committed."""
        if self._extends and step.batch.chunks is not None and step.prefilled is not None:
            features = step.prefilled.features
            with self.guard:
                self.runner.extend_chunks(step.batch.chunks, features, step.decided[1])

    @property
    def _extends(self) -> bool:
        return self.runner.extends and self.guard.fault is None


def _nodes(drafted: Drafted, count: int) -> Nodes:
    """Rows and positions of the first ``count`` verified nodes."""
    roots, tree, pack = drafted.roots, drafted.tree, drafted.pack
    rows = roots.rows.repeat_interleave(tree.tokens.shape[1])
    after = (roots.positions[:, None] + tree.depths + 1).flatten()
    if pack is None:
        return Nodes(rows[:count], after[:count], tree, None)
    return Nodes(rows[pack], after[pack], tree, pack)
