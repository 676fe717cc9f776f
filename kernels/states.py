"""Tables of grammars' states by bytes: which state comes after a token, and what may be drafted.

A grammar's table allows all that the grammar does, and little more
(``grammar/drafting/byte_states.py``). What it forbids is not drafted; where few tokens can come,
the drafter chooses among these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels.dispatch import operation
from overlap_spec.kernels.sampling import Noise, log_probs_among, top_candidates


@operation
def after_tokens(moves: Tensor, states: Tensor, texts: Tensor, tokens: Tensor) -> Tensor:
    """Follow the bytes of one token from each state.

    Args:
        moves: int32 ``(S * W,)``: number ``s + b`` is the state after ``b`` in the state ``s``. A
            state is the number at which its moves begin.
        states: int32 ``(N,)``.
        texts: int32 ``(V, L)``: what each token moves by, one after the other.
        tokens: int64 ``(N,)``, in ``[0, V)``.

    Returns:
        int32 ``(N,)``.
    """
    for step in texts.index_select(0, tokens).unbind(1):
        states = moves.index_select(0, states + step)
    return states


class StateTables(NamedTuple):
    """All grammars' tables, on the device.

    ``moves`` int32 ``(S * W,)`` and ``texts`` int32 ``(V, L)``: as :func:`after_tokens` has them;
    in the second state, W, nothing can come. ``few`` int32 ``(S, F + 1)``: tokens that may come
    in a state, -1 behind their end, and last 1 where no other can.
    """

    moves: Tensor
    texts: Tensor
    few: Tensor


class GrammarStanding(NamedTuple):
    """Where each of ``T`` branches of a draft stands in its grammar: int32 ``states (T,)``."""

    tables: StateTables
    states: Tensor

    def behind(self, tokens: Tensor, branch: Tensor | None = None) -> GrammarStanding:
        """Where the branches' next ones stand.

        Args:
            tokens: int64 ``(B, c)``.
            branch: int64 ``(B, c)``: of ``T / B`` branches, that to which each is added; None:
                there is one, and c is 1.
        """
        states = self.states
        if branch is not None:
            states = states.view(tokens.shape[0], -1).gather(1, branch).flatten()
        moves, texts, _ = self.tables
        return GrammarStanding(self.tables, after_tokens(moves, states, texts, tokens.flatten()))


@operation
def legal_candidates(
    logits: Tensor,
    k: int,
    standing: GrammarStanding,
    offsets: Tensor | None = None,
    draft_ids: Tensor | None = None,
    noise: Noise | None = None,
    best: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` best next tokens among those that the grammar may allow, best first.

    They are sought among the drafter's best, and among the few that can come at all where that is
    so, or none of these is allowed.

    Args:
        logits: ``(T, V)`` over the draft vocabulary.
        offsets, noise: As :func:`overlap_spec.kernels.top_candidates` has them.
        draft_ids: int64: of each target id the draft id, -1 where it has none; None: they are one.
        best: What that operation gives of the logits, ``max(k, F)`` at least or all, where it is
            known; None: it is made here.

    Returns:
        Log-probabilities float32 ``(T, k)`` among what is allowed, as far as it was looked at;
        -inf where there are no more. Target ids, int64 ``(T, k)``.
    """
    (moves, texts, few), states = standing
    length, width = few.shape[1] - 1, moves.shape[0] // few.shape[0]
    count = min(max(k, length), logits.shape[1])
    score, token = best or top_candidates(logits, count, offsets, noise)
    score, token = score[:, :count], token[:, :count]
    told = few.index_select(0, torch.div(states, width, rounding_mode="trunc"))
    listed = told[:, :length].long()
    own = listed if draft_ids is None else _draft_ids(listed, draft_ids)
    bias = torch.where(own >= 0, 0.0, -torch.inf)
    listed = listed.clamp(min=0)
    fewer = log_probs_among(logits, own.clamp(min=0), listed, bias, noise)
    here = states[:, None].expand_as(token).flatten()
    dead = after_tokens(moves, here, texts, token.flatten()).view(token.shape) == width
    # Of no token at all there are no numbers.
    alone = ((told[:, length:] > 0) | dead.all(1, keepdim=True)) & (fewer == fewer)[:, :1]
    forbidden = (score.exp() * dead).sum(1, keepdim=True).clamp(max=1 - 1e-6)
    score = (score - torch.log1p(-forbidden)).clamp(max=0.0).masked_fill(dead, -torch.inf)
    missing = 0, token.shape[1] - length
    if missing != (0, 0):
        fewer, listed = F.pad(fewer, missing, value=-torch.inf), F.pad(listed, missing)
    score, place = torch.where(alone, fewer, score).topk(k)
    return score, torch.where(alone, listed, token).gather(1, place)


def _draft_ids(ids: Tensor, draft_ids: Tensor) -> Tensor:
    """Draft ids of target ids, -1 where there is none."""
    last = draft_ids.shape[0] - 1
    own = draft_ids[ids.clamp(min=0, max=last)]
    return torch.where((ids >= 0) & (ids <= last), own, -1)
