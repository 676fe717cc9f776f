"""What every training shares: settings, first weights, and steps until the budget is used."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from overlap_spec.training.batches import Batch
from overlap_spec.training.budget import Budget
from overlap_spec.training.optim import Average, make_optimizers, schedule

# Rows wider than this are too rare to be worth a compiler's minute.
COMPILED_WIDTH = 400

# What a checkpoint takes is many steps of a small model on a GPU.
SAVE_SECONDS = 20
# Losses of steps on a GPU are read so often: reading waits for all that it was given to do.
READ_SECONDS = 0.25

# Report of one step: progress 0 to 1, step, loss.
Report = Callable[[float, int, float], None]
Model = TypeVar("Model", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")


class Batches(Protocol):
    """An endless, resumable source of token rows."""

    def next(self) -> Batch:
        """The next batch; its weights say which tokens matter as targets."""

    def state(self) -> bytes:
        """What :meth:`restore` needs to go on exactly here."""

    def restore(self, state: bytes) -> None:
        """Go on from :meth:`state`."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a training.

    Attributes:
        muon_lr, adam_lr: Rates on the schedule's plateau.
        clip: Longest gradient.
        decay_from: From this share of the budget on the rates fall.
        scored_share: Share of a batch's slots that the loss is taken at, the heaviest ones: the
            product with the vocabulary is not spent on padding and on most of the prompts.
        compile: Compile the passes over rows of at most COMPILED_WIDTH tokens.
        save_every: Steps between checkpoints, which are SAVE_SECONDS apart at least.
    """

    muon_lr: float = 0.02
    adam_lr: float = 0.002
    clip: float = 1.0
    decay_from: float = 0.45
    scored_share: float = 0.5
    seed: int = 1
    compile: bool = True
    save_every: int = 50

    def ready(self, function: Callable[P, R], width: int) -> Callable[P, R]:
        """``function`` of rows of ``width`` tokens, compiled where that pays.

        One graph a shape: with dynamic shapes the CPU code is slower than eager.
        """
        if not self.compile or width > COMPILED_WIDTH:
            return function
        made: Callable[P, R] = torch.compile(function, dynamic=False)
        return made


def initialise(module: nn.Module, seed: int) -> None:
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


class Trainer(ABC, Generic[Model]):
    """Optimizers, schedule, averaged weights and checkpoints of one model's training.

    Args:
        model: What is trained, from the weights that it has.
        batches: Source of token rows.
        recipe: Settings.
        budget: When to stop.
    """

    def __init__(self, model: Model, batches: Batches, recipe: Recipe, budget: Budget) -> None:
        self.model, self.batches, self.budget, self._recipe = model, batches, budget, recipe
        self.optimizers = make_optimizers(model, recipe.muon_lr, recipe.adam_lr)
        self.rates = [group["lr"] for o in self.optimizers for group in o.param_groups]
        self.average = Average(model)

    @abstractmethod
    def backward(self) -> Tensor:
        """Gradients of one step, whose tokens are counted; returns its loss, a scalar."""

    def step(self) -> Tensor:
        """One optimizer step; returns the loss, which nothing has waited for yet."""
        progress = self.budget.progress()
        loss = self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.clip)
        factor = schedule(progress, self.budget.done, decay_from=self._recipe.decay_from)
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update(self.model, self.budget.done)
        self.budget.done += 1
        return loss

    def run(self, checkpoint: Path | None = None, report: Report | None = None) -> Model:
        """Train until the budget is used; returns the model with averaged weights."""
        # Every bucket width has a graph of its own.
        torch._dynamo.config.recompile_limit = 64
        saved = read = time.monotonic()
        losses: list[Tensor] = []
        while self.budget.progress() < 1:
            losses.append(self.step())
            done = self.budget.done
            late = time.monotonic() - read >= READ_SECONDS or self.budget.progress() >= 1
            if late or not losses[0].is_cuda:
                values, losses, read = torch.stack(losses).tolist(), [], time.monotonic()
                for step, loss in enumerate(values, done + 1 - len(values)):
                    if report is not None:
                        report(self.budget.progress(), step, loss)
            if checkpoint is None or done % self._recipe.save_every:
                continue
            if time.monotonic() - saved >= SAVE_SECONDS:
                save_atomically(self.state(), checkpoint)
                saved = time.monotonic()
        if checkpoint is not None:
            save_atomically(self.state(), checkpoint)
        return self.averaged()

    def averaged(self) -> Model:
        """A copy of the model with the averaged weights."""
        copy = deepcopy(self.model)
        self.average.copy_to(copy)
        return copy.eval().requires_grad_(False)

    def state(self) -> dict[str, Any]:
        """Everything that :meth:`restore` needs to go on."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "average": self.average.values,
            "batches": self.batches.state(),
            "step": self.budget.done,
            "seconds": self.budget.seconds(),
            "tokens": self.budget.tokens_done,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, value in state["average"].items():
            self.average.values[name].copy_(value)
        self.batches.restore(state["batches"])
        self.budget.done = state["step"]
        self.budget.tokens_done = state["tokens"]
        self.budget.restart_clock(state["seconds"])


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that an interruption leaves the old one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)
