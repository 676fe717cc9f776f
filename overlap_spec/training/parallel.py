"""Trainer of P-EAGLE heads (arXiv 2602.01469): all depths of a draft from masks behind its root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from overlap_spec.models.decoder import Decoder
from overlap_spec.models.eagle3 import Eagle3Head
from overlap_spec.models.parallel_eagle import ParallelConfig, ParallelHead
from overlap_spec.training.attention import FirstRows, MaskRows
from overlap_spec.training.head import DraftPass, HeadRecipe, HeadTrainer, new_head
from overlap_spec.training.trainer import initialise

# Depths that a new head learns, the root's own among them.
DEPTHS = 8
# A mask learns what its root is in the first layer, and looks for what follows such in the second.
LAYERS = 2


def new_parallel(
    target: Decoder, recipe: HeadRecipe, mask_token: int, known: Eagle3Head | None = None
) -> ParallelHead:
    """An untrained head for ``target``.

    Args:
        mask_token: A token that stands for what is not known yet; any will do.
        known: A head of one layer whose weights it begins with; None: that of :func:`new_head`. The
            layers behind do nothing yet.
    """
    first = new_head(target, recipe) if known is None else known
    layer = replace(first.config.layer, num_layers=LAYERS)
    config = ParallelConfig(**{**vars(first.config), "layer": layer}, mask_token=mask_token)
    head = ParallelHead(config)
    initialise(head, recipe.seed)
    own = {**head.state_dict(), **first.state_dict()}
    for name, weight in own.items():
        if name.startswith("layers.") and ("o_proj" in name or "down_proj" in name):
            weight.zero_()
    head.load_state_dict(own)
    return head


class ParallelPass(DraftPass):
    """The head's passes over rows of one shape: the first one over all slots, and the masks behind
    some of these, depth by depth, which at inference are one pass.

    Every depth is computed behind a share of the depth before's anchors, as the paper's COD
    sampling has it: what the deeper ones cost falls, and each has all masks before it.
    """

    head: ParallelHead

    def drafts(
        self, tokens: Tensor, features: Tensor, weights: Tensor, number: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As of a chain; the anchors of the first masks are drawn by the weights of their tokens,
        as many as are scored of the slots."""
        draw = torch.Generator().manual_seed(1_000_003 * self.recipe.seed + number)
        weight = self.weights(weights, 1)
        # The greatest u ** (1 / w) are a draw by weight without replacement (Efraimidis, 2006).
        luck = torch.rand(weight.shape, generator=draw).to(weight.device).log() / weight
        share, kept = self.recipe.scored_share, self.recipe.kept_share
        counts = [max(1, round(share * kept**n * weight.shape[1])) for n in range(self.steps - 1)]
        order = luck.topk(max(counts, default=0), 1).indices
        anchors = [order[:, :count] for count in counts]
        slots = [self._flat(each) for each in anchors]
        first, *others = self.rollout(tokens, features, anchors)
        heaviest = self.heaviest(weights, 0)
        yield first[heaviest], heaviest
        yield from zip(others, slots, strict=True)

    def chain(self, tokens: Tensor, features: Tensor) -> list[Tensor]:
        every = torch.arange(self.width - 1, device=tokens.device).expand(self.rows, -1)
        return self.rollout(tokens, features, [every] * (self.steps - 1))

    def rollout(self, tokens: Tensor, features: Tensor, anchors: Sequence[Tensor]) -> list[Tensor]:
        """The head's output at every slot, and at the masks behind some of them.

        Args:
            anchors: Of each depth from the first mask on, int64 ``(B, A)``: slots of ``W−1``; the
                first ones of the depth before.

        Returns:
            ``(B·(W−1), hidden)``, then ``(B·A, hidden)`` of each depth.
        """
        limit, positions = self.head.rope.shape[0] - 1, self.positions[1:].repeat(self.rows)
        embeds = self.target.embed_tokens(tokens[:, 1:].flatten())
        attend = FirstRows(self.rows, self.width - 1)
        feature = self.fuse(features[:, :-1].flatten(0, 1))
        outputs = [self.head(embeds, feature, positions.clamp(max=limit), attend)]
        mask = self.target.embed_tokens(tokens.new_tensor([self.head.config.mask_token]))
        feature = self.head.mask_feature()
        own: list[list[tuple[Tensor, Tensor]]] = []
        for depth, each in enumerate(anchors, 1):
            at = (each.flatten() + 1 + depth).clamp(max=limit)
            masks = MaskRows(each, attend.kept, own)
            inputs = (x.expand(len(at), -1) for x in (mask, feature))
            outputs.append(self.head(*inputs, at, masks))
            own.append(masks.kept)
        return outputs

    def _flat(self, anchors: Tensor) -> Tensor:
        start = torch.arange(self.rows, device=anchors.device) * (self.width - 1)
        return (anchors + start[:, None]).flatten()


class ParallelTrainer(HeadTrainer[ParallelHead]):
    """Trains a head that drafts all depths in one pass; arguments as of :class:`HeadTrainer`."""

    passes = ParallelPass
