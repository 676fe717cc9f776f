"""What heads that read the target's features share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from overlap_spec.drafters.base import DraftCache
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.models.decoder import Attend, Decoder
from overlap_spec.models.eagle3 import FusingHead, feature_layers


class HeadDrafter(TreeDrafter):
    """A head of few layers over features of the target, whose embedding is its own or the target's.

    Slot i of its cache holds (feature of position i - 1, token i), so that slot 0 does not exist.

    Args:
        head: Called with embeddings ``(T, E)``, states before ``(T, H)``, positions int64 ``(T,)``
            and attention over the cache; returns states ``(T, H)``.
        target: Whose features it reads.
        cache: The head's own.
        rows: Rows of the tables.
        width: H, channels of a state.
        offsets: As :class:`TreeDrafter` takes them.
    """

    def __init__(
        self,
        head: nn.Module,
        target: Decoder,
        cache: DraftCache,
        rows: int,
        width: int,
        offsets: Tensor | None = None,
    ) -> None:
        embed_tokens = getattr(head, "embed_tokens", target.embed_tokens)
        state = embed_tokens.weight.new_zeros(rows, width)
        super().__init__(cache, state, target.config.max_position - 1, offsets)
        self.head, self.embed_tokens = head, embed_tokens
        # No module of this one: the target's weights are packed once.
        self._target_logits: Callable[[Tensor], Tensor] = target.logits

    def advance(
        self, tokens: Tensor, before: Tensor | None, positions: Tensor, attend: Attend
    ) -> Tensor:
        assert before is not None
        state: Tensor = self.head(self.embed_tokens(tokens), before, positions, attend)
        return state


class FusingDrafter(HeadDrafter):
    """A head that fuses features of several layers, and may have a vocabulary of its own."""

    head: FusingHead

    def __init__(self, head: FusingHead, target: Decoder, cache: DraftCache, rows: int) -> None:
        offsets = head.d2t if hasattr(head, "lm_head") else None
        super().__init__(head, target, cache, rows, head.fc.out_features, offsets)
        self.feature_layers = feature_layers(head.config, target.config)

    def states_before(self, features: Tensor | None) -> Tensor:
        assert features is not None
        return self.head.fuse(features)

    def logits(self, states: Tensor) -> Tensor:
        if hasattr(self.head, "lm_head"):
            return self.head.logits(states)
        return self._target_logits(self.head.normed(states))
