"""What the compute stream does in a step: draft, verify, accept, extend.

A step's trees and its prompts' chunks run apart: the trees' passes are recorded and replayed, the
chunks run beside them.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn

from overlap_spec.drafters.base import Draft, Drafter, Roots
from overlap_spec.drafters.grafts import lengthen
from overlap_spec.drafters.sound import sound
from overlap_spec.drafters.states import GrammarStanding
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.kernels import (
    KeySpan,
    Tree,
    accept_path,
    apply_bitmask,
    build_chain,
    build_tree,
    select_nodes,
)
from overlap_spec.models.decoder import Decoder
from overlap_spec.types import RUN_TOKENS, TOLD, StepPlan, Tier
from overlap_spec.worker.acceptance import AcceptanceRule
from overlap_spec.worker.batch import Batch, Chunks
from overlap_spec.worker.choices import ChoiceScorer
from overlap_spec.worker.extras import base as extras
from overlap_spec.worker.grammar_states import STATES, GrammarStates
from overlap_spec.worker.graph_runner import GraphRunner
from overlap_spec.worker.graphs import Tensors, padded, padded_size
from overlap_spec.worker.kv_pool import KVPool, PagedAttend, lazy_zeros
from overlap_spec.worker.passes import (
    DEAD_SCORE,
    SCORE_UNIT,
    Accepted,
    AcceptResult,
    CommittedTokens,
    Drafted,
    GrammarRows,
    Prefilled,
    Verified,
)
from overlap_spec.worker.sampler import Nodes, Sampler
from overlap_spec.worker.tables import RowTables, SamplingFeatures
from overlap_spec.worker.tries import child, draft_known, follow


class DrafterFaults:
    """A ``with`` block whose exceptions become the runner's :attr:`ModelRunner.fault`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._runner.note_fault(error)
        return True


class ModelRunner(nn.Module):
    """The models of a worker and what is computed with them.

    Args:
        record: Whether passes are recorded and replayed.
        rule: Which drafts are accepted.

    Attributes:
        extends: Whether the drafter takes in what was committed.
        fault: What the drafter raised, while it is not used for that.
        refused: int64 ``()``: drafted nodes that broke the contract; a built drafter has none.
        reads_states: Whether the drafter keeps to what grammars' tables allow.
        states: These tables, and the rows' states.
    """

    page_features: Tensor
    no_run: Tensor
    refused: Tensor

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        tables: RowTables,
        pool: KVPool,
        draft_pools: list[KVPool],
        record: bool,
        rule: AcceptanceRule,
    ) -> None:
        super().__init__()
        self.target, self.drafter, self.tables = target, drafter, tables
        self.pool, self.draft_pools = pool, nn.ModuleList(draft_pools)
        self.sampler, self.rule = Sampler(tables), rule
        self.choices = ChoiceScorer(target, pool, tables, self._token_slots)
        self.device = tables.device
        self.last_position = target.config.max_position - 1
        self.feature_layers = drafter.feature_layers if drafter is not None else ()
        self.reads_states = isinstance(drafter, TreeDrafter)
        room = STATES if self.reads_states else 0
        count = tables.padding_row + 1
        self.states = GrammarStates(count, tables.vocab_size, room, self.device)
        self.extends = drafter is not None and type(drafter).extend is not Drafter.extend
        self.fault: Exception | None = None
        built = drafter is None or type(drafter).__module__.startswith("overlap_spec.drafters.")
        self.checked = not built
        self.register_buffer("refused", torch.zeros((), dtype=torch.int64, device=self.device))
        self.graphs = GraphRunner(self, record)
        no_run = torch.full((1, TOLD), -1, dtype=torch.int32, device=self.device)
        self.register_buffer("no_run", no_run)
        if self.feature_layers:
            # One feature a page, so that a prefix can be reused with the drafter's cache: zeros of
            # page 0, which starts of sequences read, and a last row for what is not to be kept.
            width = len(self.feature_layers) * target.config.hidden_size
            shape = pool.k.shape[1] + 1, width
            self.register_buffer("page_features", lazy_zeros(shape, pool.k.dtype, self.device))

    @property
    def recorded_drafter(self) -> bool:
        """Whether the drafter's methods depend on nothing but tensors."""
        return self.drafter is None or self.drafter.recorded

    @property
    def stops_drafts(self) -> bool:
        """Whether drafts can be stopped between two steps: of a built drafter's chains, where a
        step's confidences are read without waiting."""
        built = self.reads_states and self.recorded_drafter and not self.checked
        return self.device.type == "cpu" and built

    def guard_drafter(self) -> DrafterFaults:
        """Keeps what the drafter raises as :attr:`fault`: it costs no request but its drafts. In
        several ranks as :meth:`note_fault`."""
        return DrafterFaults(self)

    def note_fault(self, error: Exception) -> None:
        """Use the drafter no more, for what it raised, until :attr:`fault` is taken back.

        Raises:
            RuntimeError: it drafts in all ranks of a model, and the others may have drafted: what
                they compute from then on has no meaning.
        """
        assert self.drafter is not None
        if self.target.config.shard.size > 1 and not self.drafter.host:
            text = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"the drafter failed in one of several ranks: {text}") from error
        self.fault = error

    def release(self) -> None:
        """Let go of weights, caches, tables and recordings, for who keeps a closed engine."""
        self.graphs.clear()
        refused = self.refused.cpu().clone()
        for module in self.modules():
            module._parameters.clear()
            module._buffers.clear()
        # A closed engine still has its figures.
        self.refused = refused

    # Draft

    def enter_pages(self, batch: Batch) -> None:
        """Enter the plan's new pages into the page tables."""
        self.tables.pages.view(-1)[batch.page_index] = batch.page_values

    def draft(
        self, batch: Batch, sampled: bool = False, proposed: Draft | None = None
    ) -> Drafted | None:
        """Grow the trees; None where a step only prefills.

        Args:
            sampled: Whether any row draws its tokens: drafts share its noise.
            proposed: What a host drafter proposed for the first rows of the batch.
        """
        plan, tables, rows = batch.plan, self.tables, batch.rows
        if not batch.trees:
            return None
        pages = tables.pages[rows, : self._visible(plan)]
        # Where nobody has a grammar, none is asked: it takes its time.
        told = self.reads_states and any(plan.grammar[: batch.trees])
        tier, stop = plan.tier, plan.budget.stop
        outputs: Tensors | None = None
        if stop is not None and self.fault is None:
            with self.guard_drafter():
                steps = self.graphs.find_steps(sampled, told)
                if steps is not None:
                    outputs = steps(rows, pages, stop)
                    nodes = outputs[-1].shape[1]
                    tier = Tier(nodes - 1, 1, nodes)
        recorded = None if outputs else self.graphs.find_draft(tier, len(rows), sampled, told)
        if proposed is None and recorded is not None and self.fault is None:
            with self.guard_drafter():
                outputs = recorded(rows, pages)
                rows, pages = recorded.kept(rows, pages)
        if outputs is None:
            outputs = self.draft_trees(tier, sampled, told, rows, pages, proposed)
        tokens, positions, forced, links, *tree = outputs
        roots = Roots(rows, pages, tokens, positions, forced)
        drafted = Drafted(roots, Tree(*tree), links, None, tier)
        return drafted if plan.budget.nodes is None else self._select(batch, drafted)

    def draft_trees(
        self,
        tier: Tier,
        sampled: bool,
        told: bool,
        rows: Tensor,
        pages: Tensor,
        proposed: Draft | None = None,
    ) -> Tensors:
        """The roots' tokens, positions and runs, the links, and the tensors of the trees.

        Args:
            sampled, proposed: As in :meth:`draft`.
            told: Whether the drafter is told where its roots stand in their grammars.
        """
        tables = self.tables
        roots = self.draft_roots(self.known_roots(rows, pages), sampled, told)
        own = tier.own
        if self.drafter is None or own.steps == 0:
            draft = _no_draft(roots, 0)
        elif proposed is not None:
            missing = len(rows) - len(proposed.tokens)
            tokens, parents, scores = proposed
            above = None if parents is None else padded(parents, len(rows))
            draft = Draft(padded(tokens, len(rows)), above, padded(scores, len(rows)))
            if missing:
                draft.scores[-missing:] = -torch.inf
            draft = self._sound(roots, draft, own)
        elif self.drafter.host:
            draft = _no_draft(roots, own.nodes - 1)
        elif self.graphs.recording:
            draft = self._sound(roots, self.drafter.draft(roots, own), own)
        else:
            draft = self._draft_or_none(roots, own)
        if tier.base is not None:
            draft = lengthen(draft, roots, tier)
            draft = draft_known(draft, roots, tables.tries, tables.place, tier)
        known = roots.tokens, roots.positions, roots.forced
        return *known, *self.link(roots.tokens, draft, tier.steps)

    def dead_trees(self, tier: Tier, rows: Tensor, pages: Tensor) -> Tensors:
        """As :meth:`draft_trees`, where nothing is drafted: what a recording needs of a tree."""
        roots = self.known_roots(rows, pages)
        draft = _no_draft(roots, tier.nodes - 1)
        known = roots.tokens, roots.positions, roots.forced
        return *known, *self.link(roots.tokens, draft, tier.steps)

    def known_roots(self, rows: Tensor, pages: Tensor) -> Roots:
        """The rows' roots, as far as the tables tell of them."""
        tables = self.tables
        known = tables.roots[rows], tables.committed[rows], tables.forced[rows]
        return Roots(rows, pages, *known)

    def draft_roots(self, roots: Roots, sampled: bool, told: bool) -> Roots:
        """Roots as the drafter gets them; ``sampled`` and ``told`` as in :meth:`draft_trees`."""
        tables, rows = self.tables, roots.rows
        if told:
            standing = GrammarStanding(self.states.tables, self.states.state[rows])
            roots = roots._replace(standing=standing)
        if sampled and self.rule.coupled:
            roots = roots._replace(temperature=tables.temperature[rows], seeds=tables.seed[rows])
        return roots

    def _draft_or_none(self, roots: Roots, tier: Tier) -> Draft:
        """The drafter's draft; dead nodes alone where it raises, or has lately."""
        assert self.drafter is not None
        if self.fault is None:
            with self.guard_drafter():
                return self._sound(roots, self.drafter.draft(roots, tier), tier)
        return _no_draft(roots, tier.nodes - 1)

    def _sound(self, roots: Roots, draft: Draft, tier: Tier) -> Draft:
        """The draft; of a drafter that is not built in, its sound nodes alone."""
        if not self.checked:
            return draft
        draft, refused = sound(draft, tier, self.tables.vocab_size)
        self.refused += torch.where(roots.rows == self.tables.padding_row, 0, refused).sum()
        return draft

    def _select(self, batch: Batch, drafted: Drafted) -> Drafted:
        """Keep the best nodes of the whole batch, as many as the budget says."""
        roots, tree = drafted.roots, drafted.tree
        rows, nodes = tree.tokens.shape
        assert batch.plan.budget.nodes is not None
        # Rows of padding bring their roots.
        wanted = batch.plan.budget.nodes + rows - batch.trees
        # A recording for every number of nodes would be too many.
        count = padded_size(wanted) if self.graphs.enabled else wanted
        count = min(count, rows * nodes)
        selected = select_nodes(tree.scores, count, batch.least, batch.most)
        scores = selected.scores
        draft = Draft(tree.tokens[:, 1:], tree.parents[:, 1:], scores[:, 1:])
        links, *kept = self.link(roots.tokens, draft, drafted.tier.steps)
        pack = selected.pack if count < rows * nodes else None
        return drafted._replace(tree=Tree(*kept), links=links, pack=pack)

    def link(self, roots: Tensor, draft: Draft, depth: int) -> Tensors:
        """The links of drafted nodes ``(3, S, N)``, and the tensors of their trees."""
        if draft.parents is None:
            tree = build_chain(roots, draft.tokens, draft.scores)
        else:
            tree = build_tree(roots, draft.tokens, draft.parents, draft.scores, depth)
        return torch.stack([tree.tokens, tree.first_child, tree.next_sibling]), *tree

    # Verify

    def verify(self, drafted: Drafted | None) -> Verified | None:
        """The target over the trees."""
        if drafted is None:
            return None
        roots, tree, pack = drafted.roots, drafted.tree, drafted.pack
        inputs = (roots.pages, roots.positions, tree.tokens, tree.depths, tree.ancestors)
        tier = drafted.tier
        if pack is None:
            logits, *rest = self.graphs.find(tier, len(roots.rows)).verify(*inputs)
        else:
            logits, *rest = self.graphs.find_packed(tier, len(roots.rows), len(pack))(pack, *inputs)
        return Verified(logits, rest[0] if rest else None)

    def verify_trees(
        self,
        tier: Tier,
        pages: Tensor,
        roots: Tensor,
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor,
    ) -> Tensors:
        """The target over all nodes: logits ``(S * N, V)``, and features ``(S * N, F)`` if any."""
        place = self._within(roots[:, None] + depths)
        slots = roots[:, None] + self._count(tokens.shape[1])
        attend = self.pool.attend(pages, slots, roots, place, ancestors if tier.top_k > 1 else None)
        hidden, features = self.target(
            tokens.flatten(), place.flatten(), attend, self.feature_layers
        )
        logits = self.target.logits(hidden)
        return (logits,) if features is None else (logits, features)

    def verify_packed(
        self,
        pack: Tensor,
        pages: Tensor,
        roots: Tensor,
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor,
    ) -> Tensors:
        """The target over the nodes ``pack (T,)`` alone: logits ``(T, V)``, features ``(S * N, F)``
        with zeros where nothing was verified."""
        batch, nodes = tokens.shape
        place = self._within(roots[:, None] + depths).flatten()[pack]
        slots = self.pool.slots(pages, roots[:, None] + self._count(nodes)).flatten()[pack]
        bounds = torch.arange(batch + 1, device=self.device) * nodes
        span = KeySpan(
            pages,
            roots,
            place,
            ancestors.flatten(0, 1)[pack],
            offsets=torch.searchsorted(pack, bounds),
            longest=nodes,
        )
        hidden, features = self.target(
            tokens.flatten()[pack], place, PagedAttend(self.pool, slots, span), self.feature_layers
        )
        logits = self.target.logits(hidden)
        if features is None:
            return (logits,)
        every = features.new_zeros(batch * nodes, features.shape[1])
        return logits, every.index_copy_(0, pack, features)

    def prefill(self, batch: Batch) -> Prefilled:
        """The target over all chunks in one pass."""
        chunks = batch.chunks
        assert chunks is not None
        span = self._chunk_span(chunks, chunks.positions, chunks.offsets)
        slots = self._token_slots(chunks.token_rows, chunks.positions)
        attend = PagedAttend(self.pool, slots, span)
        hidden, features = self.target(chunks.tokens, chunks.positions, attend, self.feature_layers)
        told = extras.compute(self.target, batch, hidden)
        scores = self.choices(batch.plan, hidden)
        if not len(chunks.last):
            return Prefilled(None, features, scores, told)
        return Prefilled(self.target.logits(hidden[chunks.last]), features, scores, told)

    # Accept

    def accept(
        self,
        batch: Batch,
        drafted: Drafted | None,
        verified: Verified | None,
        prefilled: Prefilled | None,
        features: SamplingFeatures,
        grammar: GrammarRows | None,
        free: Tensor | None = None,
    ) -> Accepted:
        """Mask, choose at every node, accept, and commit: the step's one decision.

        Args:
            grammar: None where no request has one.
            free: bool ``(S,)``: whether each tree's root is inside the thinking; None: none is.
        """
        trees = chunks = None
        if drafted is not None and verified is not None:
            trees = self._accept_trees(batch, drafted, verified, features, grammar, free)
        if prefilled is not None:
            nodes = 0 if drafted is None else drafted.tree.tokens.shape[1]
            chunks = self._accept_chunks(batch, prefilled, features, grammar, batch.trees * nodes)
        return Accepted(trees, chunks)

    def _accept_trees(
        self,
        batch: Batch,
        drafted: Drafted,
        verified: Verified,
        features: SamplingFeatures,
        grammar: GrammarRows | None,
        free: Tensor | None,
    ) -> AcceptResult:
        roots, tree, pack, logits = drafted.roots, drafted.tree, drafted.pack, verified.logits
        rows, nodes = tree.tokens.shape
        count = batch.trees * nodes
        limits = self.tables.depth_limit[roots.rows]
        allowed, runs = None, self.no_run.expand(rows * nodes, -1)
        if grammar is not None:
            masks, runs = grammar.masks, grammar.runs[: rows * nodes]
            limits = torch.minimum(limits, grammar.limits)
            allowed = masks.first(count) if pack is None else masks.packed(pack, count)
        if pack is None:
            logits = logits[:count]
        ruled = self.rule.applies(features, free)
        place = self._nodes(drafted, len(logits)) if features.by_node or ruled else None
        logits = self.sampler.process(logits, place, features)
        if ruled and allowed is not None:
            every = torch.arange(len(logits), device=self.device)
            apply_bitmask(logits, allowed.of(every))
        choices = self.sampler.choose(logits, place, features, None if ruled else allowed)
        if ruled:
            assert place is not None
            choices = self.rule(choices, logits, place, features, allowed, free)
        every = choices.new_full((rows * nodes,), -1)
        every = every.index_copy_(0, self._count(count) if pack is None else pack, choices)
        commit = self.graphs.find(drafted.tier, rows).commit
        lengths, tokens, path, packed = commit(
            roots.rows, roots.pages, roots.positions, *tree, every, limits, runs
        )
        accepted = AcceptResult(lengths, tokens, path, packed)
        count = batch.trees
        real = AcceptResult(lengths[:count], tokens[:count], path[:count], packed[:count])
        self._note_output(roots.rows[: batch.trees], real.tokens, real.lengths, features)
        if features.top_logprobs is None:
            return accepted
        index = self._count(batch.trees)[:, None] * nodes + real.path
        if pack is not None:
            inverse = torch.zeros_like(every).index_copy_(0, pack, self._count(len(pack)))
            index = inverse[index]
        return accepted._replace(
            logprobs=self.sampler.logprobs(
                logits, index, real.tokens, features.top_logprobs, allowed
            )
        )

    def commit_trees(
        self, tier: Tier, rows: Tensor, pages: Tensor, roots: Tensor, *rest: Tensor
    ) -> Tensors:
        """Follow the choices down the trees, and make what they accept the rows' new state.

        Args:
            rest: The trees' tensors, the choice after every node int64 ``(S * N,)``, the depth
                limits int64 ``(S,)``, and the runs behind the nodes int32 ``(S * N, TOLD)``.
        """
        tables, tree, (choices, limits, runs) = self.tables, Tree(*rest[:-3]), rest[-3:]
        # A chain's is asked of its tensors: one recording is good for all.
        nodes = tree.tokens.shape[1]
        width = nodes if tier.is_chain else tier.steps + 1
        choices = choices.view_as(tree.tokens)
        accepted = accept_path(choices, tree, width, limits)
        lengths, path = accepted.lengths, accepted.path
        tokens = choices.gather(1, path)
        if tier.top_k > 1:
            base = roots[:, None]
            self.pool.move(pages, base + path, base + self._count(width))
        tables.committed[rows] = roots + lengths + 1
        tables.roots[rows] = accepted.bonus.clamp(min=0)
        last = path.gather(1, lengths[:, None])
        behind = runs[(self._count(rows.shape[0]) * nodes)[:, None] + last].squeeze(1)
        forced = _after(behind, accepted.bonus)
        tables.forced[rows] = forced
        if self.reads_states:
            self.states.state[rows] = self.states.after(behind[:, RUN_TOKENS], accepted.bonus)
        if tier.base is not None:
            before, reached = tables.place[rows], last[:, 0]
            place = follow(tables.tries, rows, before, tier, reached, accepted.bonus)
            tables.place[rows] = place
        # Else the padding row would grow out of its pages, and follow what nobody wrote.
        tables.committed[-1:], tables.forced[-1:] = 0, -1
        refused = torch.where(tree.parents == last, tree.scores, -torch.inf).amax(1, keepdim=True)
        scores = torch.cat([tree.scores.gather(1, path), refused], 1)
        living = (tree.scores > -torch.inf).sum(1, keepdim=True) - 1
        # Fixed point, since they travel among integers; -inf is far below any score.
        fixed = (scores * SCORE_UNIT).clamp(min=DEAD_SCORE).long()
        packed = torch.cat([lengths[:, None], living, tokens, fixed, forced], 1)
        return lengths, tokens, path, packed

    def _accept_chunks(
        self,
        batch: Batch,
        prefilled: Prefilled,
        features: SamplingFeatures,
        grammar: GrammarRows | None,
        first: int,
    ) -> AcceptResult | None:
        chunks, logits = batch.chunks, prefilled.logits
        assert chunks is not None
        self.tables.committed[chunks.rows] = chunks.starts + chunks.sizes
        if logits is None:
            return None
        rows, count = chunks.final_rows, len(chunks.final_rows)
        allowed, runs = None, self.no_run.expand(count, -1)
        if grammar is not None:
            allowed, runs = grammar.masks.last(count), grammar.runs[first : first + count]
        place = Nodes(rows, chunks.positions[chunks.last] + 1, None, None)
        logits = self.sampler.process(logits, place, features)
        tokens = self.sampler.choose(logits, place, features, allowed)
        self.tables.roots[rows] = tokens.clamp(min=0)
        self.tables.forced[rows] = forced = _after(runs, tokens)
        if self.reads_states:
            self.states.state[rows] = self.states.after(runs[:, RUN_TOKENS], tokens)
        if features.tries:
            before = self.tables.place[rows]
            self.tables.place[rows] = child(self.tables.tries, rows, before, tokens)
        lengths, tokens = torch.zeros_like(tokens), tokens[:, None]
        packed = torch.cat([tokens, forced], 1)
        accepted = AcceptResult(lengths, tokens, lengths[:, None], packed)
        self._note_output(rows, tokens, lengths, features)
        if features.top_logprobs is None:
            return accepted
        index, top = self._count(count)[:, None], features.top_logprobs
        return accepted._replace(
            logprobs=self.sampler.logprobs(logits, index, tokens, top, allowed)
        )

    def _note_output(
        self, rows: Tensor, emitted: Tensor, lengths: Tensor, features: SamplingFeatures
    ) -> None:
        """Enter what a step has given into the tables that the next choice reads."""
        if features.penalised:
            self.tables.count_output(rows, emitted, lengths)
        if features.banned:
            self.tables.push_output(rows, emitted, lengths)

    def _nodes(self, drafted: Drafted, count: int) -> Nodes:
        """Rows and positions of the first ``count`` verified nodes."""
        roots, tree, pack = drafted.roots, drafted.tree, drafted.pack
        rows = roots.rows.repeat_interleave(tree.tokens.shape[1])
        after = (roots.positions[:, None] + tree.depths + 1).flatten()
        if pack is None:
            return Nodes(rows[:count], after[:count], tree, None)
        return Nodes(rows[pack], after[pack], tree, pack)

    # Extend

    def extend(self, drafted: Drafted, verified: Verified, accepted: Accepted) -> None:
        """Feed the drafter what the trees committed: each token with the feature before it."""
        if not self.extends or self.fault is not None or accepted.trees is None:
            return
        with self.guard_drafter():
            roots, (lengths, tokens, path, *_) = drafted.roots, accepted.trees
            graphs = self.graphs.find(drafted.tier, len(roots.rows))
            features = () if verified.features is None else (verified.features,)
            inputs = (roots.rows, roots.pages, roots.positions, tokens, path, lengths)
            if graphs.extend is not None:
                graphs.extend(*inputs, *features)
            else:
                self.extend_trees(*inputs, *features)

    def extend_chunks(self, batch: Batch, prefilled: Prefilled, accepted: Accepted) -> None:
        """Feed the drafter what the chunks committed."""
        if not self.extends or self.fault is not None:
            return
        assert batch.chunks is not None
        with self.guard_drafter():
            self._extend_chunks(batch.chunks, prefilled.features, accepted.chunks)

    def extend_trees(
        self,
        rows: Tensor,
        pages: Tensor,
        roots: Tensor,
        tokens: Tensor,
        path: Tensor,
        lengths: Tensor,
        *features: Tensor,
    ) -> Tensors:
        """:meth:`extend` over trees alone; a recording wants an output."""
        assert self.drafter is not None
        batch, width = tokens.shape
        slots = roots[:, None] + 1 + self._count(width)
        place = self._within(slots).flatten()
        each = self._count(batch)[:, None]
        along = None
        if features:
            nodes = features[0].shape[0] // batch
            along = features[0][(each * nodes + path).flatten()]
            owners = rows[:, None].expand(-1, width).flatten()
            self._keep_features(owners, (slots - 1).flatten(), along)
        committed = CommittedTokens(
            tokens.clamp(min=0).flatten(),
            place,
            along,
            rows,
            each[:, 0] * width + lengths,
            self.pool.slots(pages, slots).flatten(),
            KeySpan(pages, roots + 1, place),
        )
        self.drafter.extend(committed)
        return (rows,)

    def _extend_chunks(
        self, chunks: Chunks, own: Tensor | None, accepted: AcceptResult | None
    ) -> None:
        """Extend over chunks; ``own``: their features."""
        assert self.drafter is not None
        tokens, before = chunks.extend_tokens, None
        if accepted is not None:
            tokens = tokens.index_copy(0, chunks.chosen, accepted.tokens[:, 0].clamp(min=0))
        if own is not None:
            known = torch.cat([self.page_features[chunks.pages], own])
            before = known[chunks.extend_features]
            self._keep_features(chunks.token_rows, chunks.positions, own)
        positions = self._within(chunks.extend_positions)
        span = self._chunk_span(chunks, positions, chunks.extend_offsets)
        slots = self._token_slots(chunks.extend_rows, chunks.extend_positions)
        self.drafter.extend(
            CommittedTokens(
                tokens, positions, before, chunks.final_rows, chunks.chosen, slots, span
            )
        )

    def _chunk_span(self, chunks: Chunks, positions: Tensor, offsets: Tensor) -> KeySpan:
        """What tokens of chunks see, ``positions (T,)``, of which chunk c owns those from
        ``offsets[c]`` on."""
        pages = self.tables.pages[chunks.rows]
        longest = chunks.longest
        return KeySpan(pages, chunks.starts, positions, offsets=offsets, longest=longest)

    def _keep_features(self, rows: Tensor, positions: Tensor, features: Tensor) -> None:
        """Keep the feature of every page's last token, for requests that start after that page.

        Tokens that a tree rejected write to pages that are not full yet, and are overwritten.
        """
        size, dump = self.pool.page_size, self.page_features.shape[0] - 1
        page = self.tables.pages[rows, positions // size]
        ends = (positions + 1) % size == 0
        self.page_features[torch.where(ends & (page > 0), page, dump)] = features

    def _token_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Physical slots of tokens at ``positions (T,)`` of ``rows (T,)``."""
        size = self.pool.page_size
        return self.tables.pages[rows, positions // size] * size + positions % size

    def _visible(self, plan: StepPlan) -> int:
        """Columns of the page tables that the trees read: all of them where shapes are recorded."""
        columns = self.tables.pages.shape[1]
        if self.device.type == "cuda":
            return columns
        return min(-(-plan.max_keys // self.pool.page_size), columns)

    def _within(self, positions: Tensor) -> Tensor:
        """Positions inside the context; drafts past it are discarded."""
        return positions.clamp(max=self.last_position)

    def _count(self, end: int) -> Tensor:
        return torch.arange(end, device=self.device)


def _after(runs: Tensor, chosen: Tensor) -> Tensor:
    """What is left of runs ``(S, TOLD)`` behind the tokens ``chosen (S,)``, int64; -1 of those that
    do not begin with these."""
    return torch.where(runs[:, :1] == chosen[:, None], runs[:, 1:RUN_TOKENS], -1).long()


def _no_draft(roots: Roots, nodes: int) -> Draft:
    """``nodes`` dead nodes after each root."""
    tokens = roots.tokens[:, None].expand(-1, nodes)
    return Draft(tokens, None, torch.full_like(tokens, -torch.inf, dtype=torch.float32))
