"""A chain drafted step by step, each a replay of one recording, so that any length has the same and
a chain can be stopped in between.

On the CPU, where it is known after each step how sure the drafter was. The steps are those of
:meth:`overlap_spec.drafters.tree_drafter.TreeDrafter.draft`, token for token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.drafters.tree_drafter import ChainLink, TreeDrafter
from overlap_spec.kernels.scripting import compiled, replay
from overlap_spec.tiers import DraftStop, RowTimes
from overlap_spec.worker.graphs import Recorded, Tensors, TracedGraph
from overlap_spec.worker.model_runner import ModelRunner

# Without the drafts that are worth least a step must gain this much, being a recording of its own.
RAGGED_GAIN = 0.02


def reached(scores: Tensor, curves: Tensor) -> Tensor:
    """How likely each draft of a chain is to be accepted, with all before it: float32
    ``(trees, d)``, of the drafts' log-probabilities ``scores`` and the stop's curves."""
    bins = curves.shape[1]
    at = (scores.exp() * bins - 0.5).clamp(0.0, bins - 1.0)
    low = at.floor().clamp(0.0, bins - 2.0).long()
    left, right = curves.gather(1, low), curves.gather(1, low + 1)
    return (left + (at - low) * (right - left)).cumprod(1)


def kept_nodes(shares: Tensor, step_ms: float, rows: RowTimes) -> int | None:
    """How many nodes are worth verifying, roots included (AdaSpec, Algorithm 2): drafts go by
    their :func:`reached`, the least first, while the step's goodput grows.

    Args:
        step_ms: What a step takes that verifies all of them.

    Returns:
        None where the goodput grows too little for what a ragged step costs.
    """
    trees, steps = shares.shape
    rates = sorted(shares.flatten().tolist())
    nodes, tokens, took_ms = trees * (steps + 1), trees + sum(rates), step_ms
    full = best = tokens / took_ms
    for rate in rates:
        tokens, took_ms = tokens - rate, took_ms - rows.saved_ms(nodes)
        if tokens / took_ms <= best:
            break
        best, nodes = tokens / took_ms, nodes - 1
    return nodes if best > full * (1 + RAGGED_GAIN) else None


def stops(scores: Tensor, expected: Tensor, curves: Tensor, costs_ms: list[float]) -> bool:
    """Whether chains of ``d`` drafts end there, by :class:`overlap_spec.tiers.DraftStop`, of whose
    lengths it is one.

    Args:
        scores: float32 ``(rows, d)``: log-probabilities of the drafts; padding comes last.
        expected, curves, costs_ms: The stop's.
    """
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


# A chain's way through its parts, each followed by the tensors that its recording touches.
CHAIN = """
def draft(rows: Tensor, pages: Tensor, expected: Tensor, curves: Tensor, costs_ms: List[float],
          a: List[Tensor], b: List[Tensor], c: List[Tensor]):
    root, place, behind, token, score, {carried} = first(rows, pages{a})
    known = root, place, behind
    tokens, scores = [token], [score]
    for steps in range(1, len(costs_ms) - 1):
        if costs_ms[steps] > 0.0 and stops(torch.cat(scores, 1), expected, curves, costs_ms):
            break
        place, behind, token, score, {carried} = onward(
            rows, pages, place, behind, token, {carried}{b})
        tokens.append(token)
        scores.append(score)
    return known, link(root, torch.cat(tokens, 1), torch.cat(scores, 1){c})
"""


class ChainDraft:
    """Chains drafted until a stop ends them.

    Args:
        first, onward, link: :func:`first_step`, :func:`next_step` and :func:`link_steps`, or their
            recordings: all of them recorded, or none.
        told: Whether the states of grammars are carried along.
    """

    def __init__(self, first: Recorded, onward: Recorded, link: Recorded, told: bool) -> None:
        parts = {"first": first, "onward": onward, "link": link}
        traces = {n: part.trace for n, part in parts.items() if isinstance(part, TracedGraph)}
        self._held = [traces[n].owners if n in traces else [] for n in parts]
        letters = zip("abc", self._held, strict=True)
        held = {x: "".join(f", {x}[{n}]" for n in range(len(own))) for x, own in letters}
        source = CHAIN.format(carried="state" + ", states" * told, **held)
        names = {"torch": torch, "stops": stops, **parts, **traces}
        self._draft = compiled(source, "draft", names)

    def of(self, steps: int) -> FixedChain:
        """Chains of ``steps`` drafts each."""
        return FixedChain(self, steps)

    def __call__(self, rows: Tensor, pages: Tensor, stop: DraftStop) -> Tensors:
        """As :meth:`ModelRunner.draft_trees`, of chains of at most ``len(stop.costs_ms) - 1``."""
        expected, curves = torch.from_numpy(stop.expected), torch.from_numpy(stop.curves)
        return self.replay(rows, pages, expected, curves, list(stop.costs_ms))

    def replay(
        self, rows: Tensor, pages: Tensor, expected: Tensor, curves: Tensor, costs_ms: list[float]
    ) -> Tensors:
        """The same, the stop's parts as recordings take them."""
        inputs = rows, pages, expected, curves
        known, linked = replay(self._draft, inputs, costs_ms, *self._held)
        return *known, *linked


class FixedChain(Recorded):
    """Chains of ``steps`` drafts each, which nothing ends before."""

    def __init__(self, chain: ChainDraft, steps: int) -> None:
        self._chain, self._never = chain, (torch.zeros(0), torch.zeros(0, 1), [0.0] * (steps + 1))

    def __call__(self, *inputs: Tensor) -> Tensors:
        rows, pages = inputs
        return self._chain.replay(rows, pages, *self._never)


def first_step(
    runner: ModelRunner, sampled: bool, told: bool, rows: Tensor, pages: Tensor
) -> Tensors:
    """The roots' tokens, positions and runs; the first drafts ``(B, 1)`` and their
    log-probabilities ``(B, 1)``; and from what the next come: the state ``(B, 1, H)``, and where
    ``told`` the states of the grammars ``(B,)``."""
    roots = runner.draft_roots(runner.known_roots(rows, pages), sampled, told)
    drafter = runner.drafter
    assert isinstance(drafter, TreeDrafter)
    link = drafter.first_link(roots)
    known = roots.tokens, roots.positions, roots.forced
    return *known, link.token, link.score, *_carried(link, told)


def next_step(
    runner: ModelRunner,
    sampled: bool,
    told: bool,
    rows: Tensor,
    pages: Tensor,
    positions: Tensor,
    forced: Tensor,
    token: Tensor,
    state: Tensor,
    *states: Tensor,
) -> Tensors:
    """A further draft of each chain.

    The token before the last one stands for the root: what a step does does not depend on its
    number.

    Args:
        positions, forced: That token's place, and what is forced behind it.
        token: The last draft ``(B, 1)``.

    Returns:
        ``positions`` and ``forced`` of the step after it, and the rest as of :func:`first_step`.
    """
    drafter = runner.drafter
    assert isinstance(drafter, TreeDrafter)
    roots = runner.draft_roots(Roots(rows, pages, token[:, 0], positions, forced), sampled, False)
    standing = runner.told.standing(rows)._replace(states=states[0]) if told else None
    link = drafter.next_link(roots, token, state, standing, 1)
    return (
        positions + 1,
        F.pad(forced[:, 1:], (0, 1), value=-1),
        link.token,
        link.score,
        *_carried(link, told),
    )


def _carried(link: ChainLink, told: bool) -> Tensors:
    if not told:
        return (link.state,)
    assert link.options is not None
    return link.state, link.options.along(link.token).states


def link_steps(runner: ModelRunner, roots: Tensor, tokens: Tensor, scores: Tensor) -> Tensors:
    """The links of finished chains, and the tensors of their trees."""
    return runner.link(roots, Draft(tokens, None, scores.cumsum(1)), 0)
