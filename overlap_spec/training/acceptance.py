"""How many drafts a target would accept, from its own runs alone: no engine, no cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec.models.decoder import Decoder
from overlap_spec.models.parallel_eagle import ParallelHead
from overlap_spec.training.head import DraftPass, Head, HeadRecipe
from overlap_spec.training.parallel import ParallelPass

# Prompt and greedy output of a target, in tokens.
Run = tuple[Sequence[int], Sequence[int]]
# Tokens int64 (N,) → int64 (steps, N): entry (j, p) is the drafter's best token for position
# p + j + 1 when the run's own tokens up to p + j are known; p is the root. A draft that differs
# from the run ends its chain, so a run's own tokens serve as drafts.
Guesses = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Acceptance:
    """Figures of chains of drafts over greedy runs.

    Attributes:
        tokens: Tokens that verifies emitted, bonus included; the prefill's is not counted.
        verifies: How many verifies there were.
        tried, accepted: Of each position in the chain, the drafts whose forerunners were all
            accepted, and those of them that were accepted; drafts past a run's end count in
            neither.
    """

    tokens: int
    verifies: int
    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def length(self) -> float:
        """Tokens a verify emits, on average; the last verify of a run is cut at its end."""
        return self.tokens / max(1, self.verifies)

    @property
    def by_position(self) -> list[float]:
        """Share of the tried drafts that were accepted, by position."""
        pairs = zip(self.accepted, self.tried, strict=True)
        return [accepted / max(1, tried) for accepted, tried in pairs]


def head_guesses(target: Decoder, head: Head, steps: int) -> Guesses:
    """The guesses of a head; both in one dtype, on one device."""
    recipe = HeadRecipe(steps=steps, compile=False)
    kind = ParallelPass if isinstance(head, ParallelHead) else DraftPass

    def guesses(tokens: Tensor) -> Tensor:
        draft = kind(head, target, 1, len(tokens), recipe)
        features, _ = draft.observe(tokens[None])
        chain = draft.chain(tokens[None], features)
        best = torch.stack([draft.ids[draft.logits(hidden).argmax(-1)] for hidden in chain])
        # Row r - 1 of a pass has the root r; there is no draft below the first token.
        return torch.cat([best.new_full((steps, 1), -1), best], 1)

    return guesses


@torch.no_grad()
def acceptance(runs: Sequence[Run], guesses: Guesses, device: str | torch.device) -> Acceptance:
    """What a chain of drafts gets accepted on a target's greedy runs.

    Args:
        runs: Runs with fewer than two output tokens say nothing and are left out.
        device: Where the drafter's modules are.
    """
    tokens = verifies = 0
    tried: list[int] = []
    accepted: list[int] = []
    for prompt, output in runs:
        if len(output) < 2:
            continue
        row = [*prompt, *output]
        table = guesses(torch.tensor(row, device=device)).tolist()
        tried, accepted = (counts or [0] * len(table) for counts in (tried, accepted))
        root, last = len(prompt), len(row) - 1
        while root < last:
            depth = 0
            while depth < len(table) and root + depth < last:
                tried[depth] += 1
                if table[depth][root] != row[root + depth + 1]:
                    break
                accepted[depth] += 1
                depth += 1
            step = min(depth + 1, last - root)
            tokens, verifies, root = tokens + step, verifies + 1, root + step
    return Acceptance(tokens, verifies, tuple(tried), tuple(accepted))
