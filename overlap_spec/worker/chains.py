"""Chains drafted step by step, each step a replay of one recording: so any length has the same, and
a chain can be ended in between. Token for token they are what a
:class:`overlap_spec.drafters.tree_drafter.TreeDrafter` drafts at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.drafters.tree_drafter import ChainLink, TreeDrafter
from overlap_spec.kernels.scripting import Tensors, compiled, replay
from overlap_spec.worker.drafts import Drafts, link
from overlap_spec.worker.graphs import Recorded, TracedGraph

# A chain's way through its parts, each followed by the tensors that its recording touches.
CHAIN = """
def draft(rows: Tensor, pages: Tensor, {inputs},
          a: List[Tensor], b: List[Tensor], c: List[Tensor]):
    root, place, behind, token, score, {carried} = first(rows, pages{a})
    known = root, place, behind
    tokens, scores = [token], [score]
    for steps in range(1, {most}):
        if {ends}:
            break
        place, behind, token, score, {carried} = onward(
            rows, pages, place, behind, token, {carried}{b})
        tokens.append(token)
        scores.append(score)
    return known, link(root, torch.cat(tokens, 1), torch.cat(scores, 1){c})
"""


class Loop(NamedTuple):
    """A chain's drafts until ``ends`` holds behind some number of ``steps``, at most ``most``; in
    TorchScript. ``inputs``: parameters besides rows and pages. The others are expressions of these
    and of the log-probabilities of the drafts so far, ``scores``; ``names``: what they call."""

    inputs: str
    most: str
    ends: str
    names: Mapping[str, Any] = MappingProxyType({})


FIXED = Loop("most: int", "most", "False")


class Chain:
    """The drafts of chains, by :func:`first_step`, :func:`next_step` and :func:`link_steps`, all of
    them recorded, or none. ``told``: whether the states of grammars are carried along."""

    def __init__(self, first: Recorded, onward: Recorded, link: Recorded, told: bool) -> None:
        self._parts, self._told = {"first": first, "onward": onward, "link": link}, told
        traces = {n: part.trace for n, part in self._parts.items() if isinstance(part, TracedGraph)}
        self._held = [traces[n].owners if n in traces else [] for n in self._parts]
        self._traces = traces
        self._loops: dict[str, Any] = {}

    def draft(self, loop: Loop, inputs: Tensors, given: Any) -> Tensors:
        """As :meth:`Drafts.trees`, of rows, pages and what else the loop takes."""
        if loop.ends not in self._loops:
            letters = zip("abc", self._held, strict=True)
            own = {x: "".join(f", {x}[{n}]" for n in range(len(their))) for x, their in letters}
            carried, (takes, most, ends, names) = "state" + ", states" * self._told, loop
            source = CHAIN.format(inputs=takes, most=most, ends=ends, carried=carried, **own)
            names = {"torch": torch, **names, **self._parts, **self._traces}
            self._loops[loop.ends] = compiled(source, "draft", names)
        known, linked = replay(self._loops[loop.ends], inputs, given, *self._held)
        return *known, *linked


class FixedChain(Recorded):
    """Chains of ``steps`` drafts each, which nothing ends before."""

    def __init__(self, chain: Chain, steps: int) -> None:
        self._chain, self._steps = chain, steps

    def __call__(self, *inputs: Tensor) -> Tensors:
        return self._chain.draft(FIXED, inputs, self._steps)


def first_step(drafts: Drafts, sampled: bool, told: bool, rows: Tensor, pages: Tensor) -> Tensors:
    """The roots' tokens, positions and runs; the first drafts and their log-probabilities
    ``(B, 1)``; and from what the next come: the state ``(B, 1, H)``, and where ``told`` the states
    of the grammars ``(B,)``."""
    roots = drafts.roots(drafts.known_roots(rows, pages), sampled, told)
    drafter = drafts.runner.drafter
    assert isinstance(drafter, TreeDrafter)
    found = drafter.first_link(roots)
    known = roots.tokens, roots.positions, roots.forced
    return *known, found.token, found.score, *_carried(found, told)


def next_step(
    drafts: Drafts,
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
    """A further draft of each chain: ``positions`` and ``forced`` of the step after it, and the
    rest as of :func:`first_step`. The token before the last one stands for the root: what a step
    does does not depend on its number.

    Args:
        positions, forced: That token's place, and what is forced behind it.
        token: The last draft ``(B, 1)``.
    """
    drafter = drafts.runner.drafter
    assert isinstance(drafter, TreeDrafter)
    roots = drafts.roots(Roots(rows, pages, token[:, 0], positions, forced), sampled, False)
    standing = drafts.runner.told.standing(rows)._replace(states=states[0]) if told else None
    found = drafter.next_link(roots, token, state, standing, 1)
    behind = F.pad(forced[:, 1:], (0, 1), value=-1)
    return positions + 1, behind, found.token, found.score, *_carried(found, told)


def _carried(found: ChainLink, told: bool) -> Tensors:
    if not told:
        return (found.state,)
    assert found.standing is not None
    return found.state, found.standing.states


def link_steps(roots: Tensor, tokens: Tensor, scores: Tensor) -> Tensors:
    """The links of finished chains, and the tensors of their trees."""
    return link(roots, Draft(tokens, None, scores.cumsum(1)), 0)
