"""The recorded passes of the trees, by tier and batch size; made when they are first needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from overlap_spec.drafters.base import Drafter
from overlap_spec.kernels import Tree
from overlap_spec.tiers import Tier
from overlap_spec.worker.drafter_guard import DrafterGuard
from overlap_spec.worker.graphs import CudaGraph, Eager, Recorded, Tensors, TracedGraph
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.stepwise import ChainDraft, first_step, link_steps, next_step

# Trees, without and with branches, over which passes are traced that are good for any size: of more
# than one node, since in a trace sizes of 1 would look alike.
CHAIN, TREE = Tier(2, 1, 3), Tier(2, 2, 4)


K = TypeVar("K")
T = TypeVar("T")


class TierGraphs(NamedTuple):
    """One tier's passes behind its drafts. ``extend`` is None where the drafter is not recorded, or
    takes in nothing."""

    verify: Recorded
    commit: Recorded
    extend: Recorded | None


class GraphRunner:
    """What a worker has recorded.

    A CUDA graph is good for one padded number of rows, a trace for any. A trace is also good for
    any number of nodes where it can be: drafting, verifying, committing and extending chains,
    verifying and extending trees. So no chain but the first waits for recordings, and a policy may
    take any length. Recordings are made over the row of padding: no request's state is touched.

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
        self._tiers: dict[tuple[Tier, int], TierGraphs] = {}
        self._shared: dict[tuple[str, Tier], Any] = {}
        self._packed: dict[tuple[Tier, int, int], Recorded] = {}
        self._drafts: dict[tuple[Tier, int, bool, bool], Recorded | None] = {}
        self._steps: dict[tuple[bool, bool], ChainDraft | None] = {}

    def clear(self) -> None:
        """Forget all recordings."""
        self._tiers.clear()
        self._shared.clear()
        self._packed.clear()
        self._drafts.clear()
        self._steps.clear()
        self._pool = None
        self.count = 0

    def find(self, tier: Tier, rows: int) -> TierGraphs:
        """The passes over ``rows`` drafted trees of a tier."""
        key = tier, rows if self._cuda else 0
        return self._tiers.get(key) or self._new(self._tiers, key, self._make_tier, tier, rows)

    def find_draft(self, tier: Tier, rows: int, sampled: bool, told: bool) -> Recorded | None:
        """The drafts of ``rows`` trees, with noise where any of their rows is ``sampled``, and with
        the states of their grammars if the drafter is to be told them; None where they are not
        recorded.

        A trace computes these for all rows or for none; a kernel sees for itself.
        """
        if self._cuda:
            # Before the drafts run: what is recorded behind them runs them too.
            self.find(tier, rows)
        return self._draft(tier, rows, sampled, told)

    def find_packed(self, tier: Tier, rows: int, count: int) -> Recorded:
        """Verify over ``count`` nodes of ``rows`` trees: see :meth:`ModelRunner.verify_packed`."""
        key = (tier, rows, count) if self._cuda else (tier, 0, 0)
        found = self._packed.get(key)
        return found or self._new(self._packed, key, self._make_packed, tier, rows, count)

    def find_steps(self, sampled: bool, told: bool) -> ChainDraft | None:
        """The drafts of chains, step by step; ``sampled`` and ``told`` as in :meth:`find_draft`."""
        key = sampled, told
        return self._steps.get(key) or self._new(self._steps, key, self._make_steps, *key)

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
        made = {made for made, _ in list(self._tiers)}
        if self._cuda or not self.enabled or tier.is_chain or tier in made:
            return 0.0
        return self._took_ms / (1 + len([t for t in made if not t.is_chain]))

    def record(self, tier: Tier, sampled: bool = False, told: bool = False) -> bool:
        """Record what a step of a single request may want; whether anything was lacking."""
        before = self.count
        self.find_draft(tier, 1, sampled, told)
        self.find(tier, 1)
        return self.count > before

    def _draft(self, tier: Tier, rows: int, sampled: bool, told: bool) -> Recorded | None:
        drafter = self._runner.drafter if tier.steps else None
        if not self.enabled or (drafter is not None and (drafter.host or not drafter.recorded)):
            return None
        if self._cuda:
            key = tier, rows, True, self._runner.reads_states
        else:
            key = tier, 0, sampled and drafter is not None, told and drafter is not None
        if key not in self._drafts:
            if drafter is not None and self._guard.fault is not None:
                return None
            self._new(self._drafts, key, self._make_draft, *key)
        return self._drafts[key]

    def _make_tier(self, tier: Tier, size: int) -> TierGraphs:
        runner = self._runner
        if not self.enabled:
            verify, commit = (
                Eager(partial(work, tier)) for work in (runner.verify_trees, runner.commit_trees)
            )
            return TierGraphs(verify, commit, None)
        drafter = runner.drafter
        recorded = drafter is not None and drafter.recorded and self._guard.fault is None
        # In a trace of a single row, sizes of 1 would look alike.
        rows = size if self._cuda else 2
        draft = self._draft(tier, size, True, True) if self._cuda else None
        kind = TREE if tier.top_k > 1 else CHAIN
        verify, features = self._share("verify", tier, kind, self._make_verify, rows, draft)
        kind = CHAIN if tier.is_chain else tier
        commit = self._share("commit", tier, kind, self._make_commit, rows, draft)
        extend = None
        if recorded and runner.extends:
            extend = self._share("extend", tier, CHAIN, self._make_extend, rows, draft, features)
        return TierGraphs(verify, commit, extend)

    def _share(self, name: str, tier: Tier, kind: Tier, make: Callable[..., Any], *of: Any) -> Any:
        """What ``make`` gives for the tier; of traces what it gives for ``kind``, made once."""
        if self._cuda:
            return make(tier, *of)
        key = name, kind
        return self._shared.get(key) or self._new(self._shared, key, make, kind, *of)

    def _trees(self, tier: Tier, rows: int, draft: Recorded | None) -> tuple[Tensors, Tensors]:
        """Rows and pages, and trees behind them as ``draft`` gives them: a CUDA graph takes another
        one's inputs and outputs where they are, so that a step copies neither."""
        given = self._padding(rows)
        if self._cuda and draft is not None:
            trees = draft(*given)
            return draft.kept(*given), trees
        return given, self._runner.dead_trees(tier, *given)

    def _make_verify(
        self, tier: Tier, rows: int, draft: Recorded | None
    ) -> tuple[Recorded, Tensors]:
        """The target's pass, and the features that it gives for these trees."""
        (_, pages), (_, roots, _, _, *tensors) = self._trees(tier, rows, draft)
        tree = Tree(*tensors[: len(Tree._fields)])
        inputs = pages, roots, tree.tokens, tree.depths, tree.ancestors
        graph = self._make(partial(self._runner.verify_trees, tier), *inputs)
        return graph, graph(*inputs)[1:]

    def _make_commit(self, tier: Tier, rows: int, draft: Recorded | None) -> Recorded:
        (padding, pages), (_, roots, _, _, *tensors) = self._trees(tier, rows, draft)
        tree = Tree(*tensors[: len(Tree._fields)])
        every = padding.new_full((tree.tokens.numel(),), -1)
        limits = torch.full_like(padding, tier.steps)
        chosen = *tree, every, limits, self._runner.no_run.repeat(len(every), 1)
        return self._make(partial(self._runner.commit_trees, tier), padding, pages, roots, *chosen)

    def _make_extend(
        self, tier: Tier, rows: int, draft: Recorded | None, features: Tensors
    ) -> Recorded | None:
        """The drafter's pass over what trees commit; ``features``: verify's own, or such."""
        given, (_, roots, *_) = self._trees(tier, rows, draft)
        path = roots.new_zeros(rows, tier.steps + 1)
        if not self._cuda:
            features = tuple(x.new_zeros(rows * tier.nodes, x.shape[1]) for x in features)
        inputs = *given, roots, path.clone(), path, torch.zeros_like(roots), *features
        count = rows if self._cuda else 3
        path = roots.new_zeros(count, tier.steps + 1)
        lengths = roots.new_full((count,), min(tier.steps, 1))
        features = tuple(x.new_full((count * tier.nodes, x.shape[1]), 0.25) for x in features)
        others = torch.zeros_like(lengths), torch.full_like(path, 5), path, lengths, *features
        return self._guarded(self._runner.extend_trees, inputs, (*self._padding(count), *others))

    def _make_draft(self, tier: Tier, rows: int, sampled: bool, told: bool) -> Recorded | None:
        stepwise = not self._cuda and self._runner.stops_drafts
        if stepwise and tier.is_chain and tier.steps:
            steps = self.find_steps(sampled, told)
            return None if steps is None else steps.of(tier.steps)
        work = partial(self._runner.draft_trees, tier, sampled, told)
        return self._guarded(work, self._padding(rows or 2), self._padding(rows or 3))

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

    def _make_packed(self, tier: Tier, rows: int, count: int) -> Recorded:
        if not self.enabled:
            return Eager(self._runner.verify_packed)
        rows, count = (rows, count) if self._cuda else (2, 3)
        padding, pages = self._padding(rows)
        nodes = max(tier.nodes, 2)
        # The roots, then as many more as are asked for; in ascending order.
        more = [n for n in range(rows * nodes) if n % nodes][: count - rows]
        pack = torch.tensor(sorted([r * nodes for r in range(rows)] + more), device=padding.device)
        tokens = padding.new_zeros(rows, nodes)
        seen = torch.eye(nodes, dtype=torch.bool, device=padding.device).expand(rows, -1, -1)
        inputs = pack, pages, torch.zeros_like(padding), tokens, tokens, seen.contiguous()
        return self._make(self._runner.verify_packed, *inputs)

    def _padding(self, rows: int) -> tuple[Tensor, Tensor]:
        tables = self._runner.tables
        padding = torch.full((rows,), tables.padding_row, device=self._runner.device)
        return padding, tables.pages[padding]

    def _new(self, known: dict[K, T], key: K, make: Callable[..., T], *of: Any) -> T:
        """What is lacking of what is known: it is made, and entered."""
        if self._making:
            known[key] = make(*of)
            return known[key]
        before, self._making = self._reserved(), True
        start = time.perf_counter()
        try:
            known[key] = make(*of)
        finally:
            self._took_ms += (time.perf_counter() - start) * 1e3
            self._making = False
            self.bytes += self._reserved() - before
        return known[key]

    def _guarded(
        self, work: Callable[..., Tensors], inputs: Tensors, others: Tensors
    ) -> Recorded | None:
        """A recording of the drafter's work over ``inputs``, held against the work itself over
        ``others`` (a trace: of another batch size); None, and the drafter's fault told, where that
        fails."""
        with self._guard:
            recorded = self._make(work, *inputs)
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

    def _make(self, work: Callable[..., Tensors], *inputs: Tensor) -> Recorded:
        self.count += 1
        if not self._cuda:
            return TracedGraph(self._runner, work, inputs)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return CudaGraph(work, inputs, self._pool)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._runner.device) if self._cuda else 0


def _own_buffers(drafter: Drafter, rows: int) -> list[Tensor]:
    """What a drafter keeps for each of ``rows``, and not its constants."""
    own = [b for b in drafter.buffers(recurse=False) if b.dim() and not b.is_mkldnn]
    return [b for b in own if len(b) == rows]
