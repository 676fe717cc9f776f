"""The loop that both trainers share: steps until the budget is used, resumably."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from overlap_spec.training.batches import Batch
from overlap_spec.training.budget import Budget
from overlap_spec.training.optim import Average, make_optimizers, schedule

# Report of one step: progress 0 to 1, step, loss.
Report = Callable[[float, int, float], None]
Model = TypeVar("Model", bound=nn.Module)


class Batches(Protocol):
    """An endless, resumable source of token rows."""

    def next(self) -> Batch:
        """The next batch; its weights say which tokens matter as targets."""

    def state(self) -> bytes:
        """What :meth:`restore` needs to go on exactly here."""

    def restore(self, state: bytes) -> None:
        """Go on from :meth:`state`."""


class Rates(Protocol):
    """What a recipe says of the optimizers; rates are those of the schedule's plateau."""

    @property
    def muon_lr(self) -> float: ...
    @property
    def adam_lr(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def save_every(self) -> int: ...


class Trainer(ABC, Generic[Model]):
    """Optimizers, schedule, averaged weights and checkpoints of one model's training.

    Args:
        model: What is trained.
        batches: Source of token rows.
        rates: Settings of the optimizers.
        budget: When to stop.
    """

    def __init__(self, model: Model, batches: Batches, rates: Rates, budget: Budget) -> None:
        self.model, self.batches, self.budget, self._settings = model, batches, budget, rates
        self.optimizers = make_optimizers(model, rates.muon_lr, rates.adam_lr)
        self.rates = [group["lr"] for o in self.optimizers for group in o.param_groups]
        self.average = Average(model)

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Weighted loss of a batch, a scalar."""

    @abstractmethod
    def averaged(self) -> Model:
        """A copy of the model with the averaged weights."""

    def next_batch(self, progress: float) -> Batch:  # noqa: ARG002
        """The batch of a step at ``progress`` of the budget."""
        return self.batches.next()

    def factor(self, progress: float) -> float:
        """Factor on the learning rates at ``progress`` of the budget."""
        return schedule(progress, self.budget.done)

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        progress = self.budget.progress()
        loss = self.backward(progress)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip)
        factor = self.factor(progress)
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update(self.model, self.budget.done)
        self.budget.done += 1
        return loss

    def backward(self, progress: float) -> float:
        """Gradients of one step; returns its loss."""
        batch = self.next_batch(progress)
        loss = self.loss(batch)
        loss.backward()
        self.budget.tokens_done += batch.length
        return float(loss.detach())

    def run(self, checkpoint: Path | None = None, report: Report | None = None) -> Model:
        """Train until the budget is used; returns the model with averaged weights."""
        # Every bucket width has a graph of its own.
        torch._dynamo.config.recompile_limit = 64
        while self.budget.progress() < 1:
            loss = self.step()
            if report is not None:
                report(self.budget.progress(), self.budget.done, loss)
            if checkpoint is not None and self.budget.done % self._settings.save_every == 0:
                save_atomically(self.state(), checkpoint)
        if checkpoint is not None:
            save_atomically(self.state(), checkpoint)
        return self.averaged()

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
        self.average.values = state["average"]
        self.batches.restore(state["batches"])
        self.budget.done = state["step"]
        self.budget.tokens_done = state.get("tokens", 0)
        self.budget.restart_clock(state["seconds"])


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that an interruption leaves the old one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)
