"""Trainer of the embedded target: a small Llama on generated documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.training.attention import CausalRows
from overlap_spec.training.batches import Batch, BatchStream
from overlap_spec.training.budget import Budget
from overlap_spec.training.trainer import Trainer


@dataclass(frozen=True)
class TargetRecipe:
    """Settings of a target's training; see also :class:`Rates`."""

    muon_lr: float = 0.02
    adam_lr: float = 0.004
    clip: float = 1.0
    warm_up_share: float = 0.08
    seed: int = 1
    compile: bool = True
    save_every: int = 50


def embedded_config(vocab_size: int) -> ModelConfig:
    """Shape of the embedded target."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position=4096,
        tie_embeddings=True,
    )


def initialise(module: torch.nn.Module, seed: int) -> None:
    """Normal weights: 0.02 for embeddings, 1/sqrt(fan in) for matrices, a third of that for
    projections back into the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        spread = float(parameter.shape[1] ** -0.5)
        if "embed_tokens" in name or "lm_head" in name:
            spread = 0.02
        elif "o_proj" in name or "down_proj" in name:
            spread /= 3
        with torch.no_grad():
            parameter.normal_(0, spread, generator=generator)


class TargetTrainer(Trainer[Decoder]):
    """Trains a Decoder from a BatchStream, resumably.

    Args:
        config: Shape of the model.
        stream: Source of batches.
        recipe: Settings.
        budget: When to stop.
    """

    def __init__(
        self, config: ModelConfig, stream: BatchStream, recipe: TargetRecipe, budget: Budget
    ) -> None:
        model = Decoder(config)
        initialise(model, recipe.seed)
        super().__init__(model, stream, recipe, budget)
        self.recipe, self.stream = recipe, stream
        self._losses: dict[int, Callable[..., Tensor]] = {}

    def next_batch(self, progress: float) -> Batch:
        return self.stream.next(warm_up=progress < self.recipe.warm_up_share)

    def loss(self, batch: Batch) -> Tensor:
        """Weighted mean cross-entropy of the next tokens of ``batch``, a scalar."""
        rows, width = batch.tokens.shape
        if width not in self._losses:
            self._losses[width] = self._make_loss(rows, width)
        targets = batch.tokens.roll(-1, 1).flatten()
        weights = batch.weights.roll(-1, 1)
        weights[:, -1] = 0
        with torch.autocast("cpu", torch.bfloat16):
            return self._losses[width](batch.tokens.flatten(), targets, weights.flatten())

    def _make_loss(self, rows: int, width: int) -> Callable[..., Tensor]:
        attend = CausalRows(rows, width)
        positions = torch.arange(width).repeat(rows)

        def loss(tokens: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
            hidden, _ = self.model(tokens, positions, attend)
            logits = self.model.logits(hidden).float()
            each = F.cross_entropy(logits, targets, reduction="none")
            return (each * weights).sum() / weights.sum().clamp(min=1e-6)

        if not self.recipe.compile:
            return loss
        # One graph a shape: with dynamic shapes the CPU code is slower than eager.
        return torch.compile(loss, dynamic=False)

    def averaged(self) -> Decoder:
        """A copy of the model with the averaged weights."""
        copy = Decoder(self.model.config)
        self.average.copy_to(copy)
        return copy.eval().requires_grad_(False)
