"""A chain drafted step by step, each a recording of its own, so that it can be stopped in between.

On the CPU, where it is known after each step how sure the drafter was. The steps are those of
:meth:`overlap_spec.drafters.tree_drafter.TreeDrafter.draft`, token for token.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.drafters.states import GrammarStanding
from overlap_spec.drafters.tree_drafter import ChainLink, TreeDrafter
from overlap_spec.types import DraftStop
from overlap_spec.worker.graphs import Eager, Recorded, Tensors

if TYPE_CHECKING:
    from overlap_spec.worker.model_runner import ModelRunner


class StepGraphs(NamedTuple):
    """The recordings: of :func:`first_step`, :func:`next_step` and :func:`link_steps`."""

    first: Recorded
    next: Recorded
    link: Recorded


def can_stop(runner: ModelRunner) -> bool:
    """Whether drafts can be stopped: where a step's confidences are read without waiting."""
    built = isinstance(runner.drafter, TreeDrafter) and runner.drafter.recorded
    # What is drawn from the drafter's own odds has noise by the depth below one root.
    drawn = runner.rule.coupled and runner.rule.support > 0
    return runner.device.type == "cpu" and built and not runner.checked and not drawn


def draft_steps(
    graphs: StepGraphs, rows: Tensor, pages: Tensor, stop: DraftStop, trees: int, steps: int
) -> Tensors:
    """As :meth:`ModelRunner.draft_trees`, of chains of at most ``steps``, until ``stop`` ends them.

    Args:
        trees: Rows that are asked about; those of padding follow.
    """
    tokens, positions, forced, drafted, scores, *state = graphs.first(rows, pages)
    known, end = (tokens, positions, forced), (positions, forced, drafted, scores, *state)
    for _ in range(steps - 1):
        if stop.stops(end[3][:trees].numpy()):
            break
        end = graphs.next(rows, pages, *end)
    return *known, *graphs.link(tokens, *end[2:4])


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
    tokens: Tensor,
    scores: Tensor,
    state: Tensor,
    *states: Tensor,
) -> Tensors:
    """A further draft of each chain.

    The token before the last one stands for the root: what a step does does not depend on its
    number.

    Args:
        positions, forced: That token's place, and what is forced behind it.
        tokens, scores: All drafts so far ``(B, d)``, and their log-probabilities.

    Returns:
        The arguments from ``positions`` on, of the step after it.
    """
    drafter = runner.drafter
    assert isinstance(drafter, TreeDrafter)
    roots = runner.draft_roots(Roots(rows, pages, tokens[:, 0], positions, forced), sampled, False)
    standing = GrammarStanding(runner.states.tables, states[0]) if told else None
    link = drafter.next_link(roots, tokens[:, -1:], state, standing, 1)
    return (
        positions + 1,
        F.pad(forced[:, 1:], (0, 1), value=-1),
        torch.cat([tokens, link.token], 1),
        torch.cat([scores, link.score], 1),
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


def record_steps(runner: ModelRunner, sampled: bool, told: bool) -> StepGraphs | None:
    """The steps' recordings, for any batch and any number of steps; None where the drafter failed,
    whose fault is told."""
    graphs = runner.graphs
    first = partial(first_step, runner, sampled, told)
    onward = partial(next_step, runner, sampled, told)
    link = partial(link_steps, runner)
    if not graphs.enabled:
        return StepGraphs(*(Eager(work) for work in (first, onward, link)))
    # In a trace sizes of 1 would look alike: two rows, and two drafts each. It is held against the
    # work over three rows with one.
    begin, other = graphs.padding(2), graphs.padding(3)
    recorded = graphs.guarded(first, begin, other)
    with runner.guard_drafter():
        _, *place = first(*begin)
        place = list(onward(*begin, *place))
        root, *begun = first(*other)
        recorded_next = graphs.guarded(onward, (*begin, *place), (*other, *begun))
        tokens, scores = place[2:4]
        recorded_link = graphs.guarded(
            link, (tokens[:, 0], tokens, scores), (root, begun[2], begun[3])
        )
        if recorded is not None and recorded_next is not None and recorded_link is not None:
            return StepGraphs(recorded, recorded_next, recorded_link)
    return None
