"""What stands between logits and tokens, on the CPU: see :mod:`overlap_spec.kernels.sampling`."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.kernels.sampling import Noise

ops = torch.ops.overlap_spec


def apply_bitmask(logits: Tensor, rows: Tensor, places: Tensor | None = None) -> None:
    ops.apply_bitmask(logits, rows, places)


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    ops.apply_penalties(logits, output_counts, in_prompt, repetition, presence, frequency)


def masked_choose(
    logits: Tensor,
    rows: Tensor | None = None,
    places: Tensor | None = None,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    chosen: Tensor = ops.masked_choose(
        logits, rows, places, temperature, keys, *(filters or (None, None, None))
    )
    return chosen


def top_candidates(
    logits: Tensor, count: int, offsets: Tensor | None = None, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    scores, ids = ops.top_candidates(logits, count, offsets, *(noise or (None, None)))
    return scores, ids
