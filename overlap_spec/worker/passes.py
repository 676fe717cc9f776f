"""What the compute stream does in a step: draft, verify, choose, accept, extend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from overlap_spec.drafters.base import Drafter, Roots
from overlap_spec.kernels import Tree, accept_path, build_chain
from overlap_spec.models.decoder import Decoder
from overlap_spec.types import StepPlan, Tier
from overlap_spec.worker.batch import Batch
from overlap_spec.worker.graphs import Tensors, padded
from overlap_spec.worker.kv_pool import KVPool, PagedAttend, join
from overlap_spec.worker.replay import Replay, Replays, read_inputs
from overlap_spec.worker.sampler import Masks, Nodes, Sampler
from overlap_spec.worker.tables import Needs, RowTables


class Drafted(NamedTuple):
    """Trees behind the roots, or none where a step only prefills.

    Both have the rows of ``batch.tree_rows``, the last of which may be nobody's. ``replay``: the
    recorded passes with which the step goes on, if there are any.
    """

    roots: Roots
    tree: Tree | None
    replay: Replay | None

    def first(self, count: int) -> Drafted:
        """The first ``count`` trees alone."""
        if self.tree is None or count == len(self.roots.rows):
            return self
        roots = Roots(*(x[:count] for x in vars(self.roots).values()))
        return Drafted(roots, Tree(*(x[:count] for x in self.tree)), None)


class Verified(NamedTuple):
    """``logits (L, V)`` of the verified nodes, trees first; the drafter's ``features`` of all."""

    logits: Tensor
    features: Tensor | None


class Emitted(NamedTuple):
    """What every verified request got.

    ``lengths`` int64 ``(R,)``: accepted drafts. ``tokens`` int64 ``(R, W)``: the target's choices
    along the accepted path, of which ``lengths + 1`` count; the last may be negative. ``path``
    int64 ``(B, W)``: the trees' accepted nodes. ``logprobs``: log-probability of each of
    ``tokens``, and the best ones and their ids: ``(R, W)``, ``(R, W, n)``, ``(R, W, n)``.
    """

    lengths: Tensor
    tokens: Tensor
    path: Tensor | None
    logprobs: tuple[Tensor, Tensor, Tensor] | None


class Lesson(NamedTuple):
    """What :meth:`Drafter.extend` takes in of some requests; ``rows`` and ``last`` are roots."""

    tokens: Tensor
    features: Tensor
    positions: Tensor
    attend: PagedAttend
    rows: Tensor
    last: Tensor


class Passes(nn.Module):
    """The models of a worker and what is computed with them.

    Args:
        record: Whether passes are recorded and replayed where a step only decodes.
    """

    page_features: Tensor

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        tables: RowTables,
        pool: KVPool,
        draft_pool: KVPool | None,
        record: bool,
    ) -> None:
        super().__init__()
        self.target, self.drafter, self.tables = target, drafter, tables
        self.pool, self.draft_pool = pool, draft_pool
        self.sampler = Sampler(tables)
        self.device = tables.device
        self.last_position = target.config.max_position - 1
        self.replays = Replays(self, record)
        if drafter is not None:
            # One feature a page, so that a prefix can be reused with the drafter's cache.
            width = len(drafter.feature_layers) * target.config.hidden_size
            features = pool.k.new_zeros(pool.k.shape[1], width)
            self.register_buffer("page_features", features)

    def draft(self, batch: Batch) -> Drafted:
        """Enter the plan's pages, then grow the trees."""
        plan, tables, rows = batch.plan, self.tables, batch.tree_rows
        tables.pages.view(-1)[batch.page_index] = batch.page_values
        pages = tables.pages[rows, : self._visible(plan)]
        if not batch.trees:
            return Drafted(Roots(rows, pages, rows, rows), None, None)
        replay = self.replays.find(plan, len(rows))
        if replay is None:
            # Without a recording there is nothing to fill up for.
            rows, pages = rows[: batch.trees], pages[: batch.trees]
            tokens, positions, *tree = self.grow(plan.tier, rows, pages)
        else:
            tokens, positions, *tree = replay.draft(rows, pages)
            rows, pages = replay.draft.kept(rows, pages)
        return Drafted(Roots(rows, pages, tokens, positions), Tree(*tree), replay)

    def grow(self, tier: Tier, rows: Tensor, pages: Tensor) -> Tensors:
        """The roots' tokens and positions, and the tensors of the trees behind them."""
        roots = Roots(rows, pages, self.tables.roots[rows], self.tables.committed[rows])
        if self.drafter is None or tier.steps == 0:
            tree = build_chain(roots.tokens, roots.tokens[:, None][:, :0])
        else:
            tree = self.drafter.draft(roots, tier)
        return roots.tokens, roots.positions, *tree

    def verify(self, batch: Batch, drafted: Drafted) -> Verified:
        """The target over all nodes and all chunks in one pass."""
        roots, tree, replay = drafted
        if tree is not None and replay is not None:
            hidden, *rest = replay.verify(*read_inputs(roots, tree))
            hidden = hidden[: batch.trees * tree.tokens.shape[1]]
            return Verified(self.target.logits(hidden), rest[0] if rest else None)
        tokens, positions, parts = [batch.tokens], [batch.positions], []
        nodes = 0
        if tree is not None:
            nodes = tree.tokens.numel()
            place, part = self._tree_part(batch.plan.tier, *read_inputs(roots, tree))
            tokens.insert(0, tree.tokens.flatten())
            positions.insert(0, place)
            parts.append(part)
        parts += self._chunk_parts(batch, self.pool)
        hidden, features = self.target(
            torch.cat(tokens), torch.cat(positions), join(parts), self._feature_layers
        )
        if batch.plan.chunks:
            hidden = hidden[torch.cat([self._count(nodes), batch.last + nodes])]
        return Verified(self.target.logits(hidden), features)

    def read(self, tier: Tier, *inputs: Tensor) -> Tensors:
        """The target over trees alone, as :func:`read_inputs`: hidden states, and features."""
        place, part = self._tree_part(tier, *inputs)
        tokens = inputs[2].flatten()
        hidden, features = self.target(tokens, place, part, self._feature_layers)
        return (hidden,) if features is None else (hidden, features)

    def _tree_part(
        self,
        tier: Tier,
        pages: Tensor,
        roots: Tensor,
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor,
    ) -> tuple[Tensor, PagedAttend]:
        """Positions ``(B * N,)`` of the trees' nodes, and their attention."""
        place = self._within(roots[:, None] + depths)
        slots = roots[:, None] + self._count(tokens.shape[1])
        mask = ancestors if tier.top_k > 1 else None
        return place.flatten(), self.pool.attend(pages, slots, roots, place, mask)

    def choose(
        self,
        batch: Batch,
        drafted: Drafted,
        verified: Verified,
        needs: Needs,
        masks: tuple[Masks, Tensor] | None,
    ) -> Emitted:
        """Mask, choose at every node, accept, and commit: the step's one decision.

        Args:
            masks: What the verified nodes may choose, and depth limits int64 ``(R,)``; None where
                no request has a grammar.
        """
        drafted = drafted.first(batch.trees)
        tree, allowed, limits = drafted.tree, None, None
        if masks is not None:
            allowed, limits = masks[0], masks[1][: batch.trees]
        if needs.plain:
            own = self.tables.depth_limit[drafted.roots.rows]
            limits = own if limits is None else torch.minimum(limits, own)
        nodes = self._nodes(batch, drafted)
        logits = self.sampler.process(verified.logits, nodes, needs)
        choices = self.sampler.choose(logits, nodes, needs, allowed)
        emitted = self._accept(batch, drafted, choices, limits)
        if needs.top_logprobs is None:
            return emitted
        index = len(choices) - len(batch.final_rows) + self._count(len(batch.final_rows))
        index = index[:, None].expand(-1, emitted.tokens.shape[1])
        if tree is not None and emitted.path is not None:
            first = self._count(batch.trees)[:, None] * tree.tokens.shape[1]
            index = torch.cat([first + emitted.path, index])
        top = needs.top_logprobs
        return emitted._replace(
            logprobs=self.sampler.logprobs(logits, index, emitted.tokens, top, allowed)
        )

    def _accept(
        self, batch: Batch, drafted: Drafted, choices: Tensor, limits: Tensor | None
    ) -> Emitted:
        tables, (roots, tree, _), plan = self.tables, drafted, batch.plan
        singles = choices[len(choices) - len(batch.final_rows) :]
        tokens, lengths, path = singles[:, None], torch.zeros_like(singles), None
        tables.committed[batch.chunk_rows] = batch.chunk_starts + batch.chunk_sizes
        if tree is not None:
            width = plan.tier.steps + 1
            accepted = accept_path(
                choices[: tree.tokens.numel()].view_as(tree.tokens), tree, width, limits
            )
            path = accepted.path
            along = choices[: tree.tokens.numel()].view_as(tree.tokens).gather(1, path)
            tokens = torch.cat([along, tokens.expand(-1, width)])
            lengths = torch.cat([accepted.lengths, lengths])
            if plan.tier.top_k > 1:
                base = roots.positions[:, None]
                self.pool.move(roots.pages, base + path, base + self._count(width))
            tables.committed[roots.rows] += accepted.lengths + 1
        tables.roots[batch.rows] = tokens.gather(1, lengths[:, None])[:, 0].clamp(min=0)
        return Emitted(lengths, tokens, path, None)

    def extend(self, batch: Batch, drafted: Drafted, verified: Verified, emitted: Emitted) -> None:
        """Feed the drafter what was committed: each token with the feature before it."""
        (roots, tree, replay), features = drafted, verified.features
        if features is None:
            return
        trees, chosen = batch.trees, emitted.tokens.clamp(min=0)
        lessons, nodes = [], 0
        if tree is not None and emitted.path is not None:
            inputs = [chosen[:trees], emitted.path, emitted.lengths[:trees]]
            if replay is not None and replay.extend is not None:
                inputs = [padded(x, len(roots.rows)) for x in inputs]
                replay.extend(roots.rows, roots.pages, roots.positions, features, *inputs)
                return
            nodes = tree.tokens.numel()
            known = roots.rows, roots.pages, roots.positions, features
            lessons.append(self._tree_lesson(batch.plan.tier, *known, *inputs))
        if batch.plan.chunks:
            lessons.append(self._chunk_lesson(batch, features[nodes:], chosen[trees:, 0]))
        self._teach(lessons)

    def learn(self, tier: Tier, *inputs: Tensor) -> Tensors:
        """:meth:`extend` over trees alone; a trace wants an output."""
        self._teach([self._tree_lesson(tier, *inputs)])
        return inputs[:1]

    def _teach(self, lessons: list[Lesson]) -> None:
        assert self.drafter is not None
        lesson = lessons[0]
        for behind in lessons[1:]:
            lesson = Lesson(
                torch.cat([lesson.tokens, behind.tokens]),
                torch.cat([lesson.features, behind.features]),
                torch.cat([lesson.positions, behind.positions]),
                join([lesson.attend, behind.attend]),
                torch.cat([lesson.rows, behind.rows]),
                torch.cat([lesson.last, behind.last + len(lesson.tokens)]),
            )
        self.drafter.extend(*lesson)

    def _tree_lesson(
        self,
        tier: Tier,
        rows: Tensor,
        pages: Tensor,
        roots: Tensor,
        features: Tensor,
        tokens: Tensor,
        path: Tensor,
        lengths: Tensor,
    ) -> Lesson:
        """What the trees committed: ``tokens``, ``path`` and ``lengths`` as in :class:`Emitted`."""
        assert self.draft_pool is not None
        batch, width = tokens.shape
        slots = roots[:, None] + 1 + self._count(width)
        place = self._within(slots)
        each = self._count(batch)[:, None]
        along = features[(each * tier.nodes + path).flatten()]
        self._keep_features(rows[:, None].expand(-1, width).flatten(), (slots - 1).flatten(), along)
        attend = self.draft_pool.attend(pages, slots, roots + 1, place, None)
        last = each[:, 0] * width + lengths
        return Lesson(tokens.flatten(), along, place.flatten(), attend, rows, last)

    def _chunk_lesson(self, batch: Batch, own: Tensor, chosen: Tensor) -> Lesson:
        """What the chunks committed; ``own``: their features, ``chosen``: their first tokens."""
        assert self.draft_pool is not None
        following = batch.extend_tokens.clone()
        following[batch.chosen] = chosen
        before = torch.cat([self.page_features[batch.chunk_pages], own])[batch.extend_features]
        self._keep_features(batch.token_rows, batch.positions, own)
        positions = self._within(batch.extend_positions)
        attend = join(self._chunk_parts(batch, self.draft_pool, chosen=True))
        return Lesson(following, before, positions, attend, batch.final_rows, batch.chosen)

    def _keep_features(self, rows: Tensor, positions: Tensor, features: Tensor) -> None:
        """Keep the feature of every page's last token, for who starts behind that page.

        Tokens that a tree rejected write to pages that are not full yet, and are overwritten.
        """
        size = self.pool.page_size
        page = self.tables.pages[rows, positions // size]
        ends = (positions + 1) % size == 0
        self.page_features[torch.where(ends, page, 0)] = features

    def count_output(self, batch: Batch, emitted: Emitted, needs: Needs) -> None:
        """Enter the emitted tokens into the penalties' counts."""
        if needs.penalised:
            self.tables.count_output(batch.rows, emitted.tokens, emitted.lengths)

    def _nodes(self, batch: Batch, drafted: Drafted) -> Nodes:
        rows = batch.final_rows
        positions = batch.positions[batch.last] + 1
        if drafted.tree is not None:
            after = drafted.roots.positions[:, None] + drafted.tree.depths + 1
            rows = torch.cat([drafted.roots.rows.repeat_interleave(after.shape[1]), rows])
            positions = torch.cat([after.flatten(), positions])
        return Nodes(rows, positions, drafted.tree)

    def _chunk_parts(self, batch: Batch, pool: KVPool, chosen: bool = False) -> list[PagedAttend]:
        """Causal attention of each chunk; ``chosen``: with the token to be chosen behind it."""
        parts, first = [], 0
        slots = batch.extend_positions if chosen else batch.positions
        pages = self.tables.pages[batch.chunk_rows, : self._visible(batch.plan)]
        for index, chunk in enumerate(batch.plan.chunks):
            here = slice(first, first + len(chunk.tokens) + (chosen and chunk.final))
            parts.append(
                pool.attend(
                    pages[index : index + 1],
                    slots[None, here],
                    batch.chunk_starts[index : index + 1],
                    self._within(slots[None, here]),
                    None,
                )
            )
            first = here.stop
        return parts

    def _visible(self, plan: StepPlan) -> int:
        """Columns of the page tables that a step reads: all of them where shapes are recorded."""
        columns = self.tables.pages.shape[1]
        if self.device.type == "cuda":
            return columns
        return min(-(-plan.max_keys // self.pool.page_size), columns)

    @property
    def _feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers if self.drafter is not None else ()

    def _within(self, positions: Tensor) -> Tensor:
        """Positions inside the context; what lies behind it is drafted in vain."""
        return positions.clamp(max=self.last_position)

    def _count(self, end: int) -> Tensor:
        return torch.arange(end, device=self.device)
