"""What the compute stream does in a step: draft, verify, accept, extend.

A step's trees and its prompts' chunks run apart: the trees' passes are recorded and replayed, the
chunks run beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.kernels import apply_bitmask
from overlap_spec.worker.batch import uploaded
from overlap_spec.worker.draft_phase import DraftPhase, optional
from overlap_spec.worker.extras import base as extras
from overlap_spec.worker.passes import (
    Accepted,
    AcceptResult,
    Drafted,
    Prefilled,
    StepTensors,
    Verified,
)
from overlap_spec.worker.recordings import Recordings
from overlap_spec.worker.sampler import Nodes, Sampler


class Phases:
    """A step's phases, over the passes that are recorded; each takes from the step's tensors what
    the ones before have left there.

    Attributes:
        rule: By which a draft may be accepted that is not the target's own choice; None: none may.

    Raises:
        ConfigError: the rule's file is not there.
    """

    def __init__(self, recordings: Recordings, config: EngineConfig) -> None:
        self.recordings, self.runner, self.guard = recordings, recordings.runner, recordings.guard
        self.tables = self.runner.tables
        self.draft, self.sampler, self.rule = DraftPhase(recordings), Sampler(self.tables), None
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
        step.decided = Accepted(trees, chunks)

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
            allowed = masks.first(count) if pack is None else masks.packed(pack, count)
        if pack is None:
            logits = logits[:count]
        free = self._free(step)
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
        commit = self.recordings.commit(drafted.tier, rows)
        given = (roots.rows, roots.pages, roots.positions)
        found = commit(*given, *tree, every, limits, runs, *verified.writes)
        lengths, tokens, path, packed = found
        accepted = AcceptResult(lengths, tokens, path, packed)
        real = AcceptResult(lengths[:trees], tokens[:trees], path[:trees], packed[:trees])
        self._note_output(step, roots.rows[:trees], real)
        if features.top_logprobs is None:
            return accepted
        index = self._count(trees)[:, None] * nodes + real.path
        if pack is not None:
            inverse = torch.zeros_like(every).index_copy_(0, pack, self._count(len(pack)))
            index = inverse[index]
        top = features.top_logprobs
        told = self.sampler.logprobs(logits, index, real.tokens, top, allowed)
        return accepted._replace(logprobs=told)

    def _accept_chunks(self, step: StepTensors, logits: Tensor | None) -> AcceptResult | None:
        chunks, features = step.batch.chunks, step.features
        assert chunks is not None
        self.tables.committed[chunks.rows] = chunks.starts + chunks.sizes
        if logits is None:
            return None
        rows, count = chunks.final_rows, len(chunks.final_rows)
        allowed, runs = None, self.runner.no_run.expand(count, -1)
        if step.grammar is not None:
            allowed = step.grammar.masks.last(count)
            runs = step.grammar.behind(slice(-count, None))
        place = Nodes(rows, chunks.positions[chunks.last] + 1, None, None)
        logits = self.sampler.process(logits, place, features)
        tokens = self.sampler.choose(logits, place, features, allowed)
        accepted = self.runner.commit_chunks(rows, tokens, runs)
        self._note_output(step, rows, accepted)
        if features.top_logprobs is None:
            return accepted
        index, top = self._count(count)[:, None], features.top_logprobs
        told = self.sampler.logprobs(logits, index, accepted.tokens, top, allowed)
        return accepted._replace(logprobs=told)

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

    def _nodes(self, drafted: Drafted, count: int) -> Nodes:
        """Rows and positions of the first ``count`` verified nodes."""
        roots, tree, pack = drafted.roots, drafted.tree, drafted.pack
        rows = roots.rows.repeat_interleave(tree.tokens.shape[1])
        after = (roots.positions[:, None] + tree.depths + 1).flatten()
        if pack is None:
            return Nodes(rows[:count], after[:count], tree, None)
        return Nodes(rows[pack], after[pack], tree, pack)

    # Extend

    def extend(self, step: StepTensors) -> None:
        """Feed the drafter what the trees committed: each token with the feature before it."""
        drafted, accepted = step.drafted, step.decided.trees
        if not self._extends or drafted is None or step.verified is None or accepted is None:
            return
        roots, features = drafted.roots, step.verified.features
        extend = self.recordings.extend(drafted.tier, len(roots.rows))
        with self.guard:
            extend(
                *(roots.rows, roots.pages, roots.positions),
                *(accepted.tokens, accepted.path, accepted.lengths),
                *(() if features is None else (features,)),
            )

    def extend_chunks(self, step: StepTensors) -> None:
        """Feed the drafter what the chunks committed."""
        if self._extends and step.batch.chunks is not None and step.prefilled is not None:
            features = step.prefilled.features
            with self.guard:
                self.runner.extend_chunks(step.batch.chunks, features, step.decided.chunks)

    @property
    def _extends(self) -> bool:
        return self.runner.extends and self.guard.fault is None

    def _count(self, end: int) -> Tensor:
        return torch.arange(end, device=self.tables.device)
