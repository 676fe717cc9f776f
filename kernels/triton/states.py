"""Tables of grammars' states by bytes: one lane of a program a token."""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels.triton.launch import launch

TOKENS = 64


@triton.jit(do_not_specialize=["count"])
def _after_tokens(
    moves, states, texts, tokens, out, count, LENGTH: tl.constexpr, SIZE: tl.constexpr
):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    state = tl.load(states + index, mask=inside, other=0)
    token = tl.load(tokens + index, mask=inside, other=0)
    # Each move waits for the one before; that of all tokens go side by side.
    for step in range(LENGTH):
        byte = tl.load(texts + token * LENGTH + step)
        state = tl.load(moves + (state + byte))
    tl.store(out + index, state, mask=inside)


def after_tokens(moves: Tensor, states: Tensor, texts: Tensor, tokens: Tensor) -> Tensor:
    """See :func:`overlap_spec.kernels.after_tokens`."""
    states, tokens = states.contiguous(), tokens.contiguous()
    count = len(tokens)
    out = torch.empty_like(states)
    launch(
        _after_tokens, (triton.cdiv(count, TOKENS),), moves, states, texts, tokens, out, count,
        LENGTH=texts.shape[1], SIZE=TOKENS, num_warps=2,
    )  # fmt: skip
    return out
