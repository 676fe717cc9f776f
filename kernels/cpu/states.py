"""Grammars' states by bytes on the CPU: see :mod:`overlap_spec.kernels.states`."""

from __future__ import annotations

import torch
from torch import Tensor


def after_tokens(moves: Tensor, states: Tensor, texts: Tensor, tokens: Tensor) -> Tensor:
    behind: Tensor = torch.ops.overlap_spec.after_tokens(moves, states, texts, tokens)
    return behind
