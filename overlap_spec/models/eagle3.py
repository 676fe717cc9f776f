"""The EAGLE-3 draft head (arXiv 2503.01840) in its published layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import ModelConfig, field, llama_family, read_json
from overlap_spec.models.decoder import MLP, Attend, Attention, RMSNorm, embedding
from overlap_spec.models.rope import rope_table

# Name → what is added to the ids of its feature layers to get the layers whose inputs are meant.
ARCHITECTURES = {"LlamaForCausalLMEagle3": 1, "Eagle3LlamaForCausalLM": 0, "Eagle3Speculator": 0}
# Fields that change what a head computes in ways that are not built.
NOT_BUILT = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of a head: its decoder layer, its vocabulary and the target it was made for.

    ``feature_layers`` are layers of the target whose inputs are the features (``num_layers`` =
    the last output); None means the published rule 2, n // 2, n - 3. ``norm_before_residual``: the
    layer's residual is the normed feature, else the feature itself.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, int, int] | None
    norm_before_residual: bool = False


def read_eagle3_config(path: Path) -> Eagle3Config:
    """Eagle3Config of the head in folder ``path``; CheckpointError where it is not one."""
    hf = read_json(path / "config.json")
    names = field(hf, "architectures")
    if names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: {names[0]!r} is no EAGLE-3 head; expected {' or '.join(ARCHITECTURES)}"
        )
    for name in NOT_BUILT:
        if hf.get(name):
            raise CheckpointError(f"{path}: EAGLE-3 heads with {name!r} are not supported")
    shape = hf
    if names[0] == "Eagle3Speculator":
        shape = {**field(hf, "transformer_layer_config"), "architectures": names}
        # Trainers differ in what its absence means.
        field(hf, "norm_before_residual")
    layer = llama_family(shape, tie_embeddings=False)
    explicit = hf.get("eagle_aux_hidden_state_layer_ids") or (hf.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    shift = ARCHITECTURES[names[0]]
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=int(hf.get("draft_vocab_size") or layer.vocab_size),
        target_hidden_size=int(hf.get("target_hidden_size") or layer.hidden_size),
        feature_layers=tuple(int(i) + shift for i in explicit) if explicit else None,  # type: ignore[arg-type]
        norm_before_residual=bool(hf.get("norm_before_residual")),
    )


def feature_layers(config: Eagle3Config, target: ModelConfig) -> tuple[int, int, int]:
    """The three layers of ``target`` whose inputs feed the head.

    Raises:
        CheckpointError: layers that repeat or that the target does not have.
    """
    n = target.num_layers
    layers = config.feature_layers or (2, n // 2, n - 3)
    if len(layers) != 3 or len(set(layers)) != 3 or not all(0 <= i <= n for i in layers):
        raise CheckpointError(
            f"feature layers {list(layers)} of the draft head must be three distinct inputs of "
            f"the target's layers 0..{n}; declare eagle_aux_hidden_state_layer_ids in its config"
        )
    return layers


class Midlayer(nn.Module):
    """The head's one layer: attention reads [norm(embedding), norm(feature)]."""

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


class Eagle3Head(nn.Module):
    """Fuses three target features, runs one layer, and has its own vocabulary.

    ``d2t`` int64 ``(draft_vocab,)``: target id = draft id + d2t[draft id]. ``t2d`` bool
    ``(vocab,)``: which target ids the head can draft. ``embed_tokens`` exists where the checkpoint
    stores one; the target's serves otherwise.
    """

    rope: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        if own_embedding:
            self.embed_tokens = embedding(layer.vocab_size, layer.hidden_size)
        self.fc = nn.Linear(3 * config.target_hidden_size, layer.hidden_size, bias=False)
        self.midlayer = Midlayer(layer, config.norm_before_residual)
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(layer.vocab_size, dtype=torch.bool))
        table = rope_table(layer.rope, layer.head_dim, layer.max_position)
        self.register_buffer("rope", table, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """``(T, 3 * target_hidden)`` of the target → ``(T, hidden)``."""
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, embeds: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of the head.

        Args:
            embeds: ``(T, hidden)``, the embedding of each row's token.
            feature: ``(T, hidden)``: of the position before it; fused target features, or in
                later draft steps this method's own output.
            positions: int64 ``(T,)``, each row's token position.
            attend: As for the decoder, with layer 0.

        Returns:
            ``(T, hidden)`` before the final norm: input of :meth:`logits` and the next feature.
        """
        rotary = self.rope[positions].to(embeds.dtype)
        out: Tensor = self.midlayer(embeds, feature, rotary, attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """``(T, hidden)`` → ``(T, draft_vocab_size)``."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits
