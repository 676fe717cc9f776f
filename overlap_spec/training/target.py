"""Trainer of the embedded target: a small Llama on generated documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.training.attention import CausalRows
from overlap_spec.training.batches import Batch, BatchStream
from overlap_spec.training.budget import Budget
from overlap_spec.training.optim import schedule
from overlap_spec.training.trainer import Trainer

# Rows wider than this are too rare to be worth a compiler's minute.
COMPILED_WIDTH = 400


@dataclass(frozen=True)
class TargetRecipe:
    """Settings of a target's training; see also :class:`Rates`."""

    muon_lr: float = 0.02
    adam_lr: float = 0.004
    clip: float = 1.0
    warm_up_share: float = 0.08
    decay_tokens: int | None = None
    tokens_per_step: int = 12288
    scored_share: float = 0.5
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


@torch.no_grad()
def deepened(model: Decoder, layers: int) -> Decoder:
    """The same function in ``layers`` layers: new ones, spread evenly, begin as copies of the
    layer before them whose projections back into the residual stream are zero.

    Raises:
        ValueError: Fewer layers than ``model`` has, or more than twice as many.
    """
    known = model.config.num_layers
    if not known <= layers <= 2 * known:
        raise ValueError(f"layers is {layers}; a model of {known} can grow to {known}..{2 * known}")
    grown = Decoder(replace(model.config, num_layers=layers))
    state = {name: w for name, w in model.state_dict().items() if not name.startswith("layers.")}
    for index in range(layers):
        source = index * known // layers
        added = index > 0 and source == (index - 1) * known // layers
        for name, weight in model.layers[source].state_dict().items():
            into_residual = name.startswith(("self_attn.o_proj", "mlp.down_proj"))
            kept = torch.zeros_like(weight) if added and into_residual else weight
            state[f"layers.{index}.{name}"] = kept
    grown.load_state_dict(state)
    return grown


class TargetTrainer(Trainer[Decoder]):
    """Trains a Decoder from a BatchStream, resumably.

    A step adds up the gradients of several small batches, each of its own width: small ones stay
    in the processor's cache, and one step sees short and long rows.

    Args:
        config: Shape of the model.
        stream: Source of batches.
        recipe: Settings.
        budget: When to stop.
        init: Weights to begin with instead of random ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        stream: BatchStream,
        recipe: TargetRecipe,
        budget: Budget,
        init: Decoder | None = None,
    ) -> None:
        model = Decoder(config)
        initialise(model, recipe.seed)
        if init is not None:
            model.load_state_dict(init.state_dict())
        super().__init__(model, stream, recipe, budget)
        self.recipe, self.stream = recipe, stream
        self._losses: dict[tuple[int, int], Callable[..., Tensor]] = {}

    def next_batch(self, progress: float) -> Batch:
        return self.stream.next(warm_up=progress < self.recipe.warm_up_share)

    def backward(self, progress: float) -> float:
        """Gradients of a step's batches, as of one; returns the weighted mean loss."""
        batches: list[Batch] = []
        tokens = 0
        while tokens < self.recipe.tokens_per_step:
            batches.append(self.next_batch(progress))
            tokens += batches[-1].tokens.numel()
            self.budget.tokens_done += batches[-1].length
        # Seeded by the step, so that a resumed run draws the same.
        draw = torch.Generator().manual_seed(self.budget.done)
        chosen = [scored(batch, self.recipe.scored_share, draw) for batch in batches]
        weight = sum(float(weights.sum()) for _, _, weights in chosen)
        total = 0.0
        for batch, choice in zip(batches, chosen, strict=True):
            loss = self.sum_of_losses(batch, choice) / max(weight, 1e-6)
            loss.backward()
            total += loss.item()
        return total

    def factor(self, progress: float) -> float:
        """Warm-up, constant, and a linear decay over the last ``decay_tokens``, where set."""
        decay, limit = self.recipe.decay_tokens, self.budget.tokens
        if decay is None or limit is None:
            return super().factor(progress)
        return schedule(progress, self.budget.done, decay_from=max(0.0, 1 - decay / limit))

    def loss(self, batch: Batch) -> Tensor:
        """Weighted mean cross-entropy of the next tokens of ``batch``, a scalar."""
        draw = torch.Generator().manual_seed(self.budget.done)
        choice = scored(batch, self.recipe.scored_share, draw)
        return self.sum_of_losses(batch, choice) / choice[2].sum().clamp(min=1e-6)

    def sum_of_losses(self, batch: Batch, choice: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Weighted sum of the cross-entropy at the chosen slots, a scalar."""
        rows, width = batch.tokens.shape
        if (rows, width) not in self._losses:
            self._losses[rows, width] = self._make_loss(rows, width)
        with torch.autocast("cpu", torch.bfloat16):
            return self._losses[rows, width](batch.tokens.flatten(), *choice)

    def _make_loss(self, rows: int, width: int) -> Callable[..., Tensor]:
        attend = CausalRows(rows, width)
        positions = torch.arange(width).repeat(rows)

        def loss(tokens: Tensor, slots: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
            hidden, _ = self.model(tokens, positions, attend)
            logits = self.model.logits(hidden[slots]).float()
            each = F.cross_entropy(logits, targets, reduction="none")
            return (each * weights).sum()

        if not self.recipe.compile or width > COMPILED_WIDTH:
            return loss
        # One graph a shape: with dynamic shapes the CPU code is slower than eager.
        return torch.compile(loss, dynamic=False)

    def averaged(self) -> Decoder:
        """A copy of the model with the averaged weights."""
        copy = Decoder(self.model.config)
        self.average.copy_to(copy)
        return copy.eval().requires_grad_(False)


def scored(batch: Batch, share: float, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The slots whose next token counts in the loss: the heaviest ``share``, ties at random.

    The number is fixed by the shape, for the compiler's sake; the product with the vocabulary is
    not spent on padding and on most of the prompts.

    Returns:
        Slots int64 ``(K,)`` of the flattened batch, their next tokens and the weights of these.
    """
    targets = batch.tokens.roll(-1, 1).flatten()
    weights = batch.weights.roll(-1, 1).clone()
    weights[:, -1] = 0
    weights = weights.flatten()
    count = max(1, round(share * weights.numel()))
    order = weights + 0.01 * torch.rand(weights.shape, generator=draw) * (weights > 0)
    slots = order.topk(count).indices.sort().values
    return slots, targets[slots], weights[slots]
