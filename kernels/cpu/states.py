"""Grammars' states by bytes on the CPU: see :mod:`overlap_spec.kernels.states`."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.kernels.sampling import Noise
from overlap_spec.kernels.states import GrammarStanding

ops = torch.ops.overlap_spec


def after_tokens(moves: Tensor, states: Tensor, texts: Tensor, tokens: Tensor) -> Tensor:
    behind: Tensor = ops.after_tokens(moves, states, texts, tokens)
    return behind


def legal_candidates(
    logits: Tensor,
    k: int,
    standing: GrammarStanding,
    offsets: Tensor | None = None,
    draft_ids: Tensor | None = None,
    noise: Noise | None = None,
    best: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    (moves, texts, few), states = standing
    known, heat = best or (None, None), noise or (None, None)
    scores, ids = ops.legal_candidates(
        logits, k, states, moves, texts, few, offsets, draft_ids, *heat, *known
    )
    return scores, ids
