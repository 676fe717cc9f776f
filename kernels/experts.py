"""A mixture of experts: each computes the tokens that were sent to it."""

# mypy: disable-error-code="no-any-return"
# TorchScript reads the annotations of a function as they are, and knows no newer spelling.

from typing import List, Optional  # noqa: UP035

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels.dispatch import operation
from overlap_spec.kernels.scripting import traceable

# Picks an expert, of all tokens' choices, from which the kernels' blocks are those of a prompt.
MANY = 32


@operation
@traceable
def mix_experts(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],  # noqa: UP045
    down_bias: Optional[Tensor],  # noqa: UP045
    limit: Optional[float],  # noqa: UP045
) -> Tensor:
    """The sum of each token's experts by their shares: ``(T, H)`` → ``(T, H)``.

    ``ids`` int64 and ``shares (T, k)``: a token's experts, all distinct; ``up (E, 2 * I, H)``,
    ``down (E, H, I)`` with any strides; biases ``(E, 2 * I)``, ``(E, H)``. Without ``limit`` an
    expert is SwiGLU, its gates first; with one, GPT-OSS's: gates and ups take turns, both clamped.
    """
    out, flat, share = torch.zeros_like(x), ids.flatten(), shares.flatten()
    order = flat.sort(stable=True)[1]
    counts: List[int] = torch.bincount(flat, minlength=up.size(0)).tolist()  # noqa: UP006
    start = 0
    for e in range(up.size(0)):
        if counts[e] > 0:
            picks = order[start : start + counts[e]]
            start += counts[e]
            tokens = picks // ids.size(1)
            both = F.linear(
                x.index_select(0, tokens), up[e], None if up_bias is None else up_bias[e]
            )
            one = F.linear(
                activate(both, limit), down[e], None if down_bias is None else down_bias[e]
            )
            out.index_add_(0, tokens, one * share.index_select(0, picks)[:, None])
    return out


def activate(both: Tensor, limit: Optional[float]) -> Tensor:  # noqa: UP045
    """What an expert makes of its gates and ups: ``(n, 2 * I)`` → ``(n, I)``."""
    if limit is None:
        gate, other = both.chunk(2, -1)
        return F.silu(gate) * other
    gate = both[:, ::2].clamp(max=limit)
    other = both[:, 1::2].clamp(min=-limit, max=limit)
    # SiLU with a steeper slope, as published.
    return (other + 1) * (gate * torch.sigmoid(gate * 1.702))
