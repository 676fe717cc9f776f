"""EAGLE-3 drafting (arXiv 2503.01840) with EAGLE-2's dynamic trees (arXiv 2406.16858)."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import (
    Committed,
    Draft,
    DraftCache,
    Drafter,
    MakeCache,
    Roots,
    Tables,
)
from overlap_spec.errors import ConfigError
from overlap_spec.kernels import grow, rerank, top_candidates
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.eagle3 import Eagle3Head, feature_layers
from overlap_spec.models.weights import load_eagle3
from overlap_spec.types import Tier


class Eagle3Drafter(Drafter):
    """Grows ``top_k`` branches a step and keeps the best nodes over all steps.

    Between steps it keeps one vector a row: the head's output at the root, from which the first
    candidates come. Slot i of its cache holds (feature of position i - 1, token i), so that slot 0
    does not exist.
    """

    root_state: Tensor

    def __init__(self, head: Eagle3Head, target: Decoder, cache: DraftCache, rows: int) -> None:
        super().__init__()
        self.feature_layers = feature_layers(head.config, target.config)
        self.head = head
        self.embed_tokens = getattr(head, "embed_tokens", target.embed_tokens)
        self.cache = cache
        self.last_position = head.config.layer.max_position - 1
        state = self.embed_tokens.weight.new_zeros(rows, head.fc.out_features)
        self.register_buffer("root_state", state)

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> Eagle3Drafter:
        if config.draft_path is None:
            raise ConfigError("algorithm 'eagle3' needs draft, the folder of a draft head")
        head = load_eagle3(config.draft_path, target, target.embed_tokens.weight.dtype)
        return cls(head, target, make_cache(head.config.layer, first=1), len(tables.roots))

    def extend(self, committed: Committed) -> None:
        assert committed.features is not None
        state = self.head(
            self.embed_tokens(committed.tokens),
            self.head.fuse(committed.features),
            committed.positions,
            committed.attend(self.cache),
        )
        self.root_state.index_copy_(0, committed.rows, state[committed.last])

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        state = self.root_state[roots.rows]
        return (
            self._chain(roots, state, tier) if tier.top_k == 1 else self._tree(roots, state, tier)
        )

    def _chain(self, roots: Roots, state: Tensor, tier: Tier) -> Draft:
        feature = state[:, None]
        score, token = self._candidates(state, 1)
        scores, tokens = [score], [token]
        for step in range(1, tier.nodes - 1):
            # Everything before is an ancestor: plain causal attention.
            feature = self._advance(roots, token, feature, step, None)
            score, token = self._candidates(feature.flatten(0, 1), 1)
            scores.append(score)
            tokens.append(token)
        return Draft(torch.cat(tokens, 1), None, torch.cat(scores, 1).cumsum(1))

    def _tree(self, roots: Roots, state: Tensor, tier: Tier) -> Draft:
        batch, k, device = roots.rows.shape[0], tier.top_k, roots.rows.device
        score, token = self._candidates(state, k)
        scores, tokens = [score], [token]
        parents = [torch.full_like(token, -1)]
        number = torch.arange(k, device=device).expand(batch, k)
        feature = state[:, None].expand(batch, k, -1)
        mask = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
        for step in range(1, tier.steps):
            out = self._advance(roots, token, feature, step, mask)
            added, choices = self._candidates(out.flatten(0, 1), k)
            grown = grow(score, added, choices, mask)
            parents.append(number.repeat_interleave(k, 1))
            scores.append(added.view(batch, k * k))
            tokens.append(choices.view(batch, k * k))
            score, token = grown.score, grown.token
            number = grown.best + (k + (step - 1) * k * k)
            feature = out.gather(1, grown.branch[:, :, None].expand_as(out))
            assert grown.mask is not None
            mask = grown.mask
        every = torch.cat(scores, 1)
        kept = rerank(every, tier.nodes - 1)
        return Draft(
            torch.cat(tokens, 1).gather(1, kept),
            _renumber(torch.cat(parents, 1), kept),
            every.gather(1, kept),
        )

    def _candidates(self, state: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids of the k best next tokens: ``(T, H)`` → ``(T, k)``."""
        return top_candidates(self.head.logits(state), k, self.head.d2t)

    def _advance(
        self, roots: Roots, token: Tensor, feature: Tensor, step: int, mask: Tensor | None
    ) -> Tensor:
        """One step of all branches: ``token (B, k)``, ``feature (B, k, H)`` → ``(B, k, H)``."""
        batch, k = token.shape
        prefix = roots.positions + (1 if mask is not None else step)
        offset = torch.arange(1 + (step - 1) * k, 1 + step * k, device=token.device)
        slots = roots.positions[:, None] + offset
        positions = (roots.positions + step).clamp(max=self.last_position)
        positions = positions[:, None].expand(batch, k)
        attend = self.cache.attend(roots.pages, slots, prefix, positions, mask)
        out: Tensor = self.head(
            self.embed_tokens(token.flatten()), feature.flatten(0, 1), positions.flatten(), attend
        )
        return out.view(batch, k, -1)


def _renumber(parents: Tensor, kept: Tensor) -> Tensor:
    """Candidate numbers of the kept ones' parents → node numbers, the root's being 0."""
    batch, count = kept.shape
    node = torch.zeros(batch, parents.shape[1] + 1, dtype=torch.int64, device=kept.device)
    numbers = torch.arange(1, count + 1, device=kept.device).expand(batch, count)
    node.scatter_(1, kept + 1, numbers)
    return node.gather(1, parents.gather(1, kept) + 1)
