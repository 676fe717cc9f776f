"""A smaller model of the same vocabulary drafts (arXiv 2211.17192)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import DraftCache, MakeCache, Tables
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.kernels import Noise, top_candidates
from overlap_spec.models.config import read_json
from overlap_spec.models.decoder import Attend, Decoder
from overlap_spec.models.weights import load_decoder


class DraftModelDrafter(TreeDrafter):
    """Any checkpoint that the target could be; its state is its last hidden state.

    Where the target's context is longer than the model's own, later tokens all stand at its last
    position: its drafts get worse there.
    """

    def __init__(self, model: Decoder, target: Decoder, cache: DraftCache, rows: int) -> None:
        state = model.embed_tokens.weight.new_zeros(rows, model.config.hidden_size)
        super().__init__(cache, state, target.config.max_position - 1)
        self.model = model
        # Heads of one vocabulary may be padded to different sizes.
        self.last_token = model.config.vocab_size - 1
        self.vocab_size = min(model.config.vocab_size, target.config.vocab_size)
        self.own_last_position = min(len(model.rope) - 1, self.last_position)

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> DraftModelDrafter:
        if config.draft is None:
            raise ConfigError("algorithm 'draft_model' needs draft, the folder of a checkpoint")
        path = Path(config.draft)
        same_vocabulary(path, config.target_path)
        embedding = target.embed_tokens.weight
        model = load_decoder(path, embedding.dtype, embedding.device)
        model.rope = model.rope[: target.config.max_position].clone()
        return cls(model, target, make_cache(model.config), len(tables.roots))

    def states_before(self, features: Tensor | None) -> None:  # noqa: ARG002
        return None

    def advance(
        self,
        tokens: Tensor,
        before: Tensor | None,  # noqa: ARG002
        positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        known = tokens.clamp(max=self.last_token)
        state: Tensor = self.model(known, positions.clamp(max=self.own_last_position), attend)[0]
        return state

    def candidates(self, states: Tensor, k: int, noise: Noise | None = None) -> tuple[Tensor, ...]:
        logits = self.model.logits(states)[:, : self.vocab_size].contiguous()
        return top_candidates(logits, k, None, noise)


def same_vocabulary(draft: Path, target: Path) -> None:
    """Compare the tokens of two checkpoints' ``tokenizer.json``.

    Raises:
        CheckpointError: they differ; it names the first id whose tokens are not the same.
    """
    own, wanted = (token_texts(folder / "tokenizer.json") for folder in (draft, target))
    for number in sorted(own.keys() | wanted.keys()):
        mine, its = own.get(number), wanted.get(number)
        if mine != its:
            raise CheckpointError(
                f"{draft}: a draft model must have the target's vocabulary; token {number} is "
                f"{'absent' if mine is None else repr(mine)}, and the target's is "
                f"{'absent' if its is None else repr(its)}"
            )


def token_texts(file: Path) -> dict[int, str]:
    """Each token's text as ``tokenizer.json`` spells it, by id.

    Raises:
        CheckpointError: the file is absent, broken, or has no vocabulary.
    """
    if not file.exists():
        raise CheckpointError(f"{file} is missing: vocabularies cannot be compared")
    data = read_json(file)
    vocabulary: Any = (data.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        texts = {int(number): str(text) for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        texts = {number: str(piece[0]) for number, piece in enumerate(vocabulary)}
    else:
        raise CheckpointError(f"{file} has no model.vocab")
    added = data.get("added_tokens") or []
    return {**texts, **{int(token["id"]): str(token["content"]) for token in added}}
