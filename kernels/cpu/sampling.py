"""The best next tokens on the CPU: see :mod:`overlap_spec.kernels.sampling`."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec.kernels import sampling
from overlap_spec.kernels.dispatch import reference_of
from overlap_spec.kernels.sampling import Noise

with_noise = reference_of(sampling.top_candidates)


def top_candidates(
    logits: Tensor, count: int, offsets: Tensor | None = None, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    if noise is not None:
        return with_noise(logits, count, offsets, noise)
    scores, ids = torch.ops.overlap_spec.top_candidates(logits, count, offsets)
    return scores, ids
