"""What the passes of a step hand to each other, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from overlap_spec.drafters.base import Committed, DraftCache, Roots
from overlap_spec.kernels import KeySpan, Tree
from overlap_spec.kernels.scripting import Tensors
from overlap_spec.models.decoder import Attend, Heads
from overlap_spec.tiers import Tier
from overlap_spec.worker.batch import Batch
from overlap_spec.worker.kv_pool import KVPool, PagedAttend
from overlap_spec.worker.sampler import Masks
from overlap_spec.worker.tables import SamplingFeatures


class Drafted(NamedTuple):
    """Trees after the roots of ``batch.rows``; the last rows may be padding.

    ``links`` int64 ``(3, S, N)``: tokens, first children and next siblings, for the host. ``pack``
    int64 ``(T,)``: the flat numbers of the nodes that are verified; None: all. ``tier``: the
    plan's, or a shorter one where its budget's ``stop`` ended the drafts. ``nodes``: how many of
    the batch that left to be verified; None: what the plan says.
    """

    roots: Roots
    tree: Tree
    links: Tensor
    pack: Tensor | None
    tier: Tier
    nodes: int | None = None


class Verified(NamedTuple):
    """The target's answers to the trees: ``logits (S * N, V)``, or ``(T, V)`` of the verified
    nodes; ``features (S * N, F)``, the drafter's; ``writes``, to states, if any, as of
    :attr:`overlap_spec.worker.state_pool.TreeStates.writes`."""

    logits: Tensor
    features: Tensor | None
    writes: Tensors = ()


class Prefilled(NamedTuple):
    """The target's answers to the chunks: ``logits (F, V)`` of the final chunks' last tokens, None
    where there are none; ``features``, the drafter's, of all chunks' tokens; ``extras``, what the
    optional parts read, by name."""

    logits: Tensor | None
    features: Tensor | None
    extras: Mapping[str, tuple[Tensor, ...]]


class AcceptResult(NamedTuple):
    """What the trees of a step got, or its final chunks.

    ``lengths`` int64 ``(R,)``: accepted drafts. ``tokens`` int64 ``(R, W)``: the target's choices
    along the accepted path, of which ``lengths + 1`` count; the last may be negative. ``path``
    int64 ``(R, W)``: the accepted nodes. ``packed`` int64 ``(R, ...)``: what goes to the host
    (:mod:`overlap_spec.worker.packed_rows`). ``logprobs``: as of :meth:`Sampler.logprobs`.
    """

    lengths: Tensor
    tokens: Tensor
    path: Tensor
    packed: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None


class GrammarRows(NamedTuple):
    """What the lane wrote of a step, on the device; nodes are the trees', those of padding too,
    then the final chunks'.

    ``masks``: int32 ``(M, words)`` and what each node has of them. ``limits`` int64 ``(S,)``: depth
    down to which each tree's rows are good. ``runs`` int32 ``(1 + M, TOLD)``: behind a row of -1,
    the run that the grammar forces behind each node that has a mask row, -1 behind its end; and the
    node's state, -1: unknown. ``places`` int64 ``(nodes,)``: which mask row each has, -1: none.
    """

    masks: Masks
    limits: Tensor
    runs: Tensor
    places: Tensor

    def behind(self, nodes: slice) -> Tensor:
        """int32 ``(nodes, TOLD)``: what is forced behind these."""
        return self.runs[self.places[nodes] + 1]


@dataclass
class StepTensors:
    """What a step's passes have come to on the device; each is set by a stream's work, and read by
    what is ordered behind that.

    Attributes:
        features: What its requests ask of the sampler.
        decided: Of the trees, and of the final chunks.
        free: Whether each request of ``plan.verified`` is inside its thinking; empty: none is.
        grammar: None where no request has one; the others: where the step has no such pass.
    """

    features: SamplingFeatures
    batch: Batch = field(init=False)
    drafted: Drafted | None = None
    verified: Verified | None = None
    prefilled: Prefilled | None = None
    grammar: GrammarRows | None = None
    free: Sequence[bool] = ()
    decided: tuple[AcceptResult | None, AcceptResult | None] = (None, None)


@dataclass(eq=False)
class CommittedTokens(Committed):
    """Of one rectangle of trees, or of ragged chunks. ``slots`` int64 ``(T,)``: physical slots, the
    same in every cache; ``span``: what they see."""

    tokens: Tensor
    positions: Tensor
    features: Tensor | None
    rows: Tensor
    last: Tensor
    slots: Tensor
    span: KeySpan

    def attend(self, cache: DraftCache) -> Attend:
        assert isinstance(cache, KVPool)
        return PagedAttend(cache, self.slots, replace(self.span, first=cache.first))

    def store(self, cache: DraftCache, layer: int, heads: Heads) -> None:
        assert isinstance(cache, KVPool)
        heads.store(cache.k[layer], cache.v[layer], self.slots)
