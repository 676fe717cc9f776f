"""DFlash's draft model (arXiv 2602.06036) in its published layouts, z-lab's and that of
`speculators`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import field, layer_windows, llama_family, read_json
from overlap_spec.models.decoder import Attend, Decoder, Heads, Layer, RMSNorm
from overlap_spec.models.eagle3 import Eagle3Config, FusingHead
from overlap_spec.models.parallel_eagle import check_mask_token
from overlap_spec.models.weights import load_fusing

ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
# Fields that change what is computed and are not read: with these values, or none, nothing changes.
USUAL = {
    "attention_value_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "projector_type": "dflash",
    "sample_from_anchor": False,
    "shift_label": False,
    "use_swa": False,
}
# Tokens of a block where the config does not say it.
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class DFlashConfig(Eagle3Config):
    """Shape of a draft model.

    Attributes:
        mask_token: Id of the token that stands in every slot not known yet.
        block_tokens: Tokens of a block as it was learnt, the root among them.
        causal: One entry a layer: whether a token of a block sees none behind it.
    """

    mask_token: int = 0
    block_tokens: int = BLOCK_TOKENS
    causal: tuple[bool, ...] = ()


def read_dflash_config(path: Path) -> DFlashConfig:
    """DFlashConfig of the draft model in folder ``path``; CheckpointError where it is not one, or
    one that is not supported."""
    hf = read_json(path / "config.json")
    names = field(hf, "architectures")
    if names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: {names[0]!r} is no DFlash draft model; expected {' or '.join(ARCHITECTURES)}"
        )
    ours = {**hf, **(hf.get("dflash_config") or {})}
    for name, usual in USUAL.items():
        if ours.get(name) not in (None, usual):
            raise CheckpointError(f"{path}: {name} {ours[name]!r} in config.json is not supported")
    if (shape := hf.get("transformer_layer_config")) is None:
        # An id names the state after that layer, the input of the next.
        shape, inputs = hf, [int(i) + 1 for i in field(ours, "target_layer_ids")]
    else:
        shape = {**shape, "architectures": names}
        inputs = [int(i) for i in field(hf, "aux_hidden_state_layer_ids")]
    windows = layer_windows(shape)
    layer = llama_family(shape, tie_embeddings=False, sliding_windows=windows)
    # By default layers are, that have a window.
    causal = ours.get("causal", ours.get("is_causal"))
    if ours.get("sliding_window_non_causal"):
        causal = False
    mask_token = int(field(ours, "mask_token_id"))
    check_mask_token(path, mask_token, layer.vocab_size)
    return DFlashConfig(
        layer=layer,
        draft_vocab_size=int(hf.get("draft_vocab_size") or layer.vocab_size),
        target_hidden_size=int(hf.get("target_hidden_size") or layer.hidden_size),
        feature_layers=tuple(inputs),
        mask_token=mask_token,
        block_tokens=int(ours.get("block_size") or BLOCK_TOKENS),
        causal=tuple(window is not None if causal is None else bool(causal) for window in windows),
    )


class DFlashHead(FusingHead):
    """Plain decoder layers over blocks of tokens, of which the first one alone is known.

    All layers see the text before a block as keys and values that they make of the target's fused
    features: nothing else of it is read.
    """

    config: DFlashConfig

    def __init__(
        self, config: DFlashConfig, own_embedding: bool = False, own_head: bool = True
    ) -> None:
        super().__init__(config, Layer(config.layer), own_embedding, own_head)
        self.hidden_norm = RMSNorm(config.layer.hidden_size, config.layer.rms_norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        fused: Tensor = self.hidden_norm(super().fuse(features))
        return fused

    def context(
        self, features: Tensor, positions: Tensor, store: Callable[[int, Heads], None]
    ) -> None:
        """Make of each layer what blocks see of the text.

        Args:
            features: ``(T, features * target_hidden)`` of the target.
            positions: int64 ``(T,)``, theirs.
            store: Called with each layer's number, and keys and values.
        """
        x = self.fuse(features)
        rotary = self.rope[positions].to(x.dtype)
        for index, layer in enumerate(self._every_layer):
            store(index, layer.self_attn.project(x, rotary))

    def forward(self, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The states ``(T, hidden)`` at tokens of blocks, before the final norm; from that at a
        mask comes its own token.

        Args:
            embeds: ``(T, hidden)``, the embedding of each one.
            positions: int64 ``(T,)``.
            attend: As for the decoder.
        """
        x, rotary = embeds, self.rope[positions].to(embeds.dtype)
        for index, layer in enumerate(self._every_layer):
            x, delta = layer(x, layer.input_layernorm(x), rotary, attend, index)
            x = x + delta
        return x

    @property
    def _every_layer(self) -> list[Any]:
        return [self.midlayer, *self.layers.values()]


def load_dflash(path: Path, target: Decoder, dtype: torch.dtype) -> DFlashHead:
    """The draft model in folder ``path``; errors as of
    :func:`overlap_spec.models.weights.load_eagle3`."""
    return load_fusing(path, target, dtype, DFlashHead, read_dflash_config(path))
