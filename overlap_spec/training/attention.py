"""Attention over whole padded rows: what training hands to the modules as ``attend``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.errors import ConfigError
from overlap_spec.models.decoder import Heads, Latents
from overlap_spec.models.delta import Flow

# Up to this width the plain products beat the fused kernel on the CPU, whose backward pass there
# costs several times its forward pass.
SHORT = 320


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of ``(B, heads, W, D)`` each → ``(B, heads, W, D)``."""
    width = q.shape[2]
    if q.is_cuda or width > SHORT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    later = torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    attended: Tensor = scores.masked_fill(later, -1e30).softmax(-1).to(v.dtype) @ v
    return attended


def usual(heads: Heads | Latents | Flow) -> tuple[Tensor, Tensor, Tensor]:
    """See :meth:`~overlap_spec.models.decoder.Heads.rotated`; ConfigError where that is not all."""
    if isinstance(heads, Latents | Flow) or any(rule is not None for rule in heads.scoring):
        raise ConfigError(
            "model: training reads no target with soft caps, sinks, latents, states or a scale of "
            "its own in its attention: take another"
        )
    return heads.rotated()


class CausalRows:
    """``attend`` for ``rows`` sequences of ``width`` tokens laid end to end.

    Padding stands on the right, so that no real token ever sees it.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.rows = rows
        self.width = width

    def __call__(self, layer: int, heads: Heads | Latents) -> Tensor:  # noqa: ARG002
        """Heads of ``B·W`` tokens → ``(B·W, heads · D)``."""
        return self.attend(*usual(heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q (B·W, heads, D)``, ``k, v (B·W, kv_heads, D)`` → ``(B·W, heads · D)``."""
        groups = q.shape[1] // k.shape[1]
        # Under autocast the rotation leaves float32 beside a bfloat16 v.
        q, k = q.to(v.dtype), k.to(v.dtype)
        q, k, v = (self.split(x) for x in (q, k, v))
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return causal(q, k, v).transpose(1, 2).reshape(self.rows * self.width, -1)

    def split(self, x: Tensor) -> Tensor:
        """``(B·W, heads, D)`` → ``(B, heads, W, D)``."""
        return x.view(self.rows, self.width, x.shape[1], x.shape[2]).transpose(1, 2)


class FirstRows(CausalRows):
    """The first pass of a draft: causal, and it keeps each layer's keys and values for later."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shapes as for :class:`CausalRows`."""
        self.kept.append((self.split(k.to(v.dtype)), self.split(v)))
        return super().attend(q, k, v)


def below(
    query: Tensor,
    shared: tuple[Tensor, Tensor],
    hidden: Tensor,
    own: tuple[Tensor, Tensor],
    used: Tensor | None = None,
) -> Tensor:
    """Attention of drafts that hang below slots of a first pass: to these, and to the drafts of
    their own chain.

    Args:
        query: ``(B, heads, A, D)``.
        shared: Keys and values of the first pass, ``(B, kv_heads, W, D)`` each.
        hidden: bool ``(..., A, W)``: which of them a draft does not see.
        own: Those of each draft's chain, itself last, ``(S, B, kv_heads, A, D)`` each.
        used: float ``(S,)``: 0, or -inf for what is not there; None: all is.

    Returns:
        ``(B, heads, A, D)``.
    """
    groups, scale = query.shape[1] // shared[0].shape[1], query.shape[3] ** -0.5
    shared_keys, shared_values = (x.repeat_interleave(groups, 1) for x in shared)
    keys, values = (x.repeat_interleave(groups, 2) for x in own)
    before = (query @ shared_keys.transpose(-1, -2)).float().masked_fill(hidden, -1e30)
    mine = (query[None] * keys).sum(-1).float().permute(1, 2, 3, 0)
    if used is not None:
        mine = mine + used
    weights = (torch.cat([before, mine], -1) * scale).softmax(-1).to(query.dtype)
    width = shared_keys.shape[2]
    out = weights[..., :width] @ shared_values
    out = out + (weights[..., width:].permute(3, 0, 1, 2)[..., None] * values).sum(0)
    attended: Tensor = out
    return attended


class ChainRows(CausalRows):
    """A later pass of a draft chain: training-time test of EAGLE-3 (arXiv 2503.01840).

    A row attends to the first pass's slots up to its own and to its own slots of later passes, as
    it does at inference, where its drafts hang below its slot.

    Args:
        rows, width: Shape of the token rows.
        shared: Keys and values of the first pass, ``(B, kv_heads, W, D)`` each.
        own: Those of the later passes so far, ``(S, B, kv_heads, W, D)`` each; unused ones zero.
        used: float ``(S,)``: 0 for a pass that is there, -inf for one that is not.
    """

    kept: tuple[Tensor, Tensor]

    def __init__(
        self,
        rows: int,
        width: int,
        shared: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        used: Tensor,
    ) -> None:
        super().__init__(rows, width)
        self.shared, self.own, self.used = shared, own, used

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shapes as for :class:`CausalRows`."""
        self.kept = self.split(k.to(v.dtype)), self.split(v)
        keys, values = (
            torch.cat([old, new[None]]) for old, new in zip(self.own, self.kept, strict=True)
        )
        later = torch.ones(self.width, self.width, dtype=torch.bool, device=q.device).triu(1)
        used = torch.cat([self.used, self.used.new_zeros(1)])
        out = below(self.split(q.to(v.dtype)), self.shared, later, (keys, values), used)
        return out.transpose(1, 2).reshape(self.rows * self.width, -1)


class MaskRows(CausalRows):
    """The masks of one depth behind their anchors: P-EAGLE's depth masks (arXiv 2602.01469).

    A mask attends to the first pass's slots up to its anchor and to the masks between, as it does
    at inference, where all masks behind a root are one pass.

    Args:
        anchors: int64 ``(B, A)``: the first pass's slots.
        shared: Of each layer, keys and values of the first pass, ``(B, kv_heads, W, D)`` each.
        own: Of each depth before and each layer, those of its masks, ``(B, kv_heads, A', D)`` each:
            the first A of them have the same anchors.
    """

    def __init__(
        self,
        anchors: Tensor,
        shared: list[tuple[Tensor, Tensor]],
        own: list[list[tuple[Tensor, Tensor]]],
    ) -> None:
        super().__init__(*anchors.shape)
        slots = torch.arange(shared[0][0].shape[2], device=anchors.device)
        self.hidden = (slots > anchors[:, :, None])[:, None]
        self.shared, self.own = shared, own
        self.kept: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shapes as for :class:`CausalRows`."""
        layer = len(self.kept)
        self.kept.append((self.split(k.to(v.dtype)), self.split(v)))
        chain = [depth[layer] for depth in self.own] + self.kept[-1:]
        keys, values = (
            torch.stack([pair[side][:, :, : self.width] for pair in chain]) for side in (0, 1)
        )
        query = self.split(q.to(v.dtype))
        out = below(query, self.shared[layer], self.hidden, (keys, values))
        return out.transpose(1, 2).reshape(self.rows * self.width, -1)
