"""Trainer of the embedded target: a small Llama on generated documents."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.training.attention import CausalRows
from overlap_spec.training.batches import Batch, BatchStream
from overlap_spec.training.budget import Budget
from overlap_spec.training.optim import Average, make_optimizers, schedule

# Report of one step: progress 0 to 1, step, loss.
Report = Callable[[float, int, float], None]


@dataclass(frozen=True)
class TargetRecipe:
    """Settings of a target's training. Rates are those of the schedule's plateau."""

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


class TargetTrainer:
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
        self.recipe, self.budget, self.stream = recipe, budget, stream
        self.model = Decoder(config)
        initialise(self.model, recipe.seed)
        self.optimizers = make_optimizers(self.model, recipe.muon_lr, recipe.adam_lr)
        self.rates = [group["lr"] for o in self.optimizers for group in o.param_groups]
        self.average = Average(self.model)
        self._losses: dict[int, Callable[..., Tensor]] = {}

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

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        progress = self.budget.progress()
        batch = self.stream.next(warm_up=progress < self.recipe.warm_up_share)
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        factor = schedule(progress, self.budget.done)
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update(self.model, self.budget.done)
        self.budget.done += 1
        return float(loss.detach())

    def run(self, checkpoint: Path | None = None, report: Report | None = None) -> Decoder:
        """Train until the budget is used; returns the model with averaged weights."""
        # Every bucket width has a graph of its own.
        torch._dynamo.config.recompile_limit = 64
        while self.budget.progress() < 1:
            loss = self.step()
            if report is not None:
                report(self.budget.progress(), self.budget.done, loss)
            if checkpoint is not None and self.budget.done % self.recipe.save_every == 0:
                save_atomically(self.state(), checkpoint)
        if checkpoint is not None:
            save_atomically(self.state(), checkpoint)
        return self.averaged()

    def averaged(self) -> Decoder:
        """A copy of the model with the averaged weights."""
        copy = Decoder(self.model.config)
        self.average.copy_to(copy)
        return copy.eval().requires_grad_(False)

    def state(self) -> dict[str, Any]:
        """Everything that :meth:`restore` needs to go on."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "average": self.average.values,
            "stream": self.stream.state(),
            "step": self.budget.done,
            "seconds": self.budget.seconds(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.average.values = state["average"]
        self.stream.restore(state["stream"])
        self.budget.done = state["step"]
        self.budget.restart_clock(state["seconds"])


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that an interruption leaves the old one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)
