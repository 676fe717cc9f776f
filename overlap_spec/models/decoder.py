"""The decoder that every architecture shares; attention over the cache is the caller's.

The same module trains and serves: it turns tokens into queries, keys and values and hands them
to ``attend``, which rotates them, stores keys and values where it wants and returns the attended
values: on a GPU the rotation and the store are one kernel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap_spec.kernels import (
    Scoring,
    add_rms_norm,
    apply_rope,
    gelu_and_mul,
    rms_norm,
    rotate_and_store,
    silu_and_mul,
)
from overlap_spec.models.config import LatentConfig, ModelConfig
from overlap_spec.models.delta import GatedDelta
from overlap_spec.models.experts import Experts
from overlap_spec.models.rope import channel_order, rope_table

# Among feature layers: the output of the final norm, which the head reads.
NORMED_OUTPUT = -1
# Of the norms of latents, whatever that of the others is.
LATENT_EPS = 1e-6


class Heads(NamedTuple):
    """One layer's queries, keys and values, neither normed nor rotated.

    ``qkv (T, heads + 2 * kv_heads, D)``; ``rotary (T, 2, D)`` as in
    :func:`overlap_spec.kernels.apply_rope`; ``norm``: weight ``(heads + kv_heads, D)`` and eps of
    the norm over each query's and key's own head, None where the architecture has none;
    ``scoring`` as in :func:`overlap_spec.kernels.tree_attention`.
    """

    qkv: Tensor
    rotary: Tensor
    kv_heads: int
    norm: tuple[Tensor, float] | None
    scoring: Scoring = Scoring()

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q (T, heads, D)`` and ``k, v (T, kv_heads, D)``, normed and rotated."""
        both = self.qkv.shape[1] - self.kv_heads
        qk = self.qkv[:, :both]
        if self.norm is not None:
            qk = rms_norm(qk, *self.norm)
        qk = apply_rope(qk, self.rotary)
        return qk[:, : both - self.kv_heads], qk[:, both - self.kv_heads :], self.qkv[:, both:]

    def store(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        """Keys and values into their slots: see :func:`overlap_spec.kernels.rotate_and_store`."""
        return rotate_and_store(self.qkv, self.rotary, k_cache, v_cache, slots, self.norm)


class Latents(NamedTuple):
    """One layer's queries, and the latents that are keys and values of all of them.

    ``q (T, heads, V)``; ``latents (T, V)``; ``turning (T, heads + 1, R)``: what of each query, and
    of the key, is still to be rotated, by ``rotary (T, 2, R)``.
    """

    q: Tensor
    latents: Tensor
    turning: Tensor
    rotary: Tensor
    scoring: Scoring

    def store(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        """Latents and the keys' rotated part into their slots, int64 ``(T,)``.

        ``k_cache (pages, page_size, 1, R)``, ``v_cache (pages, page_size, 1, V)`` → queries
        ``(T, heads, V + R)``.
        """
        turned = apply_rope(self.turning, self.rotary)
        k_cache.flatten(0, 2).index_copy_(0, slots, turned[:, -1])
        v_cache.flatten(0, 2).index_copy_(0, slots, self.latents)
        return torch.cat([self.q, turned[:, :-1]], -1)


class Attend(Protocol):
    """Attention of one layer over what is cached and what is new."""

    def __call__(self, layer: int, heads: Any) -> Tensor:
        """``T`` tokens' :class:`Heads` or :class:`Latents` → ``(T, heads * D)``, of latents
        ``(T, heads * V)``; or what flows into states (:class:`overlap_spec.models.delta.Flow`)
        → ``(T, heads * V)``."""


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + delta``, and that sum."""
        return add_rms_norm(delta, x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Norm by mean and variance (arXiv 1607.06450) over the last dimension."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + delta``, and that sum."""
        total = x + delta
        return self(total), total


class NoNorm(nn.Module):
    """In the place of a norm that a layer does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """``x + delta``, twice."""
        total = x + delta
        return total, total


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm of the stream."""
    if config.norm == "layer":
        return LayerNorm(config.hidden_size, config.rms_norm_eps, config.norm_bias)
    return RMSNorm(config.hidden_size, config.rms_norm_eps)


class EachHeadNorm(nn.Module):
    """Norm by mean and variance over each head, by weights of its own, ``(heads, D)``."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.eps = eps

    def forward(self, qk: Tensor) -> Tensor:
        """``(T, heads, D)`` of queries and keys → the same."""
        wide = F.layer_norm(qk.float(), qk.shape[-1:], None, None, self.eps)
        return (wide * self.weight).to(qk.dtype)


class JointHeadsNorm(nn.Module):
    """Root-mean-square norm over all heads of queries at once, and over all heads of keys."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads + kv_heads, head_dim))
        self.parts, self.eps = (heads, kv_heads), eps

    def forward(self, qk: Tensor) -> Tensor:
        """``(T, heads + kv_heads, D)`` → the same."""
        both = zip(qk.split(self.parts, 1), self.weight.split(self.parts), strict=True)
        normed = [rms_norm(x.flatten(1), weight.flatten(), self.eps) for x, weight in both]
        return torch.cat(normed, 1).view_as(qk)


class Attention(nn.Module):
    """Query, key and value in one product; the caller's attention; output product.

    ``input_size`` differs from the hidden size in EAGLE-3's layer, which reads two vectors.
    """

    def __init__(self, config: ModelConfig, input_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.own_heads,
            config.own_kv_heads,
            config.head_dim,
        )
        # Those of gates, which go before the queries.
        self.gates = self.heads if config.output_gate else 0
        total = (self.gates + self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(input_size, total, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.o_bias)
        self.qk_norm: nn.Module | None = None
        rows, eps = self.heads + self.kv_heads, config.rms_norm_eps
        if config.joint_qk_norm:
            self.qk_norm = JointHeadsNorm(self.heads, self.kv_heads, self.head_dim, eps)
        elif config.qk_norm and config.norm == "layer":
            self.qk_norm = EachHeadNorm(rows, self.head_dim, eps)
        elif config.qk_norm:
            # One row a head, queries then keys, so that both are normed in one pass.
            self.qk_norm = RMSNorm(self.head_dim, eps)
            self.qk_norm.weight = nn.Parameter(torch.ones(rows, self.head_dim))
        self.sinks: nn.Parameter | None = None
        if config.sinks:
            self.sinks = nn.Parameter(torch.zeros(self.heads))
        # Of the file, as weights are read by it.
        self.channels = channel_order(config.rope, config.head_dim)
        self.scale, self.soft_cap = config.query_scale, config.score_cap

    def project(self, x: Tensor, rotary: Tensor) -> Heads:
        """Queries, keys and values of ``x (T, input_size)``."""
        return self._heads(self.qkv_proj(x).view(x.shape[0], -1, self.head_dim), rotary)

    def _heads(self, qkv: Tensor, rotary: Tensor) -> Heads:
        """Of what the product has made, ``(T, heads + 2 * kv_heads, D)``."""
        norm = None
        if isinstance(self.qk_norm, RMSNorm):
            norm = self.qk_norm.weight, self.qk_norm.eps
        elif self.qk_norm is not None:
            qk, v = qkv.split([qkv.shape[1] - self.kv_heads, self.kv_heads], 1)
            qkv = torch.cat([self.qk_norm(qk), v], 1)
        scoring = Scoring(self.scale, self.soft_cap, self.sinks)
        return Heads(qkv, rotary, self.kv_heads, norm, scoring)

    def forward(self, x: Tensor, rotary: Tensor, attend: Attend, layer: int) -> Tensor:
        if not self.gates:
            out: Tensor = self.o_proj(attend(layer, self.project(x, rotary)))
            return out
        every = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        gates, qkv = every[:, : self.gates], every[:, self.gates :]
        attended = attend(layer, self._heads(qkv, rotary))
        gated: Tensor = self.o_proj(attended * F.sigmoid(gates.flatten(1)))
        return gated


class LatentAttention(nn.Module):
    """Attention over latents that all heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Which keys and values a head makes of a latent, ``kv_b_proj``, is multiplied into its queries
    and into what it attended: nothing but latents is cached and read.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig) -> None:
        super().__init__()
        hidden, rope, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.heads, self.sizes = config.num_heads, [latent.key_dim, rope]
        self.parts, self.rotated = [latent.key_dim, latent.value_dim], [latent.rank, rope]
        queries = self.heads * sum(self.sizes)
        if latent.query_rank is None:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, latent.query_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(latent.query_rank, queries, bias=False)
        self.has_query_latents = latent.query_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent.rank + rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, LATENT_EPS)
        # Not a layer: its rows are multiplied from either side.
        self.kv_b_proj = nn.Parameter(torch.empty(self.heads * sum(self.parts), latent.rank))
        self.o_proj = nn.Linear(self.heads * latent.value_dim, hidden, bias=config.o_bias)
        self.scoring = Scoring(config.query_scale)
        # Of the file's rows, as weights are read by it.
        self.channels = channel_order(config.rope, rope)

    def order(self, layer: str) -> Tensor | None:
        """The rows of the file's ``layer`` in the order in which they are kept; None: its own."""
        if self.channels is None or layer not in ("q_proj", "q_b_proj", "kv_a_proj_with_mqa"):
            return None
        straight = (self.rotated if layer == "kv_a_proj_with_mqa" else self.sizes)[0]
        each = torch.cat([torch.arange(straight), straight + self.channels])
        count = 1 if layer == "kv_a_proj_with_mqa" else self.heads
        return (torch.arange(count)[:, None] * len(each) + each).flatten()

    def forward(self, x: Tensor, rotary: Tensor, attend: Attend, layer: int) -> Tensor:
        if self.has_query_latents:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            q = self.q_proj(x)
        straight, turning = q.view(x.shape[0], self.heads, -1).split(self.sizes, 2)
        latents, key = self.kv_a_proj_with_mqa(x).split(self.rotated, 1)
        keys, values = self.kv_b_proj.unflatten(0, (self.heads, -1)).split(self.parts, 1)
        heads = Latents(
            torch.bmm(straight.transpose(0, 1), keys).transpose(0, 1),
            self.kv_a_layernorm(latents),
            torch.cat([turning, key[:, None]], 1),
            rotary,
            self.scoring,
        )
        attended = attend(layer, heads).view(x.shape[0], self.heads, -1)
        out = torch.bmm(attended.transpose(0, 1), values.transpose(1, 2))
        mixed: Tensor = self.o_proj(out.transpose(0, 1).flatten(1))
        return mixed


class MLP(nn.Module):
    """SwiGLU or GeGLU (arXiv 2002.05202) with gate and up in one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        own = config.shard.part(config.intermediate_size)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * own, bias=config.mlp_bias)
        self.down_proj = nn.Linear(own, config.hidden_size, bias=config.mlp_bias)
        self.activate = silu_and_mul if config.activation == "silu" else gelu_and_mul

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activate(self.gate_up_proj(x)))
        return out


class PlainMLP(nn.Module):
    """An activation between two products."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        own = config.shard.part(config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, own, bias=config.mlp_bias)
        self.down_proj = nn.Linear(own, config.hidden_size, bias=config.mlp_bias)
        approximate = "none" if config.activation == "gelu" else "tanh"
        self.activate = partial(F.gelu, approximate=approximate)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activate(self.up_proj(x)))
        return out


def make_attention(config: ModelConfig, number: int) -> Attention | LatentAttention | GatedDelta:
    """The attention of layer ``number``, or what it has in the place of one."""
    if config.delta is not None and config.delta.layers[number]:
        return GatedDelta(config.hidden_size, config.delta, config.rms_norm_eps)
    if config.latent is not None:
        return LatentAttention(config, config.latent)
    return Attention(config, config.hidden_size)


def make_mlp(config: ModelConfig, number: int) -> nn.Module:
    """The MLP or the experts of layer ``number``."""
    experts = config.experts
    if experts is None or not experts.layers[number]:
        return MLP(config) if config.gated else PlainMLP(config)
    shared = None
    if experts.shared_size:
        shared = MLP(replace(config, intermediate_size=experts.shared_size))
    return Experts(config.hidden_size, experts, config.shard, shared)


class Layer(nn.Module):
    """Pre-norm attention and MLP, each with its residual.

    What the MLP adds to the stream is handed on beside it: the next norm adds it up.
    """

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config) if config.pre_norms else NoNorm()
        self.self_attn = make_attention(config, number)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = make_mlp(config, number)
        self.residual_scale = config.residual_scale

    def forward(
        self, x: Tensor, normed: Tensor, rotary: Tensor, attend: Attend, layer: int
    ) -> tuple[Tensor, Tensor]:
        """The stream ``x`` after the attention, and what the MLP adds to it; ``normed``: of
        ``x`` by ``input_layernorm``."""
        attended = self.scaled(self.self_attn(normed, rotary, attend, layer))
        normed, x = self.post_attention_layernorm.add(x, attended)
        return x, self.scaled(self.mlp(normed))

    def scaled(self, delta: Tensor) -> Tensor:
        """What is added to the stream, as it is added."""
        return delta if self.residual_scale == 1.0 else delta * self.residual_scale


class ParallelLayer(Layer):
    """A layer whose MLP reads the same stream as its attention, by the same norm or its own."""

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        super().__init__(config, number)
        if config.parallel_norms == 1:
            del self.post_attention_layernorm
        self.norms = config.parallel_norms

    def forward(
        self, x: Tensor, normed: Tensor, rotary: Tensor, attend: Attend, layer: int
    ) -> tuple[Tensor, Tensor]:
        own = normed if self.norms == 1 else self.post_attention_layernorm(x)
        return x + self.self_attn(normed, rotary, attend, layer), self.mlp(own)


class SandwichLayer(Layer):
    """A layer that norms what attention and MLP add, and in most models what they read, too; the
    norms are named as Gemma's."""

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        super().__init__(config, number)
        self.pre_feedforward_layernorm = make_norm(config) if config.pre_norms else NoNorm()
        self.post_feedforward_layernorm = make_norm(config)

    def forward(
        self, x: Tensor, normed: Tensor, rotary: Tensor, attend: Attend, layer: int
    ) -> tuple[Tensor, Tensor]:
        attended = self.post_attention_layernorm(self.self_attn(normed, rotary, attend, layer))
        normed, x = self.pre_feedforward_layernorm.add(x, attended)
        return x, self.post_feedforward_layernorm(self.mlp(normed))


@lru_cache
def rounded(factor: float, dtype: torch.dtype) -> float:
    """``factor`` as near as ``dtype`` has it."""
    return float(torch.tensor(factor, dtype=dtype, device="cpu"))


def embedding(rows: int, width: int) -> nn.Embedding:
    """A table without values: drawing some on the meta device would load torch's compiler."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def widen(model: nn.Module, config: ModelConfig) -> None:
    """Keep in float32 what the published models do: norm weights where the file has them less 1, as
    half precision would round the sum; routers whose scores are of that type; and decays."""
    for module in model.modules():
        if config.unit_offset and isinstance(module, RMSNorm):
            module.float()
        elif isinstance(module, Experts | GatedDelta):
            module.widen()


class Decoder(nn.Module):
    """Embedding, layers, final norm and head of a Llama-family model.

    ``local_rope`` exists where some layers rotate otherwise, ``embed_positions`` where positions
    are learned.

    Attributes:
        collectives: Of the ranks that hold its parts (:mod:`overlap_spec.models.parallel`); None:
            it is whole.
    """

    rope: Tensor
    local_rope: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.collectives: Any = None
        rows = config.shard.padded_part(config.vocab_size)
        self.embed_tokens = embedding(rows, config.hidden_size)
        if config.learned_positions:
            # Not a module: embeddings may be rounded to 8 bits.
            table = torch.empty(config.learned_positions, config.hidden_size)
            self.embed_positions = nn.Parameter(table)
        kind = SandwichLayer if config.sandwich_norms else Layer
        if config.parallel_norms:
            kind = ParallelLayer
        self.layers = nn.ModuleList(kind(config, i) for i in range(config.num_layers))
        self.norm = make_norm(config)
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.tie()
        self.make_ropes(self.norm.weight.device)

    def make_ropes(self, device: torch.device) -> None:
        """The tables of rotations, on ``device``; without values on the meta device."""
        config = self.config
        tables = {"rope": config.rope, "local_rope": config.local_rope}
        for name, rope in tables.items():
            if rope is not None:
                table = rope_table(rope, config.head_dim, config.max_position)
                self.register_buffer(name, table.to(device), persistent=False)

    def keep_positions(self, count: int) -> None:
        """Let go of the rotations of position ``count`` and later ones."""
        for name in ("rope", "local_rope"):
            if hasattr(self, name):
                self.register_buffer(name, getattr(self, name)[:count].clone(), persistent=False)

    def tie(self) -> None:
        """Let the head share the embedding where the config says so (moves undo it)."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states of a flat run of tokens, which may belong to many sequences.

        Args:
            tokens, positions: int64 ``(T,)``; positions below ``config.max_position``.
            attend: Attention over the cache, called once a layer.
            feature_layers: Layers whose input is kept; ``num_layers`` means the last output,
                :data:`NORMED_OUTPUT` what the final norm makes of it.

        Returns:
            ``(T, hidden)`` after the final norm, and the kept inputs side by side
            ``(T, len(feature_layers) * hidden)``, or None if none were asked for.
        """
        x = self.embed_tokens(tokens)
        if self.config.embed_scale != 1.0:
            x = x * rounded(self.config.embed_scale, x.dtype)
        if self.config.learned_positions:
            x = x + self.embed_positions[positions]
        rotary = self.rope[positions].to(x.dtype)
        local = rotary
        if self.config.local_rope is not None:
            local = self.local_rope[positions].to(x.dtype)
        norms: list[Any] = [*(layer.input_layernorm for layer in self.layers), self.norm]
        normed, kept = norms[0](x), {0: x}
        for index, layer in enumerate(self.layers):
            turned = local if self.config.turns_locally(index) else rotary
            x, delta = layer(x, normed, turned, attend, index)
            normed, x = norms[index + 1].add(x, delta)
            if index + 1 in feature_layers:
                kept[index + 1] = x
        kept[NORMED_OUTPUT] = normed
        features = torch.cat([kept[i] for i in feature_layers], -1) if feature_layers else None
        return normed, features

    def logits(self, hidden: Tensor) -> Tensor:
        """``(T, hidden)`` → ``(T, vocab_size)``."""
        logits: Tensor = self.lm_head(hidden)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
