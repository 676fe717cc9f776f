"""The recorded passes of the trees, by tier and batch size; made when they are first needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from overlap_spec.drafters.base import Drafter
from overlap_spec.kernels import Tree
from overlap_spec.tiers import Tier
from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.graphs import (
    CudaGraph,
    Eager,
    Recorded,
    Tensors,
    TracedGraph,
    graph_size,
    packed_size,
    packed_sizes,
    padded_size,
    powers_of_two,
)
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.stepwise import ChainDraft, first_step, link_steps, next_step

R = TypeVar("R")
# Trees, without and with branches, over which passes are traced that are good for any size: of more
# than one node, since in a trace sizes of 1 would look alike.
CHAIN, TREE = Tier(2, 1, 3), Tier(2, 2, 4)


class GraphRunner:
    """What a worker has recorded.

    A CUDA graph is good for one padded number of rows, a trace for any. A trace is also good for
    any number of nodes where it can be: drafting, verifying, committing and extending chains,
    verifying and extending trees. So no chain but the first waits for recordings, and a policy may
    take any length. All CUDA graphs are made before serving, by :meth:`record_all`. Those of the
    target's pass write to one place, as no two of their outputs are wanted at once; and so do
    drafts of trees of one size, whatever their tier, so that what comes behind is recorded once.
    Recordings are made over the row of padding: no request's state is touched.

    Args:
        runner: Whose passes they are; a module that holds every tensor that they touch.
        guard: Told of a drafter that cannot be recorded.
        enabled: False records nothing.

    Attributes:
        bytes: Memory that CUDA graphs took.
        count: Passes that have been recorded.
    """

    def __init__(self, runner: ModelRunner, guard: DrafterGuard, enabled: bool) -> None:
        self.bytes, self.count, self._making, self.enabled = 0, 0, False, enabled
        self._took_ms = 0.0
        self._runner, self._guard = runner, guard
        self._cuda = runner.device.type == "cuda"
        self._pool: Any = None
        self._known: dict[tuple[Any, ...], Any] = {}
        self._tiers: set[Tier] = set()
        # Where all CUDA graphs of the target's pass write: logits, and features if any.
        self._outputs: Tensors = ()

    def clear(self) -> None:
        """Forget all recordings."""
        self._known.clear()
        self._tiers.clear()
        self._pool, self._outputs, self.count = None, (), 0

    def find_draft(self, tier: Tier, rows: int, sampled: bool, told: bool) -> Recorded | None:
        """The drafts of ``rows`` trees, with noise where any of their rows is ``sampled``, and with
        the states of their grammars if the drafter is to be told them; None where they are not
        recorded."""
        drafter = self._runner.drafter if tier.steps else None
        if not self.enabled or (drafter is not None and (drafter.host or not drafter.recorded)):
            return None
        kind = tier, sampled and drafter is not None, told and drafter is not None
        if drafter is not None and self._guard.fault is not None:
            found: Recorded | None = self._known.get(("draft", *kind, rows if self._cuda else 0))
            return found
        made = self._find("draft", kind, rows if self._cuda else 0, self._make_draft)
        if self._cuda:
            # Before the drafts run: what is recorded behind them runs them too.
            self._behind(tier, rows)
        return made

    def find_verify(self, tier: Tier, rows: int) -> Recorded:
        """The target's pass over ``rows`` whole trees: see :meth:`ModelRunner.verify_trees`."""
        kind = _places(tier) if self._cuda else TREE if tier.top_k > 1 else CHAIN
        return self._find("verify", (kind,), rows, self._make_verify)

    def find_packed(self, tier: Tier, rows: int, count: int) -> Recorded:
        """Verify over ``count`` nodes of ``rows`` trees: see :meth:`ModelRunner.verify_packed`."""
        kind = (tier.nodes, count) if self._cuda else (max(tier.nodes, 2), 3)
        return self._find("packed", kind, rows, self._make_packed)

    def find_commit(self, tier: Tier, rows: int) -> Recorded:
        """What ``rows`` trees accept becomes their rows' state."""
        self._tiers.add(tier)
        kind = _shape(tier) if self._cuda else CHAIN if tier.is_chain else tier
        return self._find("commit", (kind,), rows, self._make_commit)

    def find_extend(self, tier: Tier, rows: int) -> Recorded | None:
        """The drafter's pass over what ``rows`` trees commit; None where it is not recorded, or
        takes in nothing."""
        drafter = self._runner.drafter
        if not self.enabled or drafter is None or not (drafter.recorded and self._runner.extends):
            return None
        kind = _shape(tier) if self._cuda else CHAIN
        if self._guard.fault is not None:
            found: Recorded | None = self._known.get(("extend", kind, rows if self._cuda else 2))
            return found
        return self._find("extend", (kind,), rows, self._make_extend)

    def packed_size(self, tier: Tier, rows: int, wanted: int) -> int:
        """How many nodes of ``rows`` trees are verified where ``wanted`` are asked for: as many as
        there are recordings for."""
        if self._cuda and self.enabled:
            return packed_size(rows, tier.nodes, wanted)
        return min(padded_size(wanted) if self.enabled else wanted, rows * tier.nodes)

    def padded(self, batch: int) -> int:
        """Rows that a batch is filled up to, for which there are recordings."""
        if not self.enabled:
            return batch
        return graph_size(batch) if self._cuda else padded_size(batch)

    def sizes(self, most: int) -> list[int]:
        """Batches to be made ready before serving, of at most ``most`` rows: all that there are
        where each has a graph, else powers of two, between which no kernel differs."""
        every = range(1, most + 1) if self.enabled else powers_of_two(most)
        return sorted({self.padded(size) for size in every})

    def record_all(self, most_rows: Mapping[Tier, int]) -> None:
        """Make the CUDA graphs of all steps of these tiers, of at most so many rows each.

        The largest go first: their outputs have room for those of all others.
        """
        if not (self._cuda and self.enabled):
            return
        every = [(tier, size) for tier, most in most_rows.items() for size in self.sizes(most)]
        for tier, size in sorted(every, key=lambda of: -of[0].nodes * of[1]):
            for variant in self._variants(tier):
                self.find_draft(tier, size, *variant)
            self._behind(tier, size)
            for count in packed_sizes(size, tier.nodes):
                self.find_packed(tier, size, count)

    def _behind(self, tier: Tier, rows: int) -> None:
        """Record what comes behind the drafts of a step."""
        self.find_verify(tier, rows)
        self.find_commit(tier, rows)
        self.find_extend(tier, rows)

    def _variants(self, tier: Tier) -> list[tuple[bool, bool]]:
        """The kinds of drafts that steps of a tier may want, ``sampled`` and ``told``."""
        told = self._runner.reads_states
        # Wide tiers are for who has a grammar.
        return list(product((False, True), dict.fromkeys((told,) if tier.base else (told, False))))

    def find_steps(self, sampled: bool, told: bool) -> ChainDraft | None:
        """The drafts of chains, step by step; ``sampled`` and ``told`` as in :meth:`find_draft`."""
        key = "steps", sampled, told
        found: ChainDraft | None = self._known.get(key)
        return found or self._new(key, self._make_steps, sampled, told)

    def record_next(self, tiers: Iterable[Tier]) -> bool:
        """Record what one of these tiers may want and no step has asked for; False if it is all
        there. For traces: a GPU's graphs are of a batch size each, and made before serving."""
        if self._cuda or not self.enabled:
            return False
        kinds = product(tiers, (False, True), (False, self._runner.reads_states))
        return any(self.record(*kind) for kind in kinds)

    def wait_ms(self, tier: Tier) -> float:
        """About what a step of the tier would wait for recordings: as long as those of another one
        took; 0 where they are there, as those of all chains are from the start on."""
        made = set(self._tiers)
        if self._cuda or not self.enabled or tier.is_chain or tier in made:
            return 0.0
        return self._took_ms / (1 + len([t for t in made if not t.is_chain]))

    def record(self, tier: Tier, sampled: bool = False, told: bool = False) -> bool:
        """Record what a step of a single request may want; whether anything was lacking."""
        before = self.count
        self.find_draft(tier, 1, sampled, told)
        self._behind(tier, 1)
        return self.count > before

    def _find(self, name: str, kind: tuple[Any, ...], rows: int, make: Callable[..., R]) -> R:
        """What ``make`` gives for a kind and a number of rows. Traces are good for any, and made
        of two rows: in one of a single row, sizes of 1 would look alike."""
        rows = rows if self._cuda or not rows else 2
        key = name, *kind, rows
        if key not in self._known:
            self._new(key, make, *kind, rows)
        found: R = self._known[key]
        return found

    def _trees(self, tier: Tier, rows: int) -> tuple[Tensors, Tensors]:
        """Rows and pages, and trees behind them as drafts give them: a CUDA graph takes another
        one's inputs and outputs where they are, so that a step copies neither."""
        given = self._padding(rows)
        draft = self._known.get(("trees", _places(tier), rows)) if self._cuda else None
        if draft is not None:
            trees = draft(*given)
            return draft.kept(*given), trees
        return given, self._runner.dead_trees(tier, *given)

    def _make_verify(self, tier: Tier, rows: int) -> Recorded:
        work = partial(self._runner.verify_trees, tier)
        if not self.enabled:
            return Eager(work)
        (_, pages), (_, roots, _, _, *tensors) = self._trees(tier, rows)
        tree = Tree(*tensors[: len(Tree._fields)])
        return self._make_target(work, pages, roots, tree.tokens, tree.depths, tree.ancestors)

    def _make_target(self, work: Callable[..., Tensors], *inputs: Tensor) -> Recorded:
        """A recording of the target's pass; a CUDA graph writes to where all of them do."""
        if not self._cuda:
            return self._make(work, *inputs)
        found, room = work(*inputs), self._outputs
        if not room or any(len(own) < len(new) for own, new in zip(room, found, strict=True)):
            room = self._outputs = tuple(torch.zeros_like(x) for x in found)
        into = tuple(own[: len(new)] for own, new in zip(room, found, strict=True))
        del found
        return self._make(work, *inputs, into=into)

    def _make_commit(self, tier: Tier, rows: int) -> Recorded:
        work = partial(self._runner.commit_trees, tier)
        if not self.enabled:
            return Eager(work)
        (padding, pages), (_, roots, _, _, *tensors) = self._trees(tier, rows)
        tree = Tree(*tensors[: len(Tree._fields)])
        every = padding.new_full((tree.tokens.numel(),), -1)
        limits = torch.full_like(padding, tier.steps)
        chosen = *tree, every, limits, self._runner.no_run.repeat(len(every), 1)
        return self._make(work, padding, pages, roots, *chosen)

    def _make_extend(self, tier: Tier, rows: int) -> Recorded | None:
        """Over features where verify writes them, or such."""
        given, (_, roots, *_) = self._trees(tier, rows)
        path = roots.new_zeros(rows, tier.steps + 1)
        inputs = *given, roots, path.clone(), path, torch.zeros_like(roots)
        count = rows if self._cuda else 3
        layers = [self._runner.page_features[:1]] if self._runner.feature_layers else []
        features, others = (
            tuple(x.new_full((size * tier.nodes, x.shape[1]), fill) for x in layers)
            for size, fill in ((rows, 0.0), (count, 0.25))
        )
        if self._cuda and features:
            self.find_verify(tier, rows)
            features = (self._outputs[1][: rows * tier.nodes],)
        path = roots.new_zeros(count, tier.steps + 1)
        lengths = roots.new_full((count,), min(tier.steps, 1))
        given = torch.zeros_like(lengths), torch.full_like(path, 5), path, lengths
        work, told = self._runner.extend_trees, (*self._padding(count), *given, *others)
        return self._guarded(work, (*inputs, *features), told)

    def _make_draft(self, tier: Tier, sampled: bool, told: bool, rows: int) -> Recorded | None:
        stepwise = not self._cuda and self._runner.stops_drafts
        if stepwise and tier.is_chain and tier.steps:
            steps = self.find_steps(sampled, told)
            return None if steps is None else steps.of(tier.steps)
        work = partial(self._runner.draft_trees, tier, sampled, told)
        key = "trees", _places(tier), rows
        first = self._known.get(key) if self._cuda else None
        if first is not None:
            # Behind any drafts of this size come the same graphs, whose inputs these are.
            given = self._padding(rows)
            outputs = first(*given)
            return self._guarded(work, first.kept(*given), given, outputs)
        made = self._guarded(work, self._padding(rows or 2), self._padding(rows or 3))
        if self._cuda and made is not None:
            self._known[key] = made
        return made

    def _make_steps(self, sampled: bool, told: bool) -> ChainDraft | None:
        """For any batch and any number of steps; None where the drafter failed."""
        first = partial(first_step, self._runner, sampled, told)
        onward = partial(next_step, self._runner, sampled, told)
        link = partial(link_steps, self._runner)
        if not self.enabled:
            return ChainDraft(Eager(first), Eager(onward), Eager(link), told)
        with self._guard:
            # In a trace sizes of 1 would look alike: two rows with two drafts; the others have one.
            padding, others = self._padding(2), self._padding(3)
            given, other = (first(*rows) for rows in (padding, others))
            begin = self._guarded(first, padding, others)
            # Behind a draft, which has no score to read.
            at, other_at = (x[1:4] + x[5:] for x in (given, other))
            further = self._guarded(onward, (*padding, *at), (*others, *other_at))
            chains = given[0], *(x.repeat(1, 2) for x in given[3:5])
            linked = self._guarded(link, chains, (other[0], *other[3:5]))
            if begin is not None and further is not None and linked is not None:
                return ChainDraft(begin, further, linked, told)
        return None

    def _make_packed(self, nodes: int, count: int, rows: int) -> Recorded:
        if not self.enabled:
            return Eager(self._runner.verify_packed)
        padding, pages = self._padding(rows)
        # The roots, then as many more as are asked for; in ascending order.
        more = [n for n in range(rows * nodes) if n % nodes][: count - rows]
        pack = torch.tensor(sorted([r * nodes for r in range(rows)] + more), device=padding.device)
        tokens = padding.new_zeros(rows, nodes)
        seen = torch.eye(nodes, dtype=torch.bool, device=padding.device).expand(rows, -1, -1)
        inputs = pack, pages, torch.zeros_like(padding), tokens, tokens, seen.contiguous()
        return self._make_target(self._runner.verify_packed, *inputs)

    def _padding(self, rows: int) -> tuple[Tensor, Tensor]:
        tables = self._runner.tables
        padding = torch.full((rows,), tables.padding_row, device=self._runner.device)
        return padding, tables.pages[padding]

    def _new(self, key: tuple[Any, ...], make: Callable[..., Any], *of: Any) -> Any:
        """What is lacking of what is known: it is made, and entered."""
        if self._making:
            self._known[key] = make(*of)
            return self._known[key]
        before, self._making = self._reserved(), True
        start = time.perf_counter()
        try:
            self._known[key] = make(*of)
        finally:
            self._took_ms += (time.perf_counter() - start) * 1e3
            self._making = False
            self.bytes += self._reserved() - before
        return self._known[key]

    def _guarded(
        self,
        work: Callable[..., Tensors],
        inputs: Tensors,
        others: Tensors,
        into: Tensors | None = None,
    ) -> Recorded | None:
        """A recording of the drafter's work over ``inputs``, held against the work itself over
        ``others`` (a trace: of another batch size); None, and the drafter's fault told, where that
        fails. ``into``: as :class:`CudaGraph` has it."""
        with self._guard:
            recorded = self._make(work, *inputs, into=into)
            cause: Exception | None = None
            try:
                if self._same(recorded, work, *others):
                    return recorded
            except Exception as error:  # the recording's, or the drafter's
                cause = error
            raise RuntimeError(
                f"{type(self._runner.drafter).__name__}: its recording gives other results than "
                "the drafter itself; keep values and sizes on the device, or set recorded = False"
            ) from cause
        return None

    def _same(self, recorded: Recorded, work: Callable[..., Tensors], *inputs: Tensor) -> bool:
        """Whether both give the same results, and leave the drafter in the same state."""
        tables, drafter = self._runner.tables, self._runner.drafter
        if drafter is None:
            return True
        state = _own_buffers(drafter, len(tables.roots))
        tables.roots[-1:], tables.committed[-1:] = 3, 2
        tables.temperature[-1:], tables.seed[-1:] = 1.0, 7
        outcomes = []
        try:
            for run in (recorded, work):
                for cache in self._runner.caches[1:]:
                    cache.clear((0,))
                for buffer in state:
                    buffer[-1:] = 0.5 if buffer.is_floating_point() else 1
                kept = (*run(*inputs), *(b[-1:] for b in state))
                outcomes.append([x.clone() for x in kept])
        finally:
            tables.roots[-1:], tables.committed[-1:] = 0, 0
            tables.temperature[-1:], tables.seed[-1:] = 0.0, 0
        return all(
            replayed.shape == direct.shape
            and torch.allclose(
                replayed.float(), direct.float(), rtol=1e-3, atol=1e-3, equal_nan=True
            )
            for replayed, direct in zip(*outcomes, strict=True)
        )

    def _make(
        self, work: Callable[..., Tensors], *inputs: Tensor, into: Tensors | None = None
    ) -> Recorded:
        self.count += 1
        if not self._cuda:
            return TracedGraph(self._runner, work, inputs)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return CudaGraph(work, inputs, self._pool, into)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._runner.device) if self._cuda else 0


@cache
def _places(tier: Tier) -> Tier:
    """The same for tiers whose trees are as large, and chains or none: all that a verify minds, and
    where drafts write to."""
    return replace(CHAIN if tier.is_chain else TREE, nodes=tier.nodes)


@cache
def _shape(tier: Tier) -> Tier:
    """The same for tiers behind whose drafts come the same passes, whoever has drafted."""
    base = None if tier.base is None else CHAIN
    return replace(tier, top_k=min(tier.top_k, 2), base=base)


def _own_buffers(drafter: Drafter, rows: int) -> list[Tensor]:
    """What a drafter keeps for each of ``rows``, and not its constants."""
    own = [b for b in drafter.buffers(recurse=False) if b.dim() and not b.is_mkldnn]
    return [b for b in own if len(b) == rows]
