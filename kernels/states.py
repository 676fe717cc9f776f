"""Tables of grammars' states by bytes: which state comes after a token."""

from __future__ import annotations

from torch import Tensor

from overlap_spec.kernels.dispatch import operation


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
