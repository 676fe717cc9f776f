"""Layers whose attention is a gated delta network (arXiv 2412.06464), as Qwen3-Next has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap_spec.kernels import Tokens, rms_norm, unit
from overlap_spec.models.config import DeltaConfig


class Flow(NamedTuple):
    """What one layer's tokens bring to the texts' states: what goes with its keys to attention.

    ``inputs (T, C)``: of the convolution by ``weight (C, taps)``, which makes queries, keys and
    values of them; ``decays`` and ``rates``: float32 ``(T, heads of values)``.
    """

    inputs: Tensor
    decays: Tensor
    rates: Tensor
    weight: Tensor
    config: DeltaConfig

    def tokens(self, convolved: Tensor, decays: Tensor, rates: Tensor) -> Tokens:
        """Those of trees, of what the convolution has made: float32 ``(B, N, C)``; and of their
        decays and rates ``(B, N, heads of values)``."""
        config = self.config
        width, heads = config.key_heads * config.key_dim, (config.key_heads, config.groups)
        queries, keys, values = convolved.split([width, width, config.value_channels], 2)
        queries, keys = (unit(x.unflatten(2, (heads[0], -1))) for x in (queries, keys))
        return Tokens(
            queries * config.key_dim**-0.5,
            keys,
            values.unflatten(2, (*heads, -1)),
            decays.unflatten(2, heads),
            rates.unflatten(2, heads),
        )


class GatedDelta(nn.Module):
    """Queries, keys, values and gates in one product, decays and rates in another; the caller's
    states; a gated norm of each head; output product."""

    def __init__(self, hidden: int, config: DeltaConfig, eps: float) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        heads = config.key_heads * config.groups
        self.in_proj_qkvz = nn.Linear(hidden, config.channels + config.value_channels, bias=False)
        self.in_proj_ba = nn.Linear(hidden, 2 * heads, bias=False)
        self.conv1d = nn.Parameter(torch.empty(config.channels, 1, config.taps))
        self.A_log, self.dt_bias = (nn.Parameter(torch.zeros(heads)) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(config.value_dim))
        self.out_proj = nn.Linear(config.value_channels, hidden, bias=False)

    def widen(self) -> None:
        """Keep in float32 what a state's decays are made of."""
        for parameter in (self.A_log, self.dt_bias):
            parameter.data = parameter.data.float()

    def rows_of_head(self, layer: str) -> list[int] | None:
        """Rows of a product to each head of keys, by what they make: queries, keys, values and
        gates, or rates and decays; None: it is none of these two."""
        config = self.config
        value, groups = config.groups * config.value_dim, config.groups
        both = {
            "in_proj_qkvz": [config.key_dim, config.key_dim, value, value],
            "in_proj_ba": [groups, groups],
        }
        return both.get(layer)

    def forward(self, x: Tensor, rotary: Tensor, attend: Any, layer: int) -> Tensor:  # noqa: ARG002
        config = self.config
        inputs, gates = self.in_proj_qkvz(x).split([config.channels, config.value_channels], 1)
        rates, steps = self.in_proj_ba(x).float().chunk(2, 1)
        decays = -self.A_log.exp() * F.softplus(steps + self.dt_bias)
        weight = self.conv1d.squeeze(1)
        out = attend(layer, Flow(inputs, decays, rates.sigmoid(), weight, config))
        normed = rms_norm(out.to(x.dtype).unflatten(1, (-1, config.value_dim)), self.norm, self.eps)
        gated = normed.flatten(1).float() * F.silu(gates.float())
        mixed: Tensor = self.out_proj(gated.to(x.dtype))
        return mixed
