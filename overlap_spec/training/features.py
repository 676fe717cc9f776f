"""What a target makes of a fixed set of rows, kept on disk from one pass over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from overlap_spec.models.decoder import NORMED_OUTPUT, Decoder
from overlap_spec.training.attention import CausalRows
from overlap_spec.training.batches import Batch
from overlap_spec.training.optim import mixed


class FeatureCache:
    """Features and final hidden states of rows, bfloat16, in one memory-mapped file.

    Args:
        path: The file; one that is there must be of the same rows and the same target.
        lengths: Tokens of each row.
        width: Channels of a token: each feature's, and the target's.
    """

    def __init__(self, path: Path, lengths: Sequence[int], width: int) -> None:
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        size = int(self.starts[-1]) * width
        stored = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
        self.stored = stored.view(-1, width)

    def __getitem__(self, number: int) -> Tensor:
        """Row ``number``: ``(N, width)``, its last ``hidden`` after the target's final norm."""
        return self.stored[self.starts[number] : self.starts[number + 1]]

    def read(self, batch: Batch, target: Decoder, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`DraftPass._observe` for a batch of numbered rows.

        Returns:
            Features ``(B, W, features · hidden)`` and logits over ``ids`` ``(B, W, len(ids))``; on
            padding they mean nothing.
        """
        rows, width = batch.tokens.shape
        both = torch.zeros(rows, width, self.stored.shape[1], dtype=torch.bfloat16)
        for row, number in enumerate(batch.numbers):
            kept = self[number]
            both[row, : len(kept)] = kept
        both = both.to(ids.device)
        hidden = target.config.hidden_size
        logits = target.logits(both[..., -hidden:].to(target.lm_head.weight.dtype))
        # An EAGLE head reads the normed output itself, which is kept once.
        features = both if both.shape[-1] == hidden else both[..., :-hidden]
        return features.to(logits.dtype), logits[..., ids]


@torch.no_grad()
def fill_cache(
    path: Path,
    rows: Sequence[Sequence[int]],
    target: Decoder,
    layers: tuple[int, ...],
    report: Callable[[float], None],
) -> FeatureCache:
    """The cache of ``rows``, made now unless a finished one is at ``path``."""
    kept = tuple(dict.fromkeys((*layers, NORMED_OUTPUT)))
    lengths, width = [len(row) for row in rows], len(kept) * target.config.hidden_size
    if path.exists():
        return FeatureCache(path, lengths, width)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    cache = FeatureCache(partial, lengths, width)
    device = target.embed_tokens.weight.device
    for number, row in enumerate(rows):
        tokens = torch.tensor(row, device=device)
        positions = torch.arange(len(row), device=device)
        with mixed(device):
            attend = CausalRows(1, len(row))
            _, features = target(tokens, positions, attend, kept)
        assert features is not None
        cache[number].copy_(features)
        report((number + 1) / len(rows))
    partial.rename(path)
    return cache
