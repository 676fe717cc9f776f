"""A model that drafts, grown into chains or into EAGLE-2's dynamic trees (arXiv 2406.16858)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from overlap_spec.drafters.base import Committed, Draft, DraftCache, Drafter, Roots
from overlap_spec.drafters.grafts import forced_first
from overlap_spec.kernels import (
    GrammarStanding,
    Noise,
    grow,
    legal_candidates,
    rerank,
    top_candidates,
)
from overlap_spec.models.decoder import Attend
from overlap_spec.tiers import Tier


class ChainLink(NamedTuple):
    """One more draft of each chain: ``token`` int64 and ``score``, its log-probability, ``(B, 1)``.

    ``state (B, 1, H)``: the one from which it was drafted. ``standing``: where the grammars stand
    behind it, None where none was asked.
    """

    token: Tensor
    score: Tensor
    state: Tensor
    standing: GrammarStanding | None


class Branches(NamedTuple):
    """Branches of a draft: ``token`` int64 ``(B, k)``, and ``before (B, k, H)``, the states from
    which these came.

    ``step``: their depth; of what is no tree, the first one's. ``mask`` bool ``(B, k, W)``: which
    of all branches up to here each one sees; None: they are a chain, behind one that has all depths
    before.
    """

    token: Tensor
    before: Tensor
    step: int
    mask: Tensor | None = None


class Growth(ABC):
    """Grows chains and trees behind roots: ``top_k`` branches a step, and of all steps the best
    nodes are kept. A branch is a token and a *state*, from which its children come."""

    @abstractmethod
    def root_states(self, roots: Roots) -> Tensor:
        """The states from which the roots' children come: ``(B, H)``."""

    @abstractmethod
    def states_below(self, roots: Roots, at: Branches) -> Tensor:
        """The states from which the children of branches come: ``(B, k, H)``."""

    @abstractmethod
    def candidates(
        self, states: Tensor, k: int, noise: Noise | None, standing: GrammarStanding | None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids of the k best next tokens, descending: ``(T, H)`` →
        ``(T, k)``, as :func:`overlap_spec.kernels.top_candidates` makes them; where ``standing`` is
        given, of the ``T`` rows, as :func:`overlap_spec.kernels.legal_candidates`."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        """See :meth:`Drafter.draft`."""
        return self._chain(roots, tier) if tier.top_k == 1 else self._tree(roots, tier)

    def first_link(self, roots: Roots) -> ChainLink:
        """The first draft of a chain behind each root."""
        return self._link(roots, self.root_states(roots)[:, None], roots.standing, 0)

    def next_link(
        self,
        roots: Roots,
        token: Tensor,
        state: Tensor,
        standing: GrammarStanding | None,
        step: int,
    ) -> ChainLink:
        """The draft behind ``token (B, 1)``, the one of depth ``step`` >= 1, which was drafted from
        ``state (B, 1, H)``; ``standing``: where the grammars stand behind it."""
        # Everything before is an ancestor: plain causal attention.
        state = self.states_below(roots, Branches(token, state, step))
        return self._link(roots, state, standing, step)

    def _link(
        self, roots: Roots, state: Tensor, standing: GrammarStanding | None, step: int
    ) -> ChainLink:
        noise = roots.noise(step + 1, 1)
        score, token = self.candidates(state.flatten(0, 1), 1, noise, standing)
        score, token = forced_first(roots, score, token, step)
        return ChainLink(token, score, state, standing and standing.behind(token))

    def _chain(self, roots: Roots, tier: Tier) -> Draft:
        links = [self.first_link(roots)]
        for step in range(1, tier.nodes - 1):
            token, _, state, standing = links[-1]
            links.append(self.next_link(roots, token, state, standing, step))
        tokens, scores, _, _ = zip(*links, strict=True)
        return Draft(torch.cat(tokens, 1), None, torch.cat(scores, 1).cumsum(1))

    def _tree(self, roots: Roots, tier: Tier) -> Draft:
        batch, k, device = roots.rows.shape[0], tier.top_k, roots.rows.device
        state, standing = self.root_states(roots), roots.standing
        score, token = self.candidates(state, k, roots.noise(1, 1), standing)
        score, token = forced_first(roots, score, token, 0)
        if standing is not None:
            standing = standing.behind(token, torch.zeros_like(token))
        scores, tokens = [score], [token]
        parents = [torch.full_like(token, -1)]
        number = torch.arange(k, device=device).expand(batch, k)
        before = state[:, None].expand(batch, k, -1)
        mask = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
        for step in range(1, tier.steps):
            out = self.states_below(roots, Branches(token, before, step, mask))
            noise = roots.noise(step + 1, k)
            added, choices = self.candidates(out.flatten(0, 1), k, noise, standing)
            # A run goes on in the first branch: nothing outranks its score, nor comes before it.
            first = added.view(batch, k, k)[:, 0], choices.view(batch, k, k)[:, 0]
            for mine, own in zip(first, forced_first(roots, *first, step), strict=True):
                mine.copy_(own)
            grown = grow(score, added, choices, mask)
            parents.append(number.repeat_interleave(k, 1))
            scores.append(added.view(batch, k * k))
            tokens.append(choices.view(batch, k * k))
            score, token = grown.score, grown.token
            standing = standing and standing.behind(token, grown.branch)
            number = grown.best + (k + (step - 1) * k * k)
            before = out.gather(1, grown.branch[:, :, None].expand_as(out))
            assert grown.mask is not None
            mask = grown.mask
        every = torch.cat(scores, 1)
        kept = rerank(every, tier.nodes - 1)
        above = _renumber(torch.cat(parents, 1), kept)
        return Draft(torch.cat(tokens, 1).gather(1, kept), above, every.gather(1, kept))


class TreeDrafter(Growth, Drafter):
    """A branch's state is the model's output there, which it may read again; between steps one
    state a row is kept: the root's.

    Args:
        cache: The model's own; slot i holds token i.
        root_state: Zeros ``(rows, H)``, one for each row of the tables.
        last_position: The last one in the target's context; drafts past it are discarded.
        offsets: int64 ``(V,)``: target id = draft id + ``offsets[draft id]``; None: they are one.

    Attributes:
        stepwise: Whether every depth is a pass of its own, which may be stopped before the next.
    """

    stepwise: ClassVar[bool] = True

    root_state: Tensor
    offsets: Tensor | None
    draft_ids: Tensor | None

    def __init__(
        self,
        cache: DraftCache,
        root_state: Tensor,
        last_position: int,
        offsets: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.cache, self.last_position = cache, last_position
        self.register_buffer("root_state", root_state)
        self.register_buffer("offsets", offsets)
        self.register_buffer("draft_ids", None if offsets is None else _inverse(offsets))

    @abstractmethod
    def advance(
        self, tokens: Tensor, before: Tensor | None, positions: Tensor, attend: Attend
    ) -> Tensor:
        """One pass of the model: the states at these tokens, ``(T, H)``.

        Args:
            tokens, positions: int64 ``(T,)``; positions within the target's context.
            before: ``(T, H)``, states at each token's parent; of committed tokens what
                :meth:`states_before` makes.
            attend: Attention over the cache.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Of the next token, over the draft vocabulary: ``(T, H)`` → ``(T, V)``, contiguous."""

    def candidates(
        self, states: Tensor, k: int, noise: Noise | None, standing: GrammarStanding | None
    ) -> tuple[Tensor, Tensor]:
        logits = self.logits(states)
        if standing is None:
            return top_candidates(logits, k, self.offsets, noise)
        return legal_candidates(logits, k, standing, self.offsets, self.draft_ids, noise)

    def states_before(self, features: Tensor | None) -> Tensor | None:
        """What stands for the states before committed tokens: the target's features ``(T, F)``."""
        return features

    def extend(self, committed: Committed) -> None:
        before, attend = self.states_before(committed.features), committed.attend(self.cache)
        states = self.advance(committed.tokens, before, committed.positions, attend)
        self.root_state.index_copy_(0, committed.rows, states[committed.last])

    def root_states(self, roots: Roots) -> Tensor:
        return self.root_state[roots.rows]

    def states_below(self, roots: Roots, at: Branches) -> Tensor:
        token, before, step, mask = at
        batch, k = token.shape
        slots = roots.positions[:, None] + torch.arange(k, device=token.device)
        if mask is None:
            prefix = roots.positions + step
            slots = positions = slots + step
        else:
            # Branches are of one depth.
            prefix = roots.positions + 1
            positions = (roots.positions + step)[:, None].expand_as(slots)
            slots = slots + (1 + (step - 1) * k)
        positions = positions.clamp(max=self.last_position)
        attend = self.cache.attend(roots.pages, slots, prefix, positions, mask)
        out = self.advance(token.flatten(), before.flatten(0, 1), positions.flatten(), attend)
        return out.view(batch, k, -1)


def _inverse(offsets: Tensor) -> Tensor:
    """The draft id of each target id: int64, -1 where there is none."""
    index = torch.arange(len(offsets), device=offsets.device)
    ids = index + offsets
    found = torch.full((int(ids.max()) + 1,), -1, device=offsets.device)
    found[ids] = index
    return found


def _renumber(parents: Tensor, kept: Tensor) -> Tensor:
    """Candidate numbers of the kept ones' parents → node numbers, the root's being 0."""
    batch, count = kept.shape
    node = torch.zeros(batch, parents.shape[1] + 1, dtype=torch.int64, device=kept.device)
    numbers = torch.arange(1, count + 1, device=kept.device).expand(batch, count)
    node.scatter_(1, kept + 1, numbers)
    return node.gather(1, parents.gather(1, kept) + 1)
