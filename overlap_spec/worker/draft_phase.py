"""How a step drafts: by a recording, step by step until a stop, or what the host proposed."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.kernels import Tree, select_nodes
from overlap_spec.steps import StepPlan
from overlap_spec.tiers import Tier
from overlap_spec.worker.batch import Batch, uploaded
from overlap_spec.worker.drafts import link
from overlap_spec.worker.graphs import Eager, Recorded, Tensors
from overlap_spec.worker.host_drafts import Forecast, Proposal
from overlap_spec.worker.passes import Drafted, StepTensors
from overlap_spec.worker.recordings import Recordings


def optional(name: str) -> Any:
    """An optional file of the worker's; None where it is not there."""
    try:
        return importlib.import_module(f"overlap_spec.worker.{name}")
    except ModuleNotFoundError:
        return None


class DraftPhase:
    """Grows a step's trees, and keeps of them what its budget says.

    Attributes:
        stop: Ends drafts within a step (``worker/draft_stop.py``); None where it is not there.
    """

    def __init__(self, recordings: Recordings) -> None:
        self.recordings, self.runner, self.guard = recordings, recordings.runner, recordings.guard
        self.stop = optional("draft_stop")

    def __call__(self, step: StepTensors, proposal: Proposal | Forecast | None = None) -> None:
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
        if proposal is not None:
            device, drafts = self.runner.tables.device, self.recordings.drafts
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
            trees = self.recordings.drafts.trees
            draft: Recorded = Eager(partial(trees, tier, *kind, proposed=proposed))
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
            outputs = self.recordings.drafts.overlay(outputs, rows, over, tier)
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
