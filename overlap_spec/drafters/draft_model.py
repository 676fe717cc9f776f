"""A smaller model drafts, in the target's vocabulary or in most of it (arXiv 2211.17192)."""

from __future__ import annotations

import logging

from torch import Tensor, nn

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import DraftCache, MakeCache, Tables
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.errors import ConfigError
from overlap_spec.models.config import read_config
from overlap_spec.models.decoder import Attend, Decoder
from overlap_spec.models.vocabulary import VocabularyMap, map_vocabulary
from overlap_spec.models.weights import load_decoder

log = logging.getLogger(__name__)


class DraftModelDrafter(TreeDrafter):
    """Any checkpoint that the target could be; its state is its last hidden state.

    Of another vocabulary its head keeps the tokens that the target has too. Where the target's
    context is longer, later tokens all stand at its own last position: drafts get worse there.
    """

    read: Tensor

    def __init__(
        self,
        model: Decoder,
        vocabulary: VocabularyMap,
        target: Decoder,
        cache: DraftCache,
        rows: int,
    ) -> None:
        table = model.embed_tokens.weight
        state = table.new_zeros(rows, model.config.hidden_size)
        offsets = None
        if vocabulary.drafted is not None and vocabulary.offsets is not None:
            offsets = vocabulary.offsets.to(table.device)
        super().__init__(cache, state, target.config.max_position - 1, offsets)
        self.model = model
        # Heads of one vocabulary may be padded to different sizes.
        self.vocab_size = min(model.config.vocab_size, target.config.vocab_size)
        self.own_last_position = min(len(model.rope) - 1, self.last_position)
        self.register_buffer("read", vocabulary.read.to(table.device))
        if vocabulary.drafted is not None and offsets is not None:
            kept = model.lm_head.weight[vocabulary.drafted.to(table.device)]
            model.lm_head = nn.Linear(kept.shape[1], len(kept), bias=False, device="meta")
            model.lm_head.weight = nn.Parameter(kept, requires_grad=False)
            self.vocab_size = len(kept)

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> DraftModelDrafter:
        path, embedding = config.draft_path, target.embed_tokens.weight
        if path is None:
            raise ConfigError("algorithm 'draft_model' needs draft, the folder of a checkpoint")
        shape = read_config(path)
        if shape.delta is not None:
            raise ConfigError(
                f"draft: {shape.architecture} has layers that keep states, which drafts would "
                "change: take a model whose layers all attend to keys"
            )
        sizes = shape.vocab_size, target.config.vocab_size
        vocabulary = map_vocabulary(path, config.target_path, *sizes)
        if vocabulary.drafted is not None:
            log.info("%s has %.1f%% of the target's tokens", path, 100 * vocabulary.share)
        model = load_decoder(path, embedding.dtype, embedding.device)
        model.keep_positions(target.config.max_position)
        return cls(model, vocabulary, target, make_cache(model.config), len(tables.roots))

    def states_before(self, features: Tensor | None) -> None:  # noqa: ARG002
        return None

    def advance(
        self,
        tokens: Tensor,
        before: Tensor | None,  # noqa: ARG002
        positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        places = positions.clamp(max=self.own_last_position)
        state: Tensor = self.model(self.read[tokens], places, attend)[0]
        return state

    def logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)[:, : self.vocab_size].contiguous()
