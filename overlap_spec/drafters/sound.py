"""What keeps a drafter's mistakes out of the trees: nodes that break the contract are dead."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.drafters.base import Draft
from overlap_spec.tiers import Tier

DTYPES = (torch.int64, torch.int64, torch.float32)


def sound(draft: Draft, tier: Tier, vocab_size: int) -> tuple[Draft, Tensor]:
    """The draft with all its unsound nodes dead, and how many each request had.

    Unsound are tokens outside of the vocabulary, parents that do not come earlier, a second sibling
    of the same token, branches of a chain, nodes deeper than the tier, scores that are no numbers,
    and whatever lives below a dead node. A score above the parent's is lowered to it. ValueError:
    tensors of another shape or type than the tier asks for.

    Returns:
        The draft, and int64 ``(B,)``.
    """
    tokens, parents, scores = draft
    shape = len(tokens), tier.nodes - 1
    for (name, given), dtype in zip(draft._asdict().items(), DTYPES, strict=True):
        if given is not None and (tuple(given.shape) != shape or given.dtype != dtype):
            found = f"{given.dtype} {tuple(given.shape)}"
            raise ValueError(f"a draft's {name} must be {dtype} {shape}, not {found}")
    index = torch.arange(shape[1], device=tokens.device)
    own = index.expand(tokens.shape) if parents is None else parents
    good = (tokens >= 0) & (tokens < vocab_size) & (scores == scores)
    # In a chain each one follows the one before.
    good &= (own == index) if tier.top_k == 1 else (own >= 0) & (own <= index)
    own = torch.where(good, own, 0)
    if tier.top_k > 1:
        twins = (own[:, :, None] == own[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
        good &= ~(twins & good[:, None, :] & (index < index[:, None])).any(-1)
    reached = own == 0
    for _ in range(tier.steps - 1):
        reached = reached | F.pad(reached, (1, 0), value=True).gather(1, own)
    alive = torch.where(good & reached, scores, -torch.inf)
    for _ in range(tier.steps):
        alive = torch.minimum(alive, F.pad(alive, (1, 0)).gather(1, own))
    refused = ((scores != -torch.inf) & (alive == -torch.inf)).sum(1)
    above = None if parents is None else own
    return Draft(torch.where(good, tokens, 0), above, alive), refused
