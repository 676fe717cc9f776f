"""Trainer of the embedded target: a small Llama on generated documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from examples.embedded_model.data import BOS, END, PAD
from examples.embedded_model.tokenizer import save_tokenizer, special_id
from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.training.attention import CausalRows
from overlap_spec.training.batches import Batch
from overlap_spec.training.budget import Budget
from overlap_spec.training.export import write_checkpoint, write_json
from overlap_spec.training.optim import mixed
from overlap_spec.training.trainer import Batches, Recipe, Trainer, initialise


class Documents(Batches, Protocol):
    """A source of rows that has a curriculum to begin with."""

    def next(self, warm_up: bool = False) -> Batch:
        """The next batch; ``warm_up`` draws it from the curriculum."""


@dataclass(frozen=True)
class TargetRecipe(Recipe):
    """Settings of a target's training.

    Attributes:
        warm_up_share: Share of the budget that the copying curriculum gets.
        tokens_per_step: Least size of a step, padding included.
    """

    adam_lr: float = 0.004
    warm_up_share: float = 0.08
    tokens_per_step: int = 12288


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


def new_target(config: ModelConfig, seed: int) -> Decoder:
    """An untrained target."""
    model = Decoder(config)
    initialise(model, seed)
    return model


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
    """Trains a Decoder on documents, resumably.

    A step adds up the gradients of several small batches, each of its own width: small ones stay
    in the processor's cache, and one step sees short and long rows.

    Args:
        model, recipe, budget: As for :class:`Trainer`.
        documents: Source of batches.
    """

    def __init__(
        self, model: Decoder, documents: Documents, recipe: TargetRecipe, budget: Budget
    ) -> None:
        super().__init__(model, documents, recipe, budget)
        self.recipe, self.documents = recipe, documents
        self.device = model.embed_tokens.weight.device
        self._losses: dict[int, Callable[..., Tensor]] = {}

    def backward(self) -> Tensor:
        """Gradients of a step's batches, as of one; returns the weighted mean loss."""
        warm_up = self.budget.progress() < self.recipe.warm_up_share
        batches: list[Batch] = []
        tokens = 0
        while tokens < self.recipe.tokens_per_step:
            batches.append(self.documents.next(warm_up).to(self.device))
            tokens += batches[-1].tokens.numel()
            self.budget.tokens_done += batches[-1].length
        # Seeded by the step, so that a resumed run draws the same.
        draw = torch.Generator(self.device).manual_seed(self.budget.done)
        chosen = [scored(batch, self.recipe.scored_share, draw) for batch in batches]
        weight = torch.stack([weights.sum().double() for _, _, weights in chosen]).sum()
        weight = weight.clamp(min=1e-6).float()
        losses: list[Tensor] = []
        for batch, choice in zip(batches, chosen, strict=True):
            width = batch.tokens.shape[1]
            if width not in self._losses:
                self._losses[width] = self.recipe.ready(self.sum_of_losses, width)
            with mixed(self.device):
                loss = self._losses[width](batch.tokens, *choice) / weight
            loss.backward()
            losses.append(loss.detach().double())
        return torch.stack(losses).sum()

    def sum_of_losses(
        self, tokens: Tensor, slots: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        """Weighted sum of the cross-entropy at the chosen slots, a scalar; see :func:`scored`."""
        wanted = self.wanted(tokens, slots, targets)
        each = F.cross_entropy(logits_at(self.model, tokens, slots), wanted, reduction="none")
        return (each * weights).sum()

    def wanted(self, tokens: Tensor, slots: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        """What is to be learnt at the slots: tokens ``(K,)``, or probabilities ``(K, V)``."""
        return targets


def logits_at(model: Decoder, tokens: Tensor, slots: Tensor) -> Tensor:
    """The logits of rows ``(B, W)`` at ``slots (K,)`` of the flattened rows: float32 ``(K, V)``."""
    rows, width = tokens.shape
    positions = torch.arange(width, device=tokens.device).repeat(rows)
    hidden, _ = model(tokens.flatten(), positions, CausalRows(rows, width))
    return model.logits(hidden[slots]).float()


def scored(batch: Batch, share: float, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The slots whose next token counts in the loss: the heaviest ``share``, ties at random.

    The number is fixed by the shape, for the compiler's sake.

    Returns:
        Slots int64 ``(K,)`` of the flattened batch, their next tokens and the weights of these.
    """
    targets = batch.tokens.roll(-1, 1).flatten()
    weights = batch.weights.roll(-1, 1).clone()
    weights[:, -1] = 0
    weights = weights.flatten()
    count = max(1, round(share * weights.numel()))
    luck = torch.rand(weights.shape, generator=draw, device=weights.device)
    order = weights + 0.01 * luck * (weights > 0)
    slots = order.topk(count).indices.sort().values
    return slots, targets[slots], weights[slots]


def export_target(model: Decoder, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint of a target or a draft model: weights, configs, tokenizer and chat
    template."""
    ids = {name: special_id(tokenizer, name) for name in (BOS, END, PAD)}
    special = {"bos_token_id": ids[BOS], "eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    shape = model.config
    tied = {"tie_word_embeddings": shape.tie_embeddings}
    write_checkpoint(out, model, "LlamaForCausalLM", shape, **tied, **special)
    write_json(out / "generation_config.json", {"do_sample": False, **special})
    save_tokenizer(tokenizer, out, shape.max_position)
