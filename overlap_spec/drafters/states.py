"""What a grammar allows after a draft's nodes, known on the device: its states by bytes.

A grammar's table allows all that the grammar does, and little more (``grammar/byte_states.py``).
What it forbids is not drafted; where few tokens can come, the drafter chooses among these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels import Noise, after_tokens, candidates_among, top_candidates
from overlap_spec.types import DEAD, FEW_TOKENS, STATE_WIDTH


class StateTables(NamedTuple):
    """All grammars' tables, on the device.

    A state is the number at which its moves begin: a multiple of ``STATE_WIDTH``. ``moves`` int32
    ``(S * STATE_WIDTH,)`` and ``texts`` int32 ``(V, L)``: as :func:`after_tokens` has them. ``few``
    int32 ``(S, FEW_TOKENS + 1)``: tokens that may come in a state, -1 behind their end, and last 1
    where no other can.
    """

    moves: Tensor
    texts: Tensor
    few: Tensor


class GrammarStanding(NamedTuple):
    """Where each of ``T`` branches of a draft stands: int32 ``states (T,)``."""

    tables: StateTables
    states: Tensor

    def after(self, tokens: Tensor) -> Tensor:
        """The states of children by their tokens: int64 ``(T, c)`` → int32 ``(T, c)``."""
        return self._after(self.states[:, None].expand_as(tokens), tokens)

    def along(self, tokens: Tensor, branch: Tensor | None = None) -> GrammarStanding:
        """The branches' next ones.

        Args:
            tokens: int64 ``(B, c)``.
            branch: int64 ``(B, c)``: of ``T / B`` branches, that to which each is added; None:
                there is one.
        """
        states = self.states.view(tokens.shape[0], -1)
        states = states.expand_as(tokens) if branch is None else states.gather(1, branch)
        return GrammarStanding(self.tables, self._after(states, tokens).flatten())

    def among(self, batch: int, branches: Tensor) -> GrammarStanding:
        """Some of the ``T / batch`` branches of each root: int64 ``(c,)``."""
        return GrammarStanding(self.tables, self.states.view(batch, -1)[:, branches].flatten())

    def _after(self, states: Tensor, tokens: Tensor) -> Tensor:
        moves, texts, _ = self.tables
        return after_tokens(moves, states.flatten(), texts, tokens.flatten()).view(tokens.shape)


def legal_candidates(
    logits: Tensor,
    k: int,
    standing: GrammarStanding,
    offsets: Tensor | None,
    draft_ids: Tensor | None,
    noise: Noise | None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` best next tokens among those that the grammar may allow, best first.

    They are sought among the drafter's best, and among the few that can come at all where that is
    so, or none of these is allowed.

    Args:
        logits: ``(T, V)`` over the draft vocabulary.
        offsets, draft_ids: As :class:`overlap_spec.drafters.tree_drafter.TreeDrafter` has them.
        noise: Without support.

    Returns:
        Log-probabilities float32 ``(T, k)`` among what is allowed, as far as it was looked at;
        -inf where there are no more. Target ids, int64 ``(T, k)``.
    """
    wide = min(max(k, FEW_TOKENS), logits.shape[1])
    score, token = top_candidates(logits, wide, offsets, noise)
    row = torch.div(standing.states, STATE_WIDTH, rounding_mode="trunc")
    few = standing.tables.few.index_select(0, row)
    listed = few[:, :FEW_TOKENS].long()
    own = listed if draft_ids is None else _draft_ids(listed, draft_ids)
    bias = torch.where(own >= 0, 0.0, -torch.inf)
    fewer, others = candidates_among(logits, wide, own.clamp(min=0), listed, bias, noise)
    dead = standing.after(token) == DEAD
    # Of no token at all there are no numbers.
    alone = ((few[:, FEW_TOKENS:] > 0) | dead.all(1, keepdim=True)) & (fewer == fewer)[:, :1]
    forbidden = score.exp().masked_fill(~dead, 0.0).sum(1, keepdim=True).clamp(max=1 - 1e-6)
    score = (score - torch.log1p(-forbidden)).clamp(max=0.0).masked_fill(dead, -torch.inf)
    score, token = torch.where(alone, fewer, score), torch.where(alone, others, token)
    # Those that are allowed come first, in the order in which they are.
    last = (score == -torch.inf).to(torch.uint8)
    order = last.sort(dim=1, stable=True).indices[:, :k]
    score, token = score.gather(1, order), token.gather(1, order)
    missing = 0, k - score.shape[1]
    return F.pad(score, missing, value=-torch.inf), F.pad(token, missing)


def _draft_ids(ids: Tensor, draft_ids: Tensor) -> Tensor:
    """Draft ids of target ids, -1 where there is none."""
    last = draft_ids.shape[0] - 1
    own = draft_ids[ids.clamp(min=0, max=last)]
    return torch.where((ids >= 0) & (ids <= last), own, -1)
