"""P-EAGLE's draft head (arXiv 2602.01469) in its published layouts: EAGLE-3's, and what stands for
the slots behind the root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import read_json
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.eagle3 import (
    SPECULATORS,
    Eagle3Config,
    Eagle3Head,
    read_eagle3_config,
)
from overlap_spec.models.weights import load_fusing

# The tensor that tells such a head from one of EAGLE-3.
MASK_HIDDEN = "mask_hidden"
# Names of the mask token's id, by who trained the head.
MASK_TOKEN = ("ptd_token_id", "pard_token", "mask_token_id")


@dataclass(frozen=True)
class ParallelConfig(Eagle3Config):
    """Shape of a head; ``mask_token``: id of the token that stands in every slot not known yet."""

    mask_token: int = 0


def read_parallel_config(path: Path) -> ParallelConfig:
    """ParallelConfig of the head in folder ``path``; CheckpointError where it is not one."""
    config = read_eagle3_config(path)
    found = _mask_token(path, read_json(path / "config.json"))
    check_mask_token(path, found, config.layer.vocab_size)
    return ParallelConfig(**vars(config), mask_token=found)


def check_mask_token(path: Path, token: int, vocab_size: int) -> None:
    """Raise CheckpointError where the mask token of the head in ``path`` is no token."""
    if not 0 <= token < vocab_size:
        raise CheckpointError(
            f"{path}: the mask token {token} is not in the vocabulary of {vocab_size}"
        )


def _mask_token(path: Path, hf: Mapping[str, Any]) -> int:
    for name in MASK_TOKEN:
        if hf.get(name) is not None:
            return int(hf[name])
    raise CheckpointError(
        f"{path}: config.json names no mask token ({', '.join(MASK_TOKEN)}): this head drafts one "
        "token a pass, by algorithm eagle3"
    )


class ParallelHead(Eagle3Head):
    """An EAGLE-3 head that drafts at all depths in one pass.

    The slots behind the root hold the mask token and, for the target's features, ``mask_hidden``;
    the output at the slot ``d`` behind the root is that of the token after it.

    ``mask_hidden``: ``(1, features * target_hidden)``, of `speculators` ``(1, 1, ...)``.
    """

    config: ParallelConfig

    def __init__(
        self, config: ParallelConfig, own_embedding: bool = False, own_head: bool = True
    ) -> None:
        super().__init__(config, own_embedding, own_head)
        lead = (1, 1) if config.layer.architecture in SPECULATORS else (1,)
        width = config.features * config.target_hidden_size
        self.mask_hidden = nn.Parameter(torch.empty(*lead, width))

    def mask_feature(self) -> Tensor:
        """What stands for the fused feature of a slot that is not known yet: ``(1, hidden)``."""
        return self.fuse(self.mask_hidden.view(1, -1))


def load_parallel(path: Path, target: Decoder, dtype: torch.dtype) -> ParallelHead:
    """The head in folder ``path``; errors as of :func:`overlap_spec.models.weights.load_eagle3`."""
    return load_fusing(path, target, dtype, ParallelHead, read_parallel_config(path))
