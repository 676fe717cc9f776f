"""The EAGLE-3 draft head (arXiv 2503.01840) in its published layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import ModelConfig, field, layer_windows, llama_family, read_json
from overlap_spec.models.decoder import MLP, Attend, Attention, Layer, RMSNorm, embedding
from overlap_spec.models.rope import rope_table

# Name → what is added to the ids of its feature layers to get the layers whose inputs are meant.
ARCHITECTURES = {
    "LlamaForCausalLMEagle3": 1,
    "Eagle3LlamaForCausalLM": 0,
    "Eagle3Speculator": 0,
    "Eagle3DraftModel": 0,
    "PEagleDraftModel": 0,
}
# Those of `speculators`, whose shape is in a field of its own.
SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel", "PEagleDraftModel")
# Features where the config names no layers.
FEATURES = 3


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of a head: its decoder layers, its vocabulary and the target it was made for.

    Attributes:
        layer: Shape of the layers. Biases and norms of queries and keys are what the weights say.
        feature_layers: Layers of the target whose inputs are the features (``num_layers`` = the
            last output); None means the published rule 2, n // 2, n - 3.
        norm_before_residual: The first layer's residual is the normed feature, else the feature
            itself.
        input_norm: A norm over all features at once.
        fc_norm: A norm over each feature.
        fc_bias: ``fc`` has a bias.
        norm_output: What a draft step hands to the next is normed (EAGLE-3.1).
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None
    norm_before_residual: bool = False
    input_norm: bool = False
    fc_norm: bool = False
    fc_bias: bool = False
    norm_output: bool = False

    @property
    def features(self) -> int:
        """How many features are fused."""
        return FEATURES if self.feature_layers is None else len(self.feature_layers)


def read_eagle3_config(path: Path) -> Eagle3Config:
    """Eagle3Config of the head in folder ``path``; CheckpointError where it is not one."""
    hf = read_json(path / "config.json")
    names = field(hf, "architectures")
    if names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: {names[0]!r} is no EAGLE-3 head; expected {' or '.join(ARCHITECTURES)}"
        )
    shape = hf
    if names[0] in SPECULATORS:
        shape = {**field(hf, "transformer_layer_config"), "architectures": names}
        # Trainers differ in what its absence means.
        field(hf, "norm_before_residual")
    if shape.get("model_type") == "llama4_text":
        # Its other size is that of an expert.
        shape = {**shape, "intermediate_size": field(shape, "intermediate_size_mlp")}
    layer = llama_family(shape, tie_embeddings=False, sliding_windows=layer_windows(shape))
    # Some converters keep what is EAGLE's apart.
    ours = {**hf, **(hf.get("eagle_config") or {})}
    explicit = ours.get("eagle_aux_hidden_state_layer_ids")
    shift = ARCHITECTURES[names[0]]
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=int(hf.get("draft_vocab_size") or layer.vocab_size),
        target_hidden_size=int(hf.get("target_hidden_size") or layer.hidden_size),
        feature_layers=tuple(int(i) + shift for i in explicit) if explicit else None,
        norm_before_residual=bool(hf.get("norm_before_residual")),
        input_norm=bool(ours.get("norm_before_fc")),
        fc_norm=bool(ours.get("fc_norm") or ours.get("use_aux_norm")),
        norm_output=bool(ours.get("norm_output")),
    )


def feature_layers(config: Eagle3Config, target: ModelConfig) -> tuple[int, ...]:
    """The layers of ``target`` whose inputs feed the head.

    Raises:
        CheckpointError: layers that repeat or that the target does not have.
    """
    n = target.num_layers
    layers = config.feature_layers or (2, n // 2, n - 3)
    if len(set(layers)) != len(layers) or not all(0 <= i <= n for i in layers):
        raise CheckpointError(
            f"feature layers {list(layers)} of the draft head must be distinct inputs of the "
            f"target's layers 0..{n}; declare eagle_aux_hidden_state_layer_ids in its config (of "
            "DFlash: target_layer_ids)"
        )
    return layers


class Midlayer(nn.Module):
    """The head's first layer: attention reads [norm(embedding), norm(feature)]."""

    def __init__(self, config: ModelConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(self, embeds: Tensor, feature: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        hidden = self.hidden_norm(feature)
        both = torch.cat([self.input_layernorm(embeds), hidden], -1)
        attended = self.self_attn(both, rotary, attend, 0)
        residual = hidden if self.norm_before_residual else feature
        normed, x = self.post_attention_layernorm.add(residual, attended)
        out: Tensor = x + self.mlp(normed)
        return out


class FusingHead(nn.Module):
    """Fuses the target's features, and has its own layers and vocabulary.

    ``d2t`` int64 ``(draft_vocab,)``: target id = draft id + d2t[draft id]. ``t2d`` bool
    ``(vocab,)``: which target ids the head can draft. ``embed_tokens`` and ``lm_head`` exist where
    the checkpoint stores them; the target's serve otherwise. Of a shard, layers and ``lm_head`` are
    one rank's part. ``midlayer`` is the first layer.
    """

    rope: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: Eagle3Config, midlayer: nn.Module, own_embedding: bool, own_head: bool
    ) -> None:
        super().__init__()
        self.config = config
        layer, features = config.layer, config.features
        size, eps, feature = layer.hidden_size, layer.rms_norm_eps, config.target_hidden_size
        if own_embedding:
            self.embed_tokens = embedding(layer.vocab_size, size)
        if config.input_norm:
            self.input_norm = RMSNorm(features * feature, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(feature, eps) for _ in range(features))
        self.fc = nn.Linear(features * feature, size, bias=config.fc_bias)
        self.midlayer = midlayer
        # By number, as they are published.
        self.layers = nn.ModuleDict({str(i): Layer(layer) for i in range(1, layer.num_layers)})
        self.norm = RMSNorm(size, eps)
        if own_head:
            rows = layer.shard.padded_part(config.draft_vocab_size)
            self.lm_head = nn.Linear(size, rows, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(layer.vocab_size, dtype=torch.bool))
        table = rope_table(layer.rope, layer.head_dim, layer.max_position)
        self.register_buffer("rope", table, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """``(T, features * target_hidden)`` of the target → ``(T, hidden)``."""
        if self.config.input_norm:
            features = self.input_norm(features)
        if self.config.fc_norm:
            each = features.chunk(len(self.fc_norm), -1)
            normed = [norm(x) for norm, x in zip(self.fc_norm, each, strict=True)]
            features = torch.cat(normed, -1)
        fused: Tensor = self.fc(features)
        return fused

    def normed(self, hidden: Tensor) -> Tensor:
        """What the vocabulary's head reads of the last layer's output ``(T, hidden)``."""
        normed: Tensor = hidden if self.config.norm_output else self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """``(T, hidden)`` → ``(T, draft_vocab_size)``, by the head's own ``lm_head``."""
        logits: Tensor = self.lm_head(self.normed(hidden))
        return logits


class Eagle3Head(FusingHead):
    """A head whose first layer reads what the later ones do not, the fused features."""

    def __init__(
        self, config: Eagle3Config, own_embedding: bool = False, own_head: bool = True
    ) -> None:
        midlayer = Midlayer(config.layer, config.norm_before_residual)
        super().__init__(config, midlayer, own_embedding, own_head)

    def forward(self, embeds: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of the head.

        Args:
            embeds: ``(T, hidden)``, the embedding of each row's token.
            feature: ``(T, hidden)``: of the position before it; fused target features, or in
                later draft steps this method's own output.
            positions: int64 ``(T,)``, each row's token position.
            attend: As for the decoder.

        Returns:
            ``(T, hidden)``, before the final norm unless the config says ``norm_output``: input of
            :meth:`logits` and the next feature.
        """
        rotary = self.rope[positions].to(embeds.dtype)
        x: Tensor = self.midlayer(embeds, feature, rotary, attend)
        layers: Any = self.layers.values()
        for index, layer in enumerate(layers, 1):
            x, delta = layer(x, layer.input_layernorm(x), rotary, attend, index)
            x = x + delta
        return self.norm(x) if self.config.norm_output else x
