"""What heads that read the target's features share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import DraftCache, MakeCache, Tables
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.errors import ConfigError
from overlap_spec.hub import find_folder
from overlap_spec.models.decoder import Attend, Decoder
from overlap_spec.models.eagle3 import FusingHead, feature_layers


class HeadDrafter(TreeDrafter):
    """A head of few layers over features of the target, whose embedding is its own or the target's.

    Slot i of its cache holds (feature of position i - 1, token i), so that slot 0 does not exist.

    Args:
        head: Called with embeddings ``(T, E)``, states before ``(T, H)``, positions int64 ``(T,)``
            and attention over the cache; returns states ``(T, H)``.
        rows: Of the tables.
        width: H, channels of a state; None: the head's own.

    Attributes:
        load_head: Reads the head of a folder, which is for a target, in a type.
    """

    load_head: ClassVar[staticmethod[[Path, Decoder, torch.dtype], Any]]

    def __init__(
        self,
        head: Any,
        target: Decoder,
        cache: DraftCache,
        rows: int,
        width: int | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        embed_tokens = getattr(head, "embed_tokens", target.embed_tokens)
        state = embed_tokens.weight.new_zeros(rows, width or head.config.hidden_size)
        super().__init__(cache, state, target.config.max_position - 1, offsets)
        self.head, self.embed_tokens = head, embed_tokens
        # No module of this one: the target's weights are packed once.
        self._target_logits: Callable[[Tensor], Tensor] = target.logits

    @classmethod
    def folder(cls, config: EngineConfig) -> Path:
        """The head's."""
        if config.draft is None:
            name = cls.__module__.rpartition(".")[2]
            raise ConfigError(f"algorithm {name!r} needs draft, the folder of a draft head")
        return find_folder(config.draft)

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> Self:
        head = cls.load_head(cls.folder(config), target, target.embed_tokens.weight.dtype)
        layers = getattr(head.config, "layer", head.config)
        return cls(head, target, make_cache(layers, first=1), len(tables.roots))

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
