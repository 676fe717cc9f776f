"""The recorded passes of the trees, by tier and batch size; made when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from overlap_spec.drafters.base import Drafter
from overlap_spec.kernels import Tree
from overlap_spec.types import Tier
from overlap_spec.worker.graphs import CudaGraph, Eager, Recorded, Tensors, TracedGraph
from overlap_spec.worker.stepwise import ChainDraft, first_step, link_steps, next_step
from overlap_spec.worker.tables import RowTables

# Trees, without and with branches, over which the target's pass is traced: of more than one node,
# since in a trace sizes of 1 would look alike.
CHAIN, TREE = Tier(2, 1, 3), Tier(2, 2, 4)


class Recordable(Protocol):
    """The passes, as :class:`overlap_spec.worker.model_runner.ModelRunner` has them."""

    drafter: Drafter | None
    tables: RowTables
    device: torch.device
    fault: Exception | None
    draft_pools: Iterable[Any]
    no_run: Tensor
    extends: bool
    reads_states: bool

    draft_trees: Callable[..., Tensors]
    dead_trees: Callable[..., Tensors]
    verify_trees: Callable[..., Tensors]
    verify_packed: Callable[..., Tensors]
    commit_trees: Callable[..., Tensors]
    extend_trees: Callable[..., Tensors]


class TierGraphs(NamedTuple):
    """One tier's passes. ``draft``, a trace without noise and grammars' states, is None where trees
    are drafted without a recording, ``extend`` where the drafter is not recorded, or there is
    none."""

    draft: Recorded | None
    verify: Recorded
    commit: Recorded
    extend: Recorded | None


class GraphRunner:
    """What a worker has recorded.

    A CUDA graph is good for one padded number of rows, a trace for any; and that of the target's
    pass over chains, or over trees, for any number of nodes, so no tier but the first waits for the
    longest of all traces. Recordings are made over
    the row of padding: no request's state is touched.

    Args:
        runner: Whose passes they are; a module that holds every tensor that they touch.
        enabled: False records nothing.

    Attributes:
        bytes: Memory that CUDA graphs took.
        recording: Whether a pass is being recorded.
        stepwise: Whether drafts may be stopped, for which their steps are recorded one by one.
    """

    def __init__(self, runner: Any, enabled: bool) -> None:
        self.bytes, self.recording, self.enabled = 0, False, enabled
        self.stepwise = False
        self._runner = runner
        passes: Recordable = runner
        self._passes = passes
        self._cuda = passes.device.type == "cuda"
        self._pool: Any = None
        self._tiers: dict[tuple[Tier, int], TierGraphs] = {}
        self._verifies: dict[Tier, tuple[Recorded, Tensors]] = {}
        self._packed: dict[tuple[Tier, int, int], Recorded] = {}
        self._drafts: dict[tuple[Tier, bool, bool], Recorded | None] = {}
        self._steps: dict[tuple[bool, bool], ChainDraft] = {}

    @property
    def count(self) -> int:
        """Sets of passes that have been recorded."""
        made = len(self._tiers) + len(self._packed) + len(self._drafts) + len(self._steps)
        return made * self.enabled

    def clear(self) -> None:
        """Forget all recordings."""
        self._tiers.clear()
        self._verifies.clear()
        self._packed.clear()
        self._drafts.clear()
        self._steps.clear()
        self._pool = None

    def find(self, tier: Tier, rows: int) -> TierGraphs:
        """The passes over ``rows`` trees of a tier."""
        key = tier, rows if self._cuda else 0
        found = self._tiers.get(key)
        if found is None:
            with self._record():
                found = self._tiers[key] = self._make_tier(tier, rows)
        return found

    def find_draft(self, tier: Tier, rows: int, sampled: bool, told: bool) -> Recorded | None:
        """The drafts of ``rows`` trees, with noise where any of their rows is ``sampled``, and with
        the states of their grammars if the drafter is to be told them.

        A trace computes these for all rows or for none; a kernel sees for itself.
        """
        plain = self.find(tier, rows).draft
        drafter = self._passes.drafter
        if self._cuda or plain is None or drafter is None or tier.steps == 0:
            return plain
        if not (sampled or told):
            return plain
        key = tier, sampled, told
        if key not in self._drafts:
            with self._record():
                self._drafts[key] = self._make_draft(*key, 2, 3)
        return self._drafts[key]

    def find_packed(self, tier: Tier, rows: int, count: int) -> Recorded:
        """Verify over ``count`` nodes of ``rows`` trees: see :meth:`ModelRunner.verify_packed`."""
        key = (tier, rows, count) if self._cuda else (tier, 0, 0)
        found = self._packed.get(key)
        if found is None:
            with self._record():
                found = self._packed[key] = self._make_packed(tier, rows, count)
        return found

    def find_steps(self, sampled: bool, told: bool) -> ChainDraft | None:
        """The drafts of chains, step by step; ``sampled`` and ``told`` as in :meth:`find_draft`."""
        found = self._steps.get((sampled, told))
        if found is None:
            with self._record():
                found = self._make_steps(sampled, told)
            if found is not None:
                self._steps[sampled, told] = found
        return found

    def record_next(self, tiers: Iterable[Tier]) -> bool:
        """Record what one of these tiers may want and no step has asked for; False if it is all
        there. For traces: a GPU's graphs are of a batch size each, and made before serving."""
        if self._cuda or not self.enabled:
            return False
        kinds = list(product((False, True), (False, self._passes.reads_states)))
        for tier in tiers:
            for kind in kinds:
                before = self.count
                self.find_draft(tier, 1, *kind)
                if self.stepwise:
                    self.find_steps(*kind)
                if self.count > before:
                    return True
        return False

    def _make_tier(self, tier: Tier, size: int) -> TierGraphs:
        passes = self._passes
        if not self.enabled:
            verify, commit = (
                Eager(partial(work, tier)) for work in (passes.verify_trees, passes.commit_trees)
            )
            return TierGraphs(None, verify, commit, None)
        # In a trace of a single row, sizes of 1 would look alike.
        padding, pages = self._padding(size if self._cuda else 2)
        others = self._padding(size if self._cuda else 3)
        drafter = passes.drafter
        recorded = drafter is not None and drafter.recorded and passes.fault is None
        draft = extend = None
        if drafter is None or tier.steps == 0 or (recorded and not drafter.host):
            all_told = self._cuda, self._cuda and passes.reads_states
            draft = self._make_draft(tier, *all_told, len(padding), len(others[0]))
        drafted = draft or Eager(partial(passes.dead_trees, tier))
        _, positions, _, _, *tensors = drafted(padding, pages)
        tree = Tree(*tensors[: len(Tree._fields)])
        verify_graph, features = self._make_verify(tier, pages, positions, tree)
        every = padding.new_full((tree.tokens.numel(),), -1)
        limits = torch.full_like(padding, tier.steps)
        runs = passes.no_run.repeat(len(every), 1)
        chosen = *tree, every, limits, runs
        commit_graph = self._make(
            partial(passes.commit_trees, tier), padding, pages, positions, *chosen
        )
        if recorded and passes.extends:
            path, tokens = (padding.new_zeros(len(padding), tier.steps + 1) for _ in range(2))
            lengths = torch.zeros_like(padding)
            given = padding, pages, positions, tokens, path, lengths, *features
            rows = len(others[0])
            tokens, path = (
                x.new_full((rows, tier.steps + 1), n) for x, n in ((tokens, 5), (path, 0))
            )
            lengths = lengths.new_full((rows,), min(tier.steps, 1))
            positions = torch.zeros_like(others[0])
            features = tuple(x.new_full((rows * tier.nodes, x.shape[1]), 0.25) for x in features)
            extend = self._guarded(
                partial(passes.extend_trees, tier),
                given,
                (*others, positions, tokens, path, lengths, *features),
            )
        return TierGraphs(draft, verify_graph, commit_graph, extend)

    def _make_verify(
        self, tier: Tier, pages: Tensor, roots: Tensor, tree: Tree
    ) -> tuple[Recorded, Tensors]:
        """The target's pass, and features such as it gives for these trees."""
        passes = self._passes
        if self._cuda:
            inputs = pages, roots, tree.tokens, tree.depths, tree.ancestors
            graph = self._make(partial(passes.verify_trees, tier), *inputs)
            return graph, graph(*inputs)[1:]
        kind = TREE if tier.top_k > 1 else CHAIN
        if kind not in self._verifies:
            shape = Tree(*passes.dead_trees(kind, *self._padding(2))[4:])
            inputs = pages, roots, shape.tokens, shape.depths, shape.ancestors
            graph = self._make(partial(passes.verify_trees, kind), *inputs)
            self._verifies[kind] = graph, graph(*inputs)[1:]
        graph, features = self._verifies[kind]
        nodes = tree.tokens.numel()
        return graph, tuple(x.new_zeros(nodes, x.shape[1]) for x in features)

    def _make_draft(
        self, tier: Tier, sampled: bool, told: bool, rows: int, others: int
    ) -> Recorded | None:
        work = partial(self._passes.draft_trees, tier, sampled, told)
        return self._guarded(work, self._padding(rows), self._padding(others))

    def _make_steps(self, sampled: bool, told: bool) -> ChainDraft | None:
        """For any batch and any number of steps; None where the drafter failed."""
        first = partial(first_step, self._runner, sampled, told)
        onward = partial(next_step, self._runner, sampled, told)
        link = partial(link_steps, self._runner)
        if not self.enabled:
            return ChainDraft(Eager(first), Eager(onward), Eager(link), told)
        with self._runner.guard_drafter():
            # In a trace sizes of 1 would look alike: two rows with two drafts; the others have one.
            padding, others = self._padding(2), self._padding(3)
            root, *at = first(*padding)
            at = [*onward(*padding, *at)]
            other_root, *other_at = first(*others)
            begin = self._guarded(first, padding, others)
            further = self._guarded(onward, (*padding, *at), (*others, *other_at))
            linked = self._guarded(link, (root, *at[2:4]), (other_root, *other_at[2:4]))
            if begin is not None and further is not None and linked is not None:
                return ChainDraft(begin, further, linked, told)
        return None

    def _make_packed(self, tier: Tier, rows: int, count: int) -> Recorded:
        passes = self._passes
        if not self.enabled:
            return Eager(passes.verify_packed)
        rows, count = (rows, count) if self._cuda else (2, 3)
        padding, pages = self._padding(rows)
        nodes = max(tier.nodes, 2)
        # The roots, then as many more as are asked for; in ascending order.
        more = [n for n in range(rows * nodes) if n % nodes][: count - rows]
        pack = torch.tensor(sorted([r * nodes for r in range(rows)] + more), device=padding.device)
        tokens = padding.new_zeros(rows, nodes)
        seen = torch.eye(nodes, dtype=torch.bool, device=padding.device).expand(rows, -1, -1)
        inputs = pack, pages, torch.zeros_like(padding), tokens, tokens, seen.contiguous()
        return self._make(passes.verify_packed, *inputs)

    def _padding(self, rows: int) -> tuple[Tensor, Tensor]:
        tables = self._passes.tables
        padding = torch.full((rows,), tables.padding_row, device=self._passes.device)
        return padding, tables.pages[padding]

    @contextmanager
    def _record(self) -> Any:
        before, self.recording = self._reserved(), self.enabled
        try:
            yield
        finally:
            self.recording = False
            self.bytes += self._reserved() - before

    def _guarded(
        self, work: Callable[..., Tensors], inputs: Tensors, others: Tensors
    ) -> Recorded | None:
        """A recording of the drafter's work over ``inputs``, held against the work itself over
        ``others`` (a trace: of another batch size); None, and the drafter's fault told, where that
        fails."""
        try:
            recorded = self._make(work, *inputs)
        except Exception as error:  # a drafter's fault costs no request
            self._passes.fault = error
            return None
        cause: Exception | None = None
        try:
            if self._same(recorded, work, *others):
                return recorded
        except Exception as error:  # the recording's, or the drafter's
            cause = error
        fault = RuntimeError(
            f"{type(self._passes.drafter).__name__}: its recording gives other results than the "
            "drafter itself; keep values and sizes on the device, or set recorded = False"
        )
        fault.__cause__ = cause
        self._passes.fault = fault
        return None

    def _same(self, recorded: Recorded, work: Callable[..., Tensors], *inputs: Tensor) -> bool:
        """Whether both give the same results, and leave the drafter in the same state."""
        tables, drafter = self._passes.tables, self._passes.drafter
        if drafter is None:
            return True
        state = _own_buffers(drafter, len(tables.roots))
        tables.roots[-1:], tables.committed[-1:] = 3, 2
        tables.temperature[-1:], tables.seed[-1:] = 1.0, 7
        outcomes = []
        try:
            for run in (recorded, work):
                for cache in self._passes.draft_pools:
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
        if not self._cuda:
            return TracedGraph(self._runner, work, inputs)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return CudaGraph(work, inputs, self._pool)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._passes.device) if self._cuda else 0


def _own_buffers(drafter: Drafter, rows: int) -> list[Tensor]:
    """What a drafter keeps for each of ``rows``, and not its constants."""
    own = [b for b in drafter.buffers(recurse=False) if b.dim() and not b.is_mkldnn]
    return [b for b in own if len(b) == rows]
