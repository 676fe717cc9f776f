"""Trainer of a small draft model: first on the documents, then on its target's probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.training.attention import CausalRows
from overlap_spec.training.batches import Batch, BatchStream
from overlap_spec.training.budget import Budget
from overlap_spec.training.target import COMPILED_WIDTH, TargetRecipe, TargetTrainer


@dataclass(frozen=True)
class DraftModelRecipe(TargetRecipe):
    """Settings of a draft model's training.

    Attributes:
        distil_from: Share of the budget after which the target's probabilities are learnt in place
            of the documents' tokens: they say more, and a pass of the target costs more than a
            step of the draft model.
    """

    warm_up_share: float = 0.2
    tokens_per_step: int = 6144
    distil_from: float = 0.7


def draft_model_config(target: ModelConfig) -> ModelConfig:
    """Shape of the embedded draft model: the target's vocabulary and context, 0.9M parameters."""
    return replace(
        target,
        hidden_size=128,
        intermediate_size=384,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        tie_embeddings=True,
    )


class DraftModelTrainer(TargetTrainer):
    """Trains a Decoder to draft for a larger one, resumably.

    Args:
        target: The frozen target; its vocabulary is the draft model's.
        config: Shape of the draft model.
        stream, recipe, budget, init: As for :class:`TargetTrainer`.
    """

    recipe: DraftModelRecipe

    def __init__(
        self,
        target: Decoder,
        config: ModelConfig,
        stream: BatchStream,
        recipe: DraftModelRecipe,
        budget: Budget,
        init: Decoder | None = None,
    ) -> None:
        super().__init__(config, stream, recipe, budget, init)
        self.target = target.eval().requires_grad_(False)
        self._distilled: dict[tuple[int, int], Callable[..., Tensor]] = {}

    def sum_of_losses(self, batch: Batch, choice: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Weighted sum of the cross-entropy at the chosen slots, a scalar: to the documents'
        tokens, later to the target's probabilities."""
        if self.budget.progress() < self.recipe.distil_from:
            return super().sum_of_losses(batch, choice)
        shape = (batch.tokens.shape[0], batch.tokens.shape[1])
        if shape not in self._distilled:
            self._distilled[shape] = self._make_distilled(*shape)
        slots, _, weights = choice
        with torch.autocast("cpu", torch.bfloat16):
            return self._distilled[shape](batch.tokens.flatten(), slots, weights)

    def _make_distilled(self, rows: int, width: int) -> Callable[..., Tensor]:
        attend = CausalRows(rows, width)
        positions = torch.arange(width).repeat(rows)

        def loss(tokens: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
            with torch.no_grad():
                known, _ = self.target(tokens, positions, attend)
                wanted = self.target.logits(known[slots]).float().softmax(-1)
            hidden, _ = self.model(tokens, positions, attend)
            drafted = self.model.logits(hidden[slots]).float().log_softmax(-1)
            return -((wanted * drafted).sum(-1) * weights).sum()

        if not self.recipe.compile or width > COMPILED_WIDTH:
            return loss
        return torch.compile(loss, dynamic=False)
