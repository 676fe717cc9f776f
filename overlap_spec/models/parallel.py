"""The layers of a shard whose results the ranks put together: one sum an attention, one a
feed-forward, one an embedding, and one gathering of logits (Megatron-LM, arXiv 1909.08053)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from overlap_spec.models.decoder import MLP, Attention, Decoder, PlainMLP
from overlap_spec.models.eagle3 import FusingHead
from overlap_spec.models.experts import Experts
from overlap_spec.models.shard import Shard


class Collectives(Protocol):
    """What ranks compute together. All of them call the same methods in the same order."""

    shard: Shard

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks of ``x``, any shape: the same bits on every rank."""

    def gather(self, x: Tensor) -> Tensor:
        """``x (T, n)`` of all ranks side by side: ``(T, size * n)``, the same on every rank."""


class Summed(nn.Module):
    """A layer that computes one rank's terms of a sum; a bias is added once, to the sum."""

    bias: nn.Parameter | None

    def __init__(self, part: nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.part, self._collectives = part, collectives
        bias = part.bias if isinstance(part, nn.Linear) else None
        self.register_parameter("bias", bias)
        if bias is not None:
            part.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """``(T, ...)`` → ``(T, hidden)``."""
        out = self._collectives.sum(self.part(x))
        return out if self.bias is None else out + self.bias


class SplitEmbedding(nn.Module):
    """An embedding of which each rank holds a run of the vocabulary."""

    def __init__(self, table: nn.Module, collectives: Collectives, vocab_size: int) -> None:
        super().__init__()
        self.table, self._collectives = table, collectives
        self._first, self._count = collectives.shard.padded_run(vocab_size)

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        weight = self.table.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        """``(T,)`` → ``(T, width)``: the terms of all ranks but one are zeros."""
        own = tokens - self._first
        inside = (own >= 0) & (own < self._count)
        found = self.table(torch.where(inside, own, 0))
        return self._collectives.sum(torch.where(inside[..., None], found, 0.0))


class SplitHead(nn.Module):
    """A head of which each rank holds a run of the vocabulary; the last one's is filled up."""

    def __init__(self, linear: nn.Module, collectives: Collectives, vocab_size: int) -> None:
        super().__init__()
        self.linear, self._collectives, self._vocab_size = linear, collectives, vocab_size

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        weight = self.linear.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        """``(T, hidden)`` → ``(T, vocab_size)``, on every rank."""
        logits = self._collectives.gather(self.linear(hidden))
        if logits.shape[1] == self._vocab_size:
            return logits
        return logits[:, : self._vocab_size].contiguous()


def join(decoder: Decoder, collectives: Collectives) -> None:
    """Let a decoder that holds a shard compute what the whole one does, with the other ranks.

    Its tensors are loaded, and not yet packed or quantised: their names change.
    """
    size = decoder.config.vocab_size
    decoder.collectives = collectives
    decoder.add_module("embed_tokens", SplitEmbedding(decoder.embed_tokens, collectives, size))
    decoder.add_module("lm_head", SplitHead(decoder.lm_head, collectives, size))
    for layer in decoder.layers:
        _join_layer(layer, collectives)


def join_head(head: FusingHead, collectives: Collectives) -> None:
    """The same for a draft head. Its embedding and the fusing of features are whole: no draft step
    reads much of them."""
    for layer in (head.midlayer, *head.layers.values()):
        _join_layer(layer, collectives)
    if hasattr(head, "lm_head"):
        size = head.config.draft_vocab_size
        head.add_module("lm_head", SplitHead(head.lm_head, collectives, size))


def _join_layer(layer: Any, collectives: Collectives) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, Attention)
    attention.add_module("o_proj", Summed(attention.o_proj, collectives))
    if isinstance(mlp, Experts):
        bias = mlp.experts.down_proj_bias
        if bias is not None and collectives.shard.rank:
            # Each expert's own, by the share of a token that it has: one rank adds them.
            bias.data.zero_()
        layer.add_module("mlp", Summed(mlp, collectives))
    else:
        assert isinstance(mlp, MLP | PlainMLP)
        mlp.add_module("down_proj", Summed(mlp.down_proj, collectives))
