"""What a step drafted for one request, and what became of each draft, for whoever asked."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_spec.steps import Int32s, Int64s
from overlap_spec.types import MOST_TOLD_DRAFTS, Delta, DraftTree, Fate, Request
from overlap_spec.worker.extras.base import Extra, Row, Surroundings


class DraftTrees(Extra):
    """Tells of each step its drafts; nothing is drafted behind a prompt."""

    reads_rows = reads_tree = True

    def __init__(self, request: Request, engine: Surroundings) -> None:
        super().__init__(request, engine)
        self._tree: DraftTree | None = None

    @staticmethod
    def read_row(row: Row) -> DraftTree:
        """What became of each draft."""
        if row.links is None:
            return DraftTree(row.step)
        accepted = row.tokens[: row.accepted]
        return draft_tree(row.step, row.links, accepted, row.masks, row.limited)

    def take(self, told: DraftTree, kept: int) -> None:
        self._tree = told.cut(kept)

    def attach(self, delta: Delta, first: int) -> Delta:
        del first
        return delta._replace(tree=self._tree) if delta.token_ids else delta


def draft_tree(
    step: int, links: Int64s, accepted: Sequence[int], rows: Int32s | None, limited: bool
) -> DraftTree:
    """The living nodes of one tree, at most :data:`MOST_TOLD_DRAFTS`, those accepted among them;
    ``accepted``: the accepted drafts' tokens, the others as of :class:`Row`."""
    tokens, first_child, next_sibling = links.tolist()
    parents = _parents(first_child, next_sibling)
    path = _path(tokens, parents, accepted)
    living = sorted(parents)
    room = MOST_TOLD_DRAFTS - len(path)
    told = sorted([*path, *[node for node in living if node not in path][:room]])
    index = {node: i for i, node in enumerate(told)}

    def fate(node: int) -> Fate:
        parent = parents[node]
        if node in path:
            return "accepted"
        if rows is not None and (parent == 0 or not limited):
            word, bit = divmod(tokens[node], 32)
            if not (int(rows[parent, word]) >> bit) & 1:
                return "masked"
        return "late" if limited else "rejected"

    return DraftTree(
        step,
        tuple(tokens[node] for node in told),
        tuple(index.get(parents[node], -1) for node in told),
        tuple(map(fate, told)),
        len(living) - len(told),
    )


def _parents(first_child: Sequence[int], next_sibling: Sequence[int]) -> dict[int, int]:
    """Living node → its parent; parents have smaller numbers."""
    parents: dict[int, int] = {}
    for node, child in enumerate(first_child):
        while child >= 0:
            parents[child] = node
            child = next_sibling[child]
    return parents


def _path(tokens: Sequence[int], parents: dict[int, int], accepted: Sequence[int]) -> set[int]:
    """The nodes that ``accepted`` follows down from the root."""
    path, last = set(), 0
    for token in accepted:
        last = next(n for n, p in parents.items() if p == last and tokens[n] == token)
        path.add(last)
    return path
