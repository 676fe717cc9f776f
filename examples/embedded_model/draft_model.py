"""Trainer of a small draft model: cut out of its target, then taught the target's probabilities."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.embedded_model.target import (
    Documents,
    TargetRecipe,
    TargetTrainer,
    logits_at,
    scored,
)
from overlap_spec.kernels import silu_and_mul
from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import MLP, Decoder
from overlap_spec.training.batches import Batch
from overlap_spec.training.budget import Budget

LAYERS = 3
CHANNELS = 96


# It begins with weights that work.
RECIPE = TargetRecipe(muon_lr=0.01, adam_lr=0.002, warm_up_share=0.0, tokens_per_step=3072)


def draft_model_config(target: ModelConfig) -> ModelConfig:
    """Shape of the draft model of an embedded target: as wide, but flatter and with small MLPs.

    At the embedded target's width of 256 that is 1.3M parameters.
    """
    return replace(
        target,
        num_layers=min(LAYERS, target.num_layers),
        intermediate_size=min(CHANNELS, target.intermediate_size),
    )


@torch.no_grad()
def cut_out(target: Decoder, batch: Batch) -> Decoder:
    """A draft model made of parts of its target: the layers that do best on ``batch`` when the
    others are left out, and the channels of their MLPs that are used most there.

    Copying a span takes attention in two layers that found each other, which costs a small model
    millions of tokens to learn, and its target has it already.
    """
    config = draft_model_config(target.config)
    batch = batch.to(target.embed_tokens.weight.device)
    chosen = min(
        # Only the first layer has learnt to read embeddings.
        ((0, *rest) for rest in combinations(range(1, target.config.num_layers), LAYERS - 1)),
        key=lambda layers: loss_of(with_layers(target, layers), batch),
    )
    source, model = with_layers(target, chosen), Decoder(config)
    used = mlp_use(source, batch)
    cut = source.state_dict()
    for index, use in enumerate(used):
        keep = use.topk(config.intermediate_size).indices.sort().values
        name = f"layers.{index}.mlp"
        gate, up = cut[f"{name}.gate_up_proj.weight"].chunk(2)
        cut[f"{name}.gate_up_proj.weight"] = torch.cat([gate[keep], up[keep]])
        cut[f"{name}.down_proj.weight"] = cut[f"{name}.down_proj.weight"][:, keep]
    model.load_state_dict(cut)
    return model.to(batch.tokens.device)


def with_layers(target: Decoder, layers: tuple[int, ...]) -> Decoder:
    """The target with these of its layers alone; the weights are shared."""
    model = Decoder(replace(target.config, num_layers=len(layers)))
    model.embed_tokens, model.lm_head, model.norm = target.embed_tokens, target.lm_head, target.norm
    model.layers = torch.nn.ModuleList(target.layers[layer] for layer in layers)
    model.make_ropes(target.rope.device)
    return model


@torch.no_grad()
def loss_of(model: Decoder, batch: Batch) -> float:
    """Weighted mean cross-entropy of the next tokens of ``batch``."""
    slots, targets, weights = scored(
        batch, 0.5, torch.Generator(batch.tokens.device).manual_seed(0)
    )
    each = F.cross_entropy(logits_at(model, batch.tokens, slots), targets, reduction="none")
    return float((each * weights).sum() / weights.sum())


def mlp_use(model: Decoder, batch: Batch) -> list[Tensor]:
    """How much each channel of each layer's MLP adds to the stream on ``batch``: its mean size
    times the norm of its column, ``(intermediate,)`` a layer."""
    found: list[Tensor] = []

    def observe(mlp: MLP, inputs: tuple[Tensor]) -> None:
        size = silu_and_mul(mlp.gate_up_proj(inputs[0])).abs().mean(0)
        found.append(size * mlp.down_proj.weight.norm(dim=0))

    mlps = [layer.get_submodule("mlp") for layer in model.layers]
    hooks = [mlp.register_forward_pre_hook(observe) for mlp in mlps]
    loss_of(model, batch)
    for hook in hooks:
        hook.remove()
    return found


class DraftModelTrainer(TargetTrainer):
    """Teaches a Decoder the probabilities of a larger one, resumably.

    Args:
        target: The frozen target; its vocabulary is the draft model's.
        draft: The draft model to begin with, such as :func:`cut_out` makes.
        documents, recipe, budget: As for :class:`TargetTrainer`.
    """

    def __init__(
        self,
        target: Decoder,
        draft: Decoder,
        documents: Documents,
        recipe: TargetRecipe,
        budget: Budget,
    ) -> None:
        super().__init__(draft, documents, recipe, budget)
        self.target = target.eval().requires_grad_(False)

    @torch.no_grad()
    def wanted(self, tokens: Tensor, slots: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        """The target's probabilities ``(K, V)``."""
        return logits_at(self.target, tokens, slots).softmax(-1)
