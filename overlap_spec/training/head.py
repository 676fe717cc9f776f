"""Trainer of EAGLE-3 (arXiv 2503.01840) and EAGLE heads for any target that the decoder can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from overlap_spec.models.config import ModelConfig, RopeConfig
from overlap_spec.models.decoder import NORMED_OUTPUT, Decoder
from overlap_spec.models.eagle import EagleHead
from overlap_spec.models.eagle3 import Eagle3Config, Eagle3Head
from overlap_spec.training.attention import CausalRows, ChainRows, FirstRows
from overlap_spec.training.batches import Batch
from overlap_spec.training.budget import Budget
from overlap_spec.training.features import FeatureCache
from overlap_spec.training.optim import mixed
from overlap_spec.training.trainer import Batches, Recipe, Trainer, initialise

Head = EagleHead | Eagle3Head
Kind = TypeVar("Kind", bound=Head)


@dataclass(frozen=True)
class HeadRecipe(Recipe):
    """Settings of a head's training.

    Attributes:
        steps: Steps of training-time test, or depths that are drafted at once.
        step_decay: Weight of step j is ``step_decay ** j``.
        kept_share: Of a head that drafts all depths at once, the share of a depth's masks behind
            which the next depth is learnt too.
        draft_vocab: Target ids that the head can draft, ascending; None for all of them. An
            EAGLE head drafts with the target's vocabulary.
    """

    steps: int = 5
    step_decay: float = 0.8
    kept_share: float = 0.8
    draft_vocab: tuple[int, ...] | None = None


def spread_layers(num_layers: int) -> tuple[int, int, int]:
    """Feature layers of a target of ``num_layers``: inputs of an early, a middle and a late layer.

    The published rule 2, n // 2, n - 3 where its layers differ; on a shallower target the inputs
    of layers 1, n - 2 and n - 1.
    """
    published = (2, num_layers // 2, num_layers - 3)
    if num_layers > 6 and len(set(published)) == 3:
        return published
    if num_layers < 4:
        raise ValueError(f"a target of {num_layers} layers has no three distinct inner features")
    return (1, num_layers - 2, num_layers - 1)


def plain_layer(shape: ModelConfig) -> ModelConfig:
    """One layer of a target's sizes, as the published heads have it."""
    rope = shape.rope
    if rope.kind == "none" or rope.interleaved or rope.share < 1:
        # A head turns whole heads by halves.
        rope = RopeConfig(rope.theta)
    sizes = (
        "architecture vocab_size hidden_size intermediate_size num_heads num_kv_heads head_dim "
        "max_position rms_norm_eps"
    )
    return ModelConfig(num_layers=1, rope=rope, **{n: getattr(shape, n) for n in sizes.split()})


def new_eagle(target: Decoder, recipe: HeadRecipe) -> EagleHead:
    """An untrained EAGLE head for ``target``, which lends it embedding and vocabulary."""
    head = EagleHead(plain_layer(target.config))
    initialise(head, recipe.seed)
    with torch.no_grad():
        head.fc.bias.zero_()
    return head


def read_layers(head: Head) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads."""
    if isinstance(head, EagleHead):
        return (NORMED_OUTPUT,)
    assert head.config.feature_layers is not None
    return head.config.feature_layers


def new_head(target: Decoder, recipe: HeadRecipe) -> Eagle3Head:
    """An untrained head for ``target``: its sizes, and its final norm and head to begin with."""
    shape, layer = target.config, plain_layer(target.config)
    ids = torch.tensor(recipe.draft_vocab or range(shape.vocab_size))
    config = Eagle3Config(layer, len(ids), shape.hidden_size, spread_layers(shape.num_layers))
    head = Eagle3Head(config)
    initialise(head, recipe.seed)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[ids])
        head.norm.weight.copy_(target.norm.weight)
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.t2d.zero_()
        head.t2d[ids] = True
    return head


class DraftPass:
    """The head's chained passes over rows of one shape, from the target's features.

    Args:
        head, target: The modules; the target is not trained.
        rows, width: Shape of the token rows.
        recipe: Length of the chain, and whether passes are compiled; one graph serves all later
            steps.
    """

    def __init__(
        self, head: Head, target: Decoder, rows: int, width: int, recipe: HeadRecipe
    ) -> None:
        self.head, self.target = head, target
        self.rows, self.width, self.steps = rows, width, recipe.steps
        self.recipe = recipe
        device = target.embed_tokens.weight.device
        self.positions = torch.arange(width, device=device)
        self.layers = read_layers(head)
        self.fuse: Callable[[Tensor], Tensor]
        if isinstance(head, EagleHead):
            self.ids = torch.arange(target.config.vocab_size, device=device)
            self.fuse, self.logits = torch.nn.Identity(), target.logits
        else:
            self.ids = torch.arange(head.config.draft_vocab_size, device=device) + head.d2t
            self.fuse, self.logits = head.fuse, head.logits
        self.observe = recipe.ready(self._observe, width)
        self.first, self.later = recipe.ready(self._first, width), recipe.ready(self._later, width)
        self.term = recipe.ready(self._term, width)

    def _observe(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the target makes of ``tokens (B, W)``.

        Returns:
            Features ``(B, W, len(layers) · hidden)`` and logits over the draft vocabulary
            ``(B, W, Vd)``.
        """
        positions = self.positions.repeat(self.rows)
        attend = CausalRows(self.rows, self.width)
        hidden, features = self.target(tokens.flatten(), positions, attend, self.layers)
        logits = self.target.logits(hidden)[:, self.ids]
        shape = (self.rows, self.width, -1)
        return features.view(shape), logits.view(shape)

    def _first(
        self, embeds: Tensor, features: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        attend = FirstRows(self.rows, self.width - 1)
        feature = self.fuse(features[:, :-1].flatten(0, 1))
        return (self.head(embeds, feature, positions, attend), *attend.kept[0])

    def _later(
        self,
        embeds: Tensor,
        feature: Tensor,
        positions: Tensor,
        shared: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        used: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        attend = ChainRows(self.rows, self.width - 1, shared, own, used)
        return (self.head(embeds, feature, positions, attend), *attend.kept)

    def _term(self, hidden: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
        """Weighted mean cross-entropy of one step to the target's probabilities."""
        drafted = self.logits(hidden).float().log_softmax(-1)
        each = -(wanted.float().softmax(-1) * drafted).sum(-1)
        return (each * weight).sum() / weight.sum().clamp(min=1e-6)

    def chain(self, tokens: Tensor, features: Tensor) -> list[Tensor]:
        """The head's output at every slot and step.

        Slot r = 1 … W−1 reads (feature r−1, token r) at position r. In step j its feature is its
        own last output, its token is token r+j and its position r+j.

        Returns:
            ``steps`` tensors ``(B·(W−1), hidden)``, inputs of :attr:`logits`: step j's row r−1
            predicts token r+j+1.
        """
        limit = self.head.rope.shape[0] - 1
        outputs: list[Tensor] = []
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(self.steps):
            embeds = self.target.embed_tokens(tokens.roll(-step, 1)[:, 1:].flatten())
            positions = (self.positions[1:] + step).clamp(max=limit).repeat(self.rows)
            if step == 0:
                out, key, value = self.first(embeds, features, positions)
            else:
                own, used = self._padded(kept)
                out, key, value = self.later(embeds, outputs[-1], positions, kept[0], own, used)
            kept.append((key, value))
            outputs.append(out)
        return outputs

    def _padded(self, kept: list[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Keys and values of the later passes so far, padded to the longest chain's number."""
        room, own = max(1, self.steps - 2), kept[1:]
        blank = torch.zeros_like(kept[0][0])
        keys, values = (
            torch.stack([pair[side] for pair in own] + [blank] * (room - len(own)))
            for side in (0, 1)
        )
        used = torch.full((room,), -torch.inf, device=blank.device)
        used[: len(own)] = 0
        return (keys, values), used

    def drafts(
        self,
        tokens: Tensor,
        features: Tensor,
        weights: Tensor,
        number: int,  # noqa: ARG002
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What is learnt from rows whose tokens have ``weights (B, W)``.

        Args:
            number: Of the training's step, on which all that is drawn by chance depends.

        Yields:
            Of each step the outputs ``(K, hidden)``, and their slots of the flattened
            ``(B, W−1)``: the heaviest ones.
        """
        for step, hidden in enumerate(self.chain(tokens, features)):
            slots = self.heaviest(weights, step)
            yield hidden[slots], slots

    def heaviest(self, weights: Tensor, step: int) -> Tensor:
        """The slots, int64 ``(K,)``, whose tokens weigh most in step ``step``."""
        weight = self.weights(weights, step).flatten()
        count = max(1, round(self.recipe.scored_share * weight.numel()))
        return weight.topk(count).indices

    def targets(self, logits: Tensor, step: int, slots: Tensor) -> Tensor:
        """The target's logits for what step ``step`` predicts at ``slots`` of the flattened
        ``(B, W−1)``: ``(K, Vd)``."""
        rows, columns = slots // (self.width - 1), slots % (self.width - 1)
        columns = (columns + 1 + step).clamp(max=self.width - 1)
        return logits[rows, columns]

    def weights(self, weights: Tensor, step: int) -> Tensor:
        """Weight of the token that step ``step`` predicts, 0 past the row's end: ``(B, W−1)``."""
        shifted = weights.roll(-(step + 1), 1)[:, 1:]
        inside = self.positions[1:] + step + 1 < self.width
        return shifted * inside


class HeadTrainer(Trainer[Kind]):
    """Trains a head on a target's features with training-time test, resumably.

    The loss is the cross-entropy to the target's own probabilities; gradients flow through the
    chain's features.

    Args:
        target: The frozen target.
        head: The head to begin with, such as :func:`new_head` and :func:`new_eagle` make.
        batches, recipe, budget: As for :class:`Trainer`.
        cache: Features of all rows, kept from one pass; None: the target runs at every step.
    """

    passes: type[DraftPass] = DraftPass

    def __init__(
        self,
        target: Decoder,
        head: Kind,
        batches: Batches,
        recipe: HeadRecipe,
        budget: Budget,
        cache: FeatureCache | None = None,
    ) -> None:
        self.cache = cache
        self.target = target.eval().requires_grad_(False)
        self.recipe, self.device = recipe, target.embed_tokens.weight.device
        head.to(self.device)
        super().__init__(head, batches, recipe, budget)
        self._passes: dict[tuple[int, int], DraftPass] = {}

    def backward(self) -> Tensor:
        batch = self.batches.next()
        loss = self.loss(batch)
        loss.backward()
        self.budget.tokens_done += batch.length
        return loss.detach()

    def loss(self, batch: Batch) -> Tensor:
        """Weighted loss over all steps of the chain, a scalar."""
        batch = batch.to(self.device)
        tokens, weights = batch.tokens, batch.weights
        shape = (tokens.shape[0], tokens.shape[1])
        if shape not in self._passes:
            self._passes[shape] = self.passes(self.model, self.target, *shape, self.recipe)
        draft = self._passes[shape]
        total = torch.zeros((), device=self.device)
        with mixed(self.device):
            with torch.no_grad():
                if self.cache is None:
                    features, logits = draft.observe(tokens)
                else:
                    features, logits = self.cache.read(batch, self.target, draft.ids)
            drafts = draft.drafts(tokens, features, weights, self.budget.done)
            for step, (hidden, slots) in enumerate(drafts):
                wanted = draft.targets(logits, step, slots)
                weight = draft.weights(weights, step).flatten()[slots]
                term = draft.term(hidden, wanted, weight)
                total = total + self.recipe.step_decay**step * term
        return total
