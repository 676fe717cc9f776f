"""The models of a worker, and the passes over trees and chunks that are computed with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from overlap_spec.drafters.base import Drafter
from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.kernels import KeySpan, Tree, accept_path
from overlap_spec.models.decoder import Decoder
from overlap_spec.steps import STATES, TOLD
from overlap_spec.tiers import Tier
from overlap_spec.worker.batch import Chunks
from overlap_spec.worker.grammar_drafts import GrammarDrafts
from overlap_spec.worker.graphs import Tensors
from overlap_spec.worker.kv_pool import KVPool, PagedAttend, lazy_zeros
from overlap_spec.worker.packed_rows import pack_rows
from overlap_spec.worker.passes import AcceptResult, CommittedTokens
from overlap_spec.worker.state_pool import ChunkStates, StatePool, TreeStates
from overlap_spec.worker.tables import RowTables

# Tensors that a commit takes of trees: their own, and three of what was chosen.
TREES = len(Tree._fields) + 3


class ModelRunner(nn.Module):
    """The models of a worker, and its passes over trees and chunks.

    Args:
        states: Of the target's layers that keep no keys; None: it has no such.
        adapters: The target's (:mod:`overlap_spec.models.lora`); None: it has none.

    Attributes:
        caches: The target's keys, and the drafter's.
        proposer: What drafts on the host; the one behind it, if any, is the drafter.
        recorded_drafter: Whether the drafter's methods depend on nothing but tensors.
        extends: Whether the drafter takes in what was committed.
        refused: int64 ``()``: drafted nodes that broke the contract; a built drafter has none.
        reads_states: Whether the drafter keeps to what grammars' tables allow.
        told: What grammars tell drafts.
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
        states: StatePool | None = None,
        adapters: Any = None,
    ) -> None:
        super().__init__()
        self.proposer = drafter if drafter is not None and drafter.host else None
        self.checked = drafter is not None and not drafter.built_in
        if drafter is not None and drafter.behind is not None:
            drafter = drafter.behind
        self.target, self.drafter, self.tables, self.pool = target, drafter, tables, pool
        self.draft_pools, self.caches = nn.ModuleList(draft_pools), [pool, *draft_pools]
        self.states, self.adapters, self.device = states, adapters, tables.device
        self.last_position = target.config.max_position - 1
        self.feature_layers = drafter.feature_layers if drafter is not None else ()
        self.reads_states = isinstance(drafter, TreeDrafter)
        room, count = STATES if self.reads_states else 0, tables.padding_row + 1
        self.told = GrammarDrafts(count, tables.vocab_size, room, self.device)
        self.recorded_drafter = drafter is None or drafter.recorded
        self.extends = drafter is not None and type(drafter).extend is not Drafter.extend
        self.register_buffer("refused", torch.zeros((), dtype=torch.int64, device=self.device))
        no_run = torch.full((1, TOLD), -1, dtype=torch.int32, device=self.device)
        self.register_buffer("no_run", no_run)
        if self.feature_layers:
            # One a page, so that a prefix can be reused with the drafter's cache: zeros of page 0,
            # which starts of sequences read, and a last row for what is not to be kept.
            width = len(self.feature_layers) * target.config.hidden_size
            shape = pool.k.shape[1] + 1, width
            self.register_buffer("page_features", lazy_zeros(shape, pool.k.dtype, self.device))

    @property
    def stepwise(self) -> bool:
        """Whether chains are drafted step by step: a built drafter's, where a step's confidences
        are read without waiting."""
        drafter = self.drafter
        if self.device.type != "cpu" or not isinstance(drafter, TreeDrafter):
            return False
        return drafter.stepwise and drafter.recorded and not self.checked

    def release(self) -> None:
        """Let go of weights, caches and tables, for who keeps a closed engine."""
        refused = self.refused.cpu().clone()
        for module in self.modules():
            module._parameters.clear()
            module._buffers.clear()
        # A closed engine still has its figures.
        self.refused = refused

    def verify_trees(
        self,
        tier: Tier,
        rows: Tensor,
        pages: Tensor,
        roots: Tensor,
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor,
    ) -> Tensors:
        """The target over all nodes: logits ``(S * N, V)``, features ``(S * N, F)`` if any, and
        what they write to states, if to any (:attr:`TreeStates.writes`)."""
        place = self._within(roots[:, None] + depths)
        slots = roots[:, None] + self.count(tokens.shape[1])
        attend = self.pool.attend(pages, slots, roots, place, ancestors if tier.top_k > 1 else None)
        states = None if self.states is None else TreeStates(self.states, rows, ancestors)
        attend = replace(attend, states=states)
        return self._verify(tokens.flatten(), place.flatten(), attend)

    def verify_packed(
        self,
        pack: Tensor,
        rows: Tensor,
        pages: Tensor,
        roots: Tensor,
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor,
    ) -> Tensors:
        """The same over the nodes ``pack (T,)`` alone: logits ``(T, V)``; the others' features, and
        what they write to states, are zeros."""
        batch, nodes = tokens.shape
        place = self._within(roots[:, None] + depths).flatten()[pack]
        slots = self.pool.slots(pages, roots[:, None] + self.count(nodes)).flatten()[pack]
        bounds = torch.arange(batch + 1, device=self.device) * nodes
        offsets, seen = torch.searchsorted(pack, bounds), ancestors.flatten(0, 1)[pack]
        span = KeySpan(pages, roots, place, seen, offsets=offsets, longest=nodes)
        states = None if self.states is None else TreeStates(self.states, rows, ancestors, pack)
        attend = PagedAttend(self.pool, slots, span, states)
        logits, *told = self._verify(tokens.flatten()[pack], place, attend)
        if self.feature_layers:
            every = told[0].new_zeros(batch * nodes, told[0].shape[1])
            told[0] = every.index_copy_(0, pack, told[0])
        return logits, *told

    def _verify(self, tokens: Tensor, place: Tensor, attend: PagedAttend) -> Tensors:
        """As :meth:`verify_trees`, of these tokens."""
        hidden, features = self.target(tokens, place, attend, self.feature_layers)
        told, states = () if features is None else (features,), attend.states
        writes = states.writes if isinstance(states, TreeStates) else ()
        return self.target.logits(hidden), *told, *writes

    def read_chunks(self, chunks: Chunks) -> tuple[Tensor, Tensor | None]:
        """The target over all chunks in one pass: hidden states ``(T, H)``, and features."""
        span = self._chunk_span(chunks, chunks.positions, chunks.offsets)
        slots = self.token_slots(chunks.token_rows, chunks.positions)
        states = None if self.states is None else ChunkStates(self.states, chunks)
        attend = PagedAttend(self.pool, slots, span, states)
        hidden, features = self.target(chunks.tokens, chunks.positions, attend, self.feature_layers)
        return hidden, features

    def commit_trees(
        self, tier: Tier, rows: Tensor, pages: Tensor, roots: Tensor, *rest: Tensor
    ) -> Tensors:
        """Follow the choices down the trees, and make what they accept the rows' new state.

        Args:
            rest: The trees' tensors, the choice after every node int64 ``(S * N,)``, the depth
                limits int64 ``(S,)``, the runs behind the nodes int32 ``(S * N, TOLD)``, and the
                writes to states, if any.
        """
        (*parts, choices, limits, runs), writes = rest[:TREES], rest[TREES:]
        tables, tree = self.tables, Tree(*parts)
        # A chain's is asked of its tensors: one recording is good for all.
        nodes = tree.tokens.shape[1]
        width = nodes if tier.is_chain else tier.steps + 1
        choices = choices.view_as(tree.tokens)
        accepted = accept_path(choices, tree, width, limits)
        lengths, path = accepted.lengths, accepted.path
        tokens = choices.gather(1, path)
        if tier.top_k > 1:
            base = roots[:, None]
            self.pool.move(pages, base + path, base + self.count(width))
        tables.committed[rows] = roots + lengths + 1
        last = path.gather(1, lengths[:, None])
        if self.states is not None:
            self.states.commit(rows, tree.ancestors, last[:, 0], writes)
        told = runs[(self.count(rows.shape[0]) * nodes)[:, None] + last].squeeze(1)
        tables.roots[rows] = accepted.bonus.clamp(min=0)
        behind = self.told.enter(rows, told, accepted.bonus, tier.base is not None)
        # Else the padding row would grow out of its pages, and follow what nobody wrote.
        tables.committed[-1:], self.told.forced[-1:] = 0, -1
        refused = torch.where(tree.parents == last, tree.scores, -torch.inf).amax(1, keepdim=True)
        scores = torch.cat([tree.scores.gather(1, path), refused], 1)
        living = (tree.scores > -torch.inf).sum(1) - 1
        return lengths, tokens, path, pack_rows(lengths, living, tokens, scores, behind)

    def commit_chunks(self, rows: Tensor, tokens: Tensor, runs: Tensor) -> AcceptResult:
        """Make what was chosen behind final chunks ``(F,)`` the rows' new roots: of each a tree of
        its root alone."""
        self.tables.roots[rows] = tokens.clamp(min=0)
        behind = self.told.enter(rows, runs, tokens, self.told.has_tries)
        none, tokens = torch.zeros_like(tokens), tokens[:, None]
        scores = torch.full((len(rows), 2), -torch.inf, device=self.device)
        scores[:, 0] = 0.0
        packed = pack_rows(none, none, tokens, scores, behind)
        return AcceptResult(none, tokens, none[:, None], packed)

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
        """Feed the drafter what trees committed; a recording wants an output."""
        assert self.drafter is not None
        batch, width = tokens.shape
        slots = roots[:, None] + 1 + self.count(width)
        place = self._within(slots).flatten()
        each = self.count(batch)[:, None]
        along = None
        if features:
            nodes = features[0].shape[0] // batch
            along = features[0][(each * nodes + path).flatten()]
            owners = rows[:, None].expand(-1, width).flatten()
            self._keep_features(owners, (slots - 1).flatten(), along)
        last, slots = each[:, 0] * width + lengths, self.pool.slots(pages, slots).flatten()
        given, span = (
            (tokens.clamp(min=0).flatten(), place, along),
            KeySpan(pages, roots + 1, place),
        )
        self.drafter.extend(CommittedTokens(*given, rows, last, slots, span))
        return (rows,)

    def extend_chunks(
        self, chunks: Chunks, own: Tensor | None, accepted: AcceptResult | None
    ) -> None:
        """Feed the drafter what the chunks committed; ``own``: their features."""
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
        slots = self.token_slots(chunks.extend_rows, chunks.extend_positions)
        behind = chunks.final_rows, chunks.chosen, slots, span
        self.drafter.extend(CommittedTokens(tokens, positions, before, *behind))

    def _chunk_span(self, chunks: Chunks, positions: Tensor, offsets: Tensor) -> KeySpan:
        """What tokens at ``positions (T,)`` see: chunk c's, from ``offsets[c]`` on."""
        pages, longest = self.tables.pages[chunks.rows], chunks.longest
        return KeySpan(pages, chunks.starts, positions, offsets=offsets, longest=longest)

    def _keep_features(self, rows: Tensor, positions: Tensor, features: Tensor) -> None:
        """Keep the feature of every page's last token, for requests that start after it. Pages that
        rejected tokens write to are not full yet: they are overwritten."""
        size, dump = self.pool.page_size, self.page_features.shape[0] - 1
        page = self.tables.pages[rows, positions // size]
        ends = (positions + 1) % size == 0
        self.page_features[torch.where(ends & (page > 0), page, dump)] = features

    def token_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Physical slots of tokens at ``positions (T,)`` of ``rows (T,)``."""
        size = self.pool.page_size
        return self.tables.pages[rows, positions // size] * size + positions % size

    def _within(self, positions: Tensor) -> Tensor:
        """Positions inside the context; drafts past it are discarded."""
        return positions.clamp(max=self.last_position)

    def count(self, end: int) -> Tensor:
        """int64: 0 to ``end - 1``."""
        return torch.arange(end, device=self.device)
