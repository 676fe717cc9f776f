"""What a grammar allows after a draft's nodes, known on the device: its states by bytes.

A grammar's table allows all that the grammar does, and little more
(``grammar/drafting/byte_states.py``). What it forbids is not drafted; where few tokens can come,
the drafter chooses among these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels import Noise, after_tokens, log_probs_among, top_candidates
from overlap_spec.steps import DEAD, FEW_TOKENS, LOST, STATE_WIDTH


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


class Options(NamedTuple):
    """The tokens ``(T, C)`` that were looked at behind ``T`` branches, and the states int32
    ``(T, C)`` behind them."""

    tables: StateTables
    tokens: Tensor
    states: Tensor

    def along(self, tokens: Tensor, branch: Tensor | None = None) -> GrammarStanding:
        """The branches' next ones; behind a token that was not looked at nothing is known.

        Args:
            tokens: int64 ``(B, c)``.
            branch: int64 ``(B, c)``: of ``T / B`` branches, that to which each is added; None:
                there is one.
        """
        seen, states = self.tokens[:, None], self.states[:, None]
        if branch is not None:
            width = seen.shape[2]
            place = branch[:, :, None].expand(-1, -1, width)
            shape = tokens.shape[0], -1, width
            seen, states = (x.view(shape).gather(1, place) for x in (seen, states))
        found = torch.where(seen == tokens[:, :, None], states, LOST).amax(-1)
        return GrammarStanding(self.tables, found.flatten())


def legal_candidates(
    logits: Tensor,
    k: int,
    standing: GrammarStanding,
    offsets: Tensor | None,
    draft_ids: Tensor | None,
    noise: Noise | None,
    best: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Options]:
    """The ``k`` best next tokens among those that the grammar may allow, best first.

    They are sought among the drafter's best, and among the few that can come at all where that is
    so, or none of these is allowed.

    Args:
        logits: ``(T, V)`` over the draft vocabulary.
        offsets, draft_ids: As :class:`overlap_spec.drafters.tree_drafter.TreeDrafter` has them.
        noise: As :func:`overlap_spec.kernels.top_candidates` has it.
        best: What that gives of the logits, ``max(k, FEW_TOKENS)`` at least or all, where it is
            known; None: it is made here.

    Returns:
        Log-probabilities float32 ``(T, k)`` among what is allowed, as far as it was looked at;
        -inf where there are no more. Target ids, int64 ``(T, k)``. All that was looked at.
    """
    tables, states = standing
    count = min(max(k, FEW_TOKENS), logits.shape[1])
    score, token = best or top_candidates(logits, count, offsets, noise)
    score, token = score[:, :count], token[:, :count]
    row = torch.div(states, STATE_WIDTH, rounding_mode="trunc")
    few = tables.few.index_select(0, row)
    listed = few[:, :FEW_TOKENS].long()
    own = listed if draft_ids is None else _draft_ids(listed, draft_ids)
    bias = torch.where(own >= 0, 0.0, -torch.inf)
    listed = listed.clamp(min=0)
    fewer = log_probs_among(logits, own.clamp(min=0), listed, bias, noise)
    looked_at = torch.cat([token, listed], 1)
    here = states[:, None].expand_as(looked_at).flatten()
    behind = after_tokens(tables.moves, here, tables.texts, looked_at.flatten())
    behind = behind.view(looked_at.shape)
    dead = behind[:, : token.shape[1]] == DEAD
    # Of no token at all there are no numbers.
    alone = ((few[:, FEW_TOKENS:] > 0) | dead.all(1, keepdim=True)) & (fewer == fewer)[:, :1]
    forbidden = (score.exp() * dead).sum(1, keepdim=True).clamp(max=1 - 1e-6)
    score = (score - torch.log1p(-forbidden)).clamp(max=0.0).masked_fill(dead, -torch.inf)
    missing = 0, token.shape[1] - FEW_TOKENS
    if missing != (0, 0):
        fewer, listed = F.pad(fewer, missing, value=-torch.inf), F.pad(listed, missing)
    score, place = torch.where(alone, fewer, score).topk(k)
    token = torch.where(alone, listed, token).gather(1, place)
    return score, token, Options(tables, looked_at, behind)


def _draft_ids(ids: Tensor, draft_ids: Tensor) -> Tensor:
    """Draft ids of target ids, -1 where there is none."""
    last = draft_ids.shape[0] - 1
    own = draft_ids[ids.clamp(min=0, max=last)]
    return torch.where((ids >= 0) & (ids <= last), own, -1)
