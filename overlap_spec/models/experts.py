"""A layer's MLP that sends each token to some of many experts."""

# mypy: disable-error-code="no-any-return"
# TorchScript reads the annotations of a function as they are, and knows no newer spelling.

from typing import List, Optional  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap_spec.kernels.scripting import traceable
from overlap_spec.models.config import ExpertsConfig
from overlap_spec.models.shard import WHOLE, Shard


class ExpertWeights(nn.Module):
    """The matrices of all experts of a layer, as one tensor each.

    Plain experts: ``gate_up_proj (E, 2 * I, H)``, the gates first, and ``down_proj (E, H, I)``.
    GPT-OSS's lie as published, transposed, with gates and ups taking turns:
    ``gate_up_proj (E, H, 2 * I)``, ``down_proj (E, I, H)``, ``gate_up_proj_bias (E, 2 * I)``,
    ``down_proj_bias (E, H)``. Of a shard ``I`` is its part of every expert's channels.
    """

    def __init__(self, hidden: int, config: ExpertsConfig, shard: Shard) -> None:
        super().__init__()
        count, size = config.count, shard.part(config.intermediate_size)
        up, down = (count, 2 * size, hidden), (count, hidden, size)
        self.gate_up_proj_bias = self.down_proj_bias = None
        if config.limit is not None:
            up, down = (count, hidden, 2 * size), (count, size, hidden)
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, 2 * size))
            self.down_proj_bias = nn.Parameter(torch.zeros(count, hidden))
        self.gate_up_proj = nn.Parameter(torch.empty(up))
        self.down_proj = nn.Parameter(torch.empty(down))


class Experts(nn.Module):
    """A mixture of experts (arXiv 1701.06538): shares by a softmax of the router's scores.

    On the CPU each expert computes the tokens that were sent to it. On CUDA every expert computes
    all tokens, as a graph cannot wait for their numbers: the others' results count zero times.
    """

    def __init__(self, hidden: int, config: ExpertsConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        # Named as published.
        router = nn.Linear(hidden, config.count, bias=config.limit is not None)
        if config.limit is None:
            self.gate = router
        else:
            self.router = router
        self.experts = ExpertWeights(hidden, config, shard)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token and their shares: ``(T, H)`` → int64 and ``(T, per_token)``."""
        config = self.config
        if config.limit is not None:
            best, ids = self.router(x).topk(config.per_token, -1)
            return ids, best.softmax(-1)
        shares, ids = self.gate(x).float().softmax(-1).topk(config.per_token, -1)
        if config.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return ids, shares.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``(T, H)`` → ``(T, H)``."""
        ids, shares = self.route(x)
        own, limit = self.experts, self.config.limit
        up: Tensor = own.gate_up_proj
        down: Tensor = own.down_proj
        if limit is not None:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        work = _by_all if x.is_cuda else _by_chosen
        return work(x, ids, shares, up, down, own.gate_up_proj_bias, own.down_proj_bias, limit)


def _expert(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],  # noqa: UP045
    down_bias: Optional[Tensor],  # noqa: UP045
    limit: Optional[float],  # noqa: UP045
) -> Tensor:
    """One expert's MLP of ``x (n, H)``; ``up (2 * I, H)``, ``down (H, I)``."""
    both = F.linear(x, up, up_bias)
    if limit is None:
        gate, other = both.chunk(2, -1)
        return F.linear(F.silu(gate) * other, down, down_bias)
    gate = both[:, ::2].clamp(max=limit)
    other = both[:, 1::2].clamp(min=-limit, max=limit)
    # SiLU with a steeper slope, as published.
    return F.linear((other + 1) * (gate * torch.sigmoid(gate * 1.702)), down, down_bias)


@traceable
def _by_chosen(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],  # noqa: UP045
    down_bias: Optional[Tensor],  # noqa: UP045
    limit: Optional[float],  # noqa: UP045
) -> Tensor:
    """The sum of each token's experts by their shares: ``ids, shares (T, k)``."""
    out, flat, share = torch.zeros_like(x), ids.flatten(), shares.flatten()
    order = flat.sort(stable=True)[1]
    counts: List[int] = torch.bincount(flat, minlength=up.size(0)).tolist()  # noqa: UP006
    start = 0
    for e in range(up.size(0)):
        if counts[e] > 0:
            picks = order[start : start + counts[e]]
            start += counts[e]
            tokens = picks // ids.size(1)
            first = None if up_bias is None else up_bias[e]
            last = None if down_bias is None else down_bias[e]
            one = _expert(x.index_select(0, tokens), up[e], down[e], first, last, limit)
            out.index_add_(0, tokens, one * share.index_select(0, picks)[:, None])
    return out


def _by_all(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],  # noqa: UP045
    down_bias: Optional[Tensor],  # noqa: UP045
    limit: Optional[float],  # noqa: UP045
) -> Tensor:
    """As :func:`_by_chosen`, by sizes alone that do not depend on the choice."""
    out = torch.zeros_like(x)
    every = x.new_zeros(x.size(0), up.size(0)).scatter_(1, ids, shares)
    for e in range(up.size(0)):
        first = None if up_bias is None else up_bias[e]
        last = None if down_bias is None else down_bias[e]
        out += _expert(x, up[e], down[e], first, last, limit) * every[:, e, None]
    return out
