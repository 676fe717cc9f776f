"""A layer's MLP that sends each token to some of many experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap_spec.kernels import mix_experts
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

    def mix(self, x: Tensor, ids: Tensor, shares: Tensor, limit: float | None) -> Tensor:
        """See :func:`overlap_spec.kernels.mix_experts`."""
        up: Tensor = self.gate_up_proj
        down: Tensor = self.down_proj
        if limit is not None:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        biases = self.gate_up_proj_bias, self.down_proj_bias
        return mix_experts(x, ids, shares, up, down, *biases, limit)


class Experts(nn.Module):
    """A mixture of experts (arXiv 1701.06538): shares by the router's scores.

    Args:
        shared: An expert that every token is sent to.
    """

    def __init__(
        self,
        hidden: int,
        config: ExpertsConfig,
        shard: Shard = WHOLE,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        # Named as published.
        router = nn.Linear(hidden, config.count, bias=config.limit is not None)
        if config.limit is None:
            self.gate = router
        else:
            self.router = router
        self.experts = ExpertWeights(hidden, config, shard)
        self.shared_expert = shared
        if shared is not None and config.shared_gate:
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)
        if config.sigmoid:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(config.count))

    def widen(self) -> None:
        """Keep the router in float32, if its scores are."""
        if self.config.wide:
            self.gate.float()
        if self.config.sigmoid:
            self.e_score_correction_bias.data = self.e_score_correction_bias.data.float()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token and their shares: ``(T, H)`` → int64 and ``(T, per_token)``."""
        config = self.config
        if config.limit is not None:
            best, ids = self.router(x).topk(config.per_token, -1)
            return ids, best.softmax(-1)
        scores = self.gate(x.float() if config.wide else x).float()
        every = scores.sigmoid() if config.sigmoid else scores.softmax(-1)
        biased = every + self.e_score_correction_bias if config.sigmoid else every
        ids = self._open(biased).topk(config.per_token, -1)[1]
        shares = every.gather(1, ids)
        if config.normalised:
            # Of sigmoids all may be as good as zero.
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return ids, (shares * config.factor).to(x.dtype)

    def _open(self, scores: Tensor) -> Tensor:
        """``(T, E)`` with -inf for experts outside of each token's best groups."""
        config = self.config
        if config.groups == 1:
            return scores
        grouped = scores.unflatten(1, (config.groups, -1))
        best = grouped.topk(config.best, -1)[0].sum(-1).topk(config.open_groups, -1)[1]
        added = torch.full_like(grouped[..., 0], -torch.inf).scatter(1, best, 0.0)
        opened: Tensor = (grouped + added[..., None]).flatten(1)
        return opened

    def forward(self, x: Tensor) -> Tensor:
        """``(T, H)`` → ``(T, H)``."""
        mixed: Tensor = self.experts.mix(x, *self.route(x), self.config.limit)
        if self.shared_expert is None:
            return mixed
        shared: Tensor = self.shared_expert(x)
        if self.config.shared_gate:
            shared = F.sigmoid(self.shared_expert_gate(x)) * shared
        return mixed + shared
