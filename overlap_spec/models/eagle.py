"""The draft head of EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858) in its published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import ModelConfig, field, llama_family, read_json
from overlap_spec.models.decoder import Attend, Layer, embedding
from overlap_spec.models.rope import rope_table

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")


def read_eagle_config(path: Path) -> ModelConfig:
    """Shape of the head in folder ``path``; CheckpointError where it is not one."""
    hf = read_json(path / "config.json")
    names = field(hf, "architectures")
    if names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: {names[0]!r} is no EAGLE head; expected {' or '.join(ARCHITECTURES)}"
        )
    return llama_family(hf, tie_embeddings=False)


class EagleHead(nn.Module):
    """Predicts the target's next normed output from the last one and the token after it.

    ``embed_tokens`` exists where the checkpoint stores one; the target's serves otherwise. The
    target's head turns what is predicted into logits.
    """

    rope: Tensor

    def __init__(self, config: ModelConfig, own_embedding: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        if own_embedding:
            self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        # What the first layer reads has been normed by the target.
        self.layers[0].input_layernorm = nn.Identity()
        table = rope_table(config.rope, config.head_dim, config.max_position)
        self.register_buffer("rope", table, persistent=False)

    def forward(self, embeds: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of the head.

        Args:
            embeds: ``(T, hidden)``, the embedding of each row's token.
            feature: ``(T, hidden)``: of the position before it; the target's normed output, or in
                later draft steps this method's own.
            positions: int64 ``(T,)``, each row's token position.
            attend: As for the decoder.

        Returns:
            ``(T, hidden)``: input of the target's head, and the next feature.
        """
        x: Tensor = self.fc(torch.cat([embeds, feature], -1))
        rotary = self.rope[positions].to(x.dtype)
        for index, layer in enumerate(self.layers):
            norm: Any = layer.input_layernorm
            x, delta = layer(x, norm(x), rotary, attend, index)
            x = x + delta
        return x
