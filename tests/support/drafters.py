"""Drafters of every kind of manners, as a user's own would be: named by ``module:Class``."""

# ruff: noqa: ARG002, ARG003
# Most of what a drafter is given, these leave alone.

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import (
    Committed,
    Draft,
    Drafter,
    HostDraft,
    MakeCache,
    Roots,
    Tables,
)
from overlap_spec.models.decoder import Decoder
from overlap_spec.steps import History
from overlap_spec.tiers import Tier


class Echo(Drafter):
    """Drafts the root's token, again and again, a little less sure each time."""

    seen: Tensor

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(rows, dtype=torch.int64, device=device))

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> Echo:
        return cls(len(tables.roots), tables.roots.device)

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        tokens = roots.tokens[:, None].expand(-1, tier.nodes - 1)
        scores = torch.full_like(tokens, -0.1, dtype=torch.float32).cumsum(1)
        scores[:, tier.steps :] = -torch.inf
        return Draft(tokens, None, scores)

    def extend(self, committed: Committed) -> None:
        self.seen.index_copy_(0, committed.rows, committed.tokens[committed.last])


class Frozen(Echo):
    """Reads its roots on the host, which a recording would freeze."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        tokens = torch.tensor(roots.tokens.tolist())[:, None].expand(-1, tier.nodes - 1)
        return super().draft(roots, tier)._replace(tokens=tokens)


class FrozenSize(Echo):
    """Takes the size of the batch for a number, which a recording would freeze."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        tokens = roots.tokens[:, None].expand(len(roots.tokens), tier.nodes - 1)
        return Draft(tokens, None, torch.zeros(len(roots.tokens), tier.nodes - 1))


class Unrecorded(Frozen):
    """The same, and says so."""

    recorded: ClassVar[bool] = False


class Raises(Echo):
    """Raises from its 4th draft on, as often as it is asked."""

    recorded: ClassVar[bool] = False
    drafts = 0

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        self.drafts += 1
        if self.drafts > 3:
            raise ValueError("no more ideas")
        return super().draft(roots, tier)


class RaisesInExtend(Echo):
    """Cannot take in what was accepted."""

    def extend(self, committed: Committed) -> None:
        raise ValueError("not this one")


class Garbage(Echo):
    """Drafts trees of tokens by a fixed rule, some dead, some out of all grammars."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        nodes = tier.nodes - 1
        index = torch.arange(nodes, device=roots.tokens.device)
        tokens = (roots.tokens[:, None] * 31 + index * 7) % 256
        parents = (index + 1).div(2, rounding_mode="floor").expand_as(tokens)
        depth = (index + 2).float().log2().floor()
        scores = torch.where(index % 5 == 4, -torch.inf, -depth).expand(tokens.shape)
        alive = scores > -torch.inf
        # A dead node's children are dead.
        for _ in range(tier.steps):
            above = torch.cat([torch.ones_like(alive[:, :1]), alive], 1).gather(1, parents)
            alive = alive & above
        return Draft(tokens, parents, torch.where(alive, scores, -torch.inf))


class Forbidden(Echo):
    """Drafts what no grammar of these tests allows: control characters."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        index = torch.arange(tier.nodes - 1, device=roots.tokens.device)
        tokens = (index + 188).expand_as(roots.tokens[:, None] + index)
        parents = index // 3 if tier.top_k > 1 else index
        scores = -0.1 * (index + 1.0)
        return Draft(tokens, parents.expand_as(tokens), scores.expand(tokens.shape))


class Broken(Echo):
    """Breaks the contract in one of its clauses at every node but the first two, which are good."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        index = torch.arange(tier.nodes - 1, device=roots.tokens.device)
        tokens = (roots.tokens[:, None] + index) % 256
        parents = (index if tier.top_k == 1 else index.clamp(max=1)).expand(tokens.shape)
        scores = (-0.1 * (index + 1.0)).expand(tokens.shape)
        return self.spoil(Draft(tokens, parents, scores), index >= 2)

    def spoil(self, draft: Draft, here: Tensor) -> Draft:
        raise NotImplementedError


class TooLarge(Broken):
    """Tokens beyond the vocabulary."""

    def spoil(self, draft: Draft, here: Tensor) -> Draft:
        return draft._replace(tokens=torch.where(here, 10**9, draft.tokens))


class Negative(Broken):
    """Tokens below 0."""

    def spoil(self, draft: Draft, here: Tensor) -> Draft:
        return draft._replace(tokens=torch.where(here, -7, draft.tokens))


class Twins(Broken):
    """The same token again and again, under the same parent."""

    def spoil(self, draft: Draft, here: Tensor) -> Draft:
        tokens = torch.where(here, draft.tokens[:, :1], draft.tokens)
        return draft._replace(tokens=tokens, parents=torch.where(here, 0, draft.parents))


class Circles(Broken):
    """Parents that come later."""

    def spoil(self, draft: Draft, here: Tensor) -> Draft:
        assert draft.parents is not None
        return draft._replace(parents=torch.where(here, draft.parents.shape[1], draft.parents))


class NoNumbers(Broken):
    """Scores that are no numbers."""

    def spoil(self, draft: Draft, here: Tensor) -> Draft:
        return draft._replace(scores=torch.where(here, torch.nan, draft.scores))


class Orphans(Broken):
    """Living nodes under a dead one, better than it was."""

    def spoil(self, draft: Draft, here: Tensor) -> Draft:
        assert draft.parents is not None
        dead = here & (here.cumsum(-1) == 1)
        scores = torch.where(here, 0.0, draft.scores).masked_fill(dead, -torch.inf)
        below = torch.arange(len(here), device=here.device)
        return draft._replace(
            scores=scores, parents=torch.where(here & ~dead, below, draft.parents)
        )


class WrongShape(Echo):
    """One node too many."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        tokens = roots.tokens[:, None].expand(-1, tier.nodes)
        return Draft(tokens, None, torch.zeros(tokens.shape))


class WrongType(Echo):
    """Tokens that are no integers."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        draft = super().draft(roots, tier)
        return draft._replace(tokens=draft.tokens.float())


class OnHost(Drafter):
    """Looks its draft up in the request's own text: what followed the last token before."""

    host: ClassVar[bool] = True

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> OnHost:
        return cls()

    def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
        drafts = []
        for history in histories:
            tokens = history.tokens(0, len(history))
            before = [i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]
            found = tokens[before[-1] + 1 :][: min(tier.steps, tier.nodes - 1)] if before else []
            scores = np.linspace(-0.1, -1.0, len(found), dtype=np.float32)
            drafts.append(HostDraft(np.array(found, np.int64), None, scores))
        return drafts


class Knows(OnHost):
    """Drafts what it was told that a request will answer, among other branches; now and then these
    alone.

    Args:
        answers: By the number of the request.
    """

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.answers = answers

    def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
        return [self._draft(history, tier) for history in histories]

    def _draft(self, history: History, tier: Tier) -> HostDraft:
        at, most = len(history.output), tier.nodes - 1
        known = self.answers[history.request_id][at : at + tier.steps]
        tokens, parents, scores = [0], [-1], [0.0]
        parent = 0
        for depth, right in enumerate(known):
            place, first = (at + depth) % (tier.top_k + (depth > 0)), len(tokens)
            for rank in range(tier.top_k):
                tokens.append(right if rank == place else (right + 3 * rank + 1) % 256)
                parents.append(parent)
                scores.append(scores[parent] - 0.1 * (rank + 1))
            if place == tier.top_k:
                break
            parent = first + place
        kept = slice(1, 1 + most)
        return HostDraft(
            np.array(tokens[kept], np.int64),
            np.array(parents[kept], np.int64),
            np.array(scores[kept], np.float32),
        )


class TooLong(OnHost):
    """Proposes more than a tier holds."""

    def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
        scores = np.zeros(tier.nodes, np.float32)
        return [HostDraft(np.zeros(tier.nodes, np.int64), None, scores) for _ in histories]


class NoDrafter:
    """Something else."""
