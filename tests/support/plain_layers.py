"""A decoder layer's arithmetic written out in plain torch, from the names in a published file."""

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """``(T, heads, D)``, by halves."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half) / half)
    angle = (positions[:, None] * speed)[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def linear(weights: Tensors, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def attention(
    weights: Tensors, layer: str, x: Tensor, positions: Tensor, dim: int, window: int | None = None
) -> Tensor:
    """Causal attention over one sequence, biased and normed where the file has weights for it."""
    name = f"{layer}.self_attn"
    q, k, v = (linear(weights, f"{name}.{n}_proj", x).view(len(x), -1, dim) for n in "qkv")
    if f"{name}.q_norm.weight" in weights:
        q, k = rms(q, weights[f"{name}.q_norm.weight"]), rms(k, weights[f"{name}.k_norm.weight"])
    q, k = rotate(q, positions), rotate(k, positions)
    k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    seen = torch.ones(len(x), len(x)).tril().bool()
    if window is not None:
        seen &= ~seen.tril(-window)
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return linear(weights, f"{name}.o_proj", out.flatten(1))


def mlp(weights: Tensors, layer: str, x: Tensor) -> Tensor:
    gate, up = (linear(weights, f"{layer}.mlp.{n}_proj", x) for n in ("gate", "up"))
    return linear(weights, f"{layer}.mlp.down_proj", F.silu(gate) * up)


def block(
    weights: Tensors, layer: str, x: Tensor, normed: Tensor, positions: Tensor, dim: int
) -> Tensor:
    """The stream ``x`` after a layer whose attention reads ``normed``."""
    x = x + attention(weights, layer, normed, positions, dim)
    return x + mlp(weights, layer, rms(x, weights[f"{layer}.post_attention_layernorm.weight"]))
