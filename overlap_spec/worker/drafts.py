"""The draft passes of a worker: its drafter's nodes behind the rows' roots, linked into trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.drafters.sound import sound
from overlap_spec.kernels import Tree, build_chain, build_tree
from overlap_spec.steps import RUN_TOKENS
from overlap_spec.tiers import Tier
from overlap_spec.worker.graphs import Tensors
from overlap_spec.worker.model_runner import ModelRunner


class Drafts:
    """Trees of what the runner's drafter drafts, and of what the grammars tell. ``coupled``:
    whether drafts share the noise of the target's choices, or are the likeliest."""

    def __init__(self, runner: ModelRunner, coupled: bool) -> None:
        self.runner, self._coupled = runner, coupled

    def trees(
        self,
        tier: Tier,
        sampled: bool,
        told: bool,
        rows: Tensor,
        pages: Tensor,
        proposed: Draft | None = None,
    ) -> Tensors:
        """The roots' tokens, positions and runs, the links, and the tensors of the trees.

        Args:
            sampled: Whether any row draws its tokens: drafts share its noise.
            told: Whether the drafter is told where its roots stand in their grammars.
            proposed: By a host drafter, for the first of the rows.
        """
        drafter, own = self.runner.drafter, tier.own
        roots = self.roots(self.known_roots(rows, pages), sampled, told)
        if drafter is None or own.steps == 0:
            draft = _no_draft(roots, 0)
        elif proposed is not None:
            draft = self._sound(rows, _with_padding(proposed, len(rows)), own)
        elif drafter.host:
            draft = _no_draft(roots, own.nodes - 1)
        else:
            draft = self._sound(rows, drafter.draft(roots, own), own)
        if tier.base is not None:
            draft = self.runner.told.complete(draft, roots, tier)
        return self._linked(roots, draft, tier)

    def dead(self, tier: Tier, rows: Tensor, pages: Tensor) -> Tensors:
        """As :meth:`trees`, where nothing is drafted: what a recording needs of a tree."""
        roots = self.known_roots(rows, pages)
        return self._linked(roots, _no_draft(roots, tier.nodes - 1), tier)

    def foreseen(self, rows: Tensor, forecast: Sequence[Tensor], tier: Tier) -> Draft:
        """Chains of what was foreseen behind the rows' roots, by the parts of a :class:`Forecast`;
        dead where the text went another way, or where that is not worth a draft, or is not what the
        grammar forces."""
        known, tokens, scores, starts = forecast
        tables, most = self.runner.tables, tier.nodes - 1
        at, last = (tables.committed[rows] - known)[:, None], tokens.shape[1] - most - 1
        place = at.clamp(0, last)
        there = (at == place) & (starts.gather(1, place) == tables.roots[rows][:, None])
        behind = torch.arange(most, device=at.device)
        drafted = tokens.gather(1, place + 1 + behind)
        score = scores.gather(1, place + 1 + behind) - scores.gather(1, place)
        forced = self.runner.told.forced[rows]
        told = F.pad(drafted[:, : tier.steps], (0, RUN_TOKENS), value=-1)[:, : forced.shape[1]]
        there &= ((forced < 0) | (forced == told)).all(1, keepdim=True)
        score = score.masked_fill(~there | (behind >= tier.steps), -torch.inf)
        return Draft(drafted, behind.expand_as(drafted), score)

    def overlay(self, outputs: Tensors, rows: Tensor, proposed: Draft, tier: Tier) -> Tensors:
        """``outputs``, which :meth:`trees` made of a ``tier``, with what was proposed in the place
        of the drafter's, where there is such: as much of it as that tier has room for."""
        tokens, positions, forced, _, *parts = outputs
        tree = Tree(*parts)
        room = tree.tokens.shape[1] - 1
        draft = self._sound(rows, _with_padding(proposed, len(rows)), tier.own)
        given = [part[:, :room] for part in draft if part is not None]
        has = (given[2] > -torch.inf).any(1, keepdim=True)
        beside = tree.tokens, tree.parents, tree.scores
        values = 0, 0, -torch.inf
        merged = [
            torch.where(has, F.pad(own, (0, room - own.shape[1]), value=value), part[:, 1:])
            for own, part, value in zip(given, beside, values, strict=True)
        ]
        return tokens, positions, forced, *link(tokens, Draft(*merged), tier.steps)

    def known_roots(self, rows: Tensor, pages: Tensor) -> Roots:
        """The rows' roots, as far as the tables tell of them."""
        tables, forced = self.runner.tables, self.runner.told.forced[rows]
        return Roots(rows, pages, tables.roots[rows], tables.committed[rows], forced)

    def roots(self, roots: Roots, sampled: bool, told: bool) -> Roots:
        """Roots as the drafter gets them; ``sampled`` and ``told`` as in :meth:`trees`."""
        tables, rows = self.runner.tables, roots.rows
        if told:
            roots = roots._replace(standing=self.runner.told.standing(rows))
        if sampled and self._coupled:
            roots = roots._replace(temperature=tables.temperature[rows], seeds=tables.seed[rows])
        return roots

    def _sound(self, rows: Tensor, draft: Draft, tier: Tier) -> Draft:
        """The draft; of a drafter that is not built in, its sound nodes alone."""
        runner = self.runner
        if not runner.checked:
            return draft
        draft, refused = sound(draft, tier, runner.tables.vocab_size)
        runner.refused.add_(torch.where(rows == runner.tables.padding_row, 0, refused).sum())
        return draft

    def _linked(self, roots: Roots, draft: Draft, tier: Tier) -> Tensors:
        known = roots.tokens, roots.positions, roots.forced
        return *known, *link(roots.tokens, draft, tier.steps)


def link(roots: Tensor, draft: Draft, depth: int) -> Tensors:
    """The links of drafted nodes ``(3, S, N)``, and the tensors of their trees."""
    if draft.parents is None:
        tree = build_chain(roots, draft.tokens, draft.scores)
    else:
        tree = build_tree(roots, draft.tokens, draft.parents, draft.scores, depth)
    return torch.stack([tree.tokens, tree.first_child, tree.next_sibling]), *tree


def _with_padding(proposed: Draft, rows: int) -> Draft:
    """A proposal with dead nodes for rows that are padding."""
    room = 0, 0, 0, rows - len(proposed.tokens)
    if not room[-1]:
        return proposed
    tokens, parents, scores = proposed
    above = None if parents is None else F.pad(parents, room)
    return Draft(F.pad(tokens, room), above, F.pad(scores, room, value=-torch.inf))


def _no_draft(roots: Roots, nodes: int) -> Draft:
    """``nodes`` dead nodes after each root."""
    tokens = roots.tokens[:, None].expand(-1, nodes)
    return Draft(tokens, None, torch.full_like(tokens, -torch.inf, dtype=torch.float32))
