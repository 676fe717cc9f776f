"""The stop within a step: chains are ended, and drafts left out, by how sure the drafter was of
them, which a CPU knows after each: AdaSpec's correction and its verifier
(:class:`overlap_spec.tiers.DraftStop`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from overlap_spec.tiers import RAGGED_GAIN, DraftStop, kept_nodes
from overlap_spec.worker.chains import Chain, Loop
from overlap_spec.worker.graphs import Recorded, Tensors


class StoppedDraft(Recorded):
    """Chains of at most ``len(stop.costs_ms) - 1`` drafts, which a budget's stop ends before."""

    def __init__(self, chain: Callable[[], Chain], stop: DraftStop) -> None:
        self._chain, self._costs_ms = chain, list(stop.costs_ms)
        self._numbers = torch.from_numpy(stop.expected), torch.from_numpy(stop.curves)

    def __call__(self, *inputs: Tensor) -> Tensors:
        return self._chain().draft(STOPPED, (*inputs, *self._numbers), self._costs_ms)


def kept(scores: Tensor, stop: DraftStop) -> tuple[int, Tensor] | None:
    """How many nodes of a batch of chains are to be verified, roots included, and what each is
    worth: float32 ``(S, N)``; None: all are. ``scores (S, N)``: of the trees, padding last."""
    trees, rows = len(stop.expected), stop.rows
    if rows is None:
        return None
    chances = torch.zeros_like(scores)
    chances[:, 0] = 1.0
    # Behind a dead node no difference is a number.
    own = scores[:trees].diff(dim=1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    chances[:trees, 1:] = reached(own, torch.from_numpy(stop.curves))
    shares = chances[:trees, 1:].flatten().tolist()
    beside_ms = stop.costs_ms[scores.shape[1] - 1] - rows.ms(trees + len(shares))
    count, gain = kept_nodes(shares, trees, lambda n, nodes: n / (beside_ms + rows.ms(nodes)))
    return (count, chances.log()) if gain > 1 + RAGGED_GAIN else None


def reached(scores: Tensor, curves: Tensor) -> Tensor:
    """How likely each draft of a chain is to be accepted, with all before it: float32
    ``(trees, d)``, of the drafts' log-probabilities ``scores`` and the stop's curves."""
    bins = curves.shape[1]
    at = (scores.exp() * bins - 0.5).clamp(0.0, bins - 1.0)
    low = at.floor().clamp(0.0, bins - 2.0).long()
    left, right = curves.gather(1, low), curves.gather(1, low + 1)
    return (left + (at - low) * (right - left)).cumprod(1)


def stops(scores: Tensor, expected: Tensor, curves: Tensor, costs_ms: list[float]) -> bool:
    """Whether chains of ``d`` drafts end there, by :class:`overlap_spec.tiers.DraftStop`, of whose
    lengths it is one. ``scores`` float32 ``(rows, d)``: log-probabilities of the drafts, padding
    last."""
    trees, steps = expected.shape[0], scores.shape[1]
    longer = steps + 1
    while longer < len(costs_ms) and costs_ms[longer] <= 0.0:
        longer += 1
    if longer >= len(costs_ms):
        return True
    shares = reached(scores[:trees], curves)
    tokens = trees + float(shares.sum())
    further, share = 0.0, shares[:, -1]
    for _ in range(longer - steps):
        share = share * expected
        further += float(share.sum())
    return (tokens + further) / costs_ms[longer] <= tokens / costs_ms[steps]


STOPPED = Loop(
    "expected: Tensor, curves: Tensor, costs_ms: List[float]",
    "len(costs_ms) - 1",
    "costs_ms[steps] > 0.0 and stops(torch.cat(scores, 1), expected, curves, costs_ms)",
    {"stops": stops},
)
