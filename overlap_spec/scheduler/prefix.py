"""Prefix reuse: a tree over full pages of computed tokens, shared by target and drafter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# The tokens of a page, behind the salt of a path's first.
Tokens = tuple[int | str, ...]


@dataclass(eq=False)
class Node:
    """One full page after its parent's. ``holders``: sequences on whose path it lies."""

    parent: Node | None
    tokens: Tokens
    page: int
    holders: int = 0
    detached: bool = False
    children: dict[Tokens, Node] = field(default_factory=dict)


class PrefixTree:
    """Pages by the tokens that lead to them; each sequence holds the nodes on its path.

    A sequence that holds a node holds its ancestors, so an unheld node has no held descendant:
    evicted in the order in which they were let go, deepest first, nodes are always leaves.

    Args:
        page_size: Tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._root = Node(None, (), 0)
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def idle_pages(self) -> int:
        """Pages that no sequence holds, and that :meth:`evict` could free."""
        return len(self._idle)

    def find(self, tokens: Sequence[int], salt: str) -> list[Node]:
        """The path of the longest run of full pages that ``tokens`` start with, among those that
        were inserted with the same salt."""
        path, node = [], self._root
        for page in self._full_pages(tokens, salt):
            child = node.children.get(page)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def acquire(self, path: Sequence[Node]) -> None:
        """Keep nodes from being evicted until they are let go."""
        for node in path:
            node.holders += 1
            self._idle.pop(node, None)

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], path: list[Node], salt: str
    ) -> None:
        """Offer a sequence's full pages to others.

        Args:
            tokens: What ``pages`` hold, or will hold before a later step reads them.
            pages: The sequence's pages, in order. Where the tree has the same tokens already, the
                sequence keeps its own page to itself.
            path: The nodes that the sequence holds; extended by those it now holds too.
            salt: Only :meth:`find` with the same finds them.
        """
        node = path[-1] if path else self._root
        if node.detached:
            return
        # Only what is new: a long prompt is offered again behind each of its chunks.
        held = len(path)
        for index, page in enumerate(self._full_pages(tokens, salt, held), held):
            child = node.children.get(page)
            if child is None:
                child = node.children[page] = Node(node, page, pages[index])
            self.acquire([child])
            path.append(child)
            node = child

    def release(self, path: Sequence[Node]) -> list[int]:
        """Undo the holds of a path; pages of detached nodes that this frees."""
        freed = []
        for node in reversed(path):
            node.holders -= 1
            if node.holders == 0 and node.detached:
                freed.append(node.page)
            elif node.holders == 0:
                self._idle[node] = None
        return freed

    def evict(self, count: int) -> list[int]:
        """Take up to ``count`` pages out of the tree, those let go longest ago first."""
        pages: list[int] = []
        while self._idle and len(pages) < count:
            node, _ = self._idle.popitem(last=False)
            assert node.parent is not None
            assert not node.children
            del node.parent.children[node.tokens]
            pages.append(node.page)
        return pages

    def detach(self, path: Sequence[Node]) -> list[int]:
        """Make these nodes, and all after them, unfindable: their content is not to be trusted.

        Returns:
            Pages that this frees; others follow when their holders let go.
        """
        if not path or path[0].detached:
            return []
        first, freed, todo = path[0], [], [path[0]]
        assert first.parent is not None
        del first.parent.children[first.tokens]
        while todo:
            node = todo.pop()
            node.detached = True
            todo += node.children.values()
            if node in self._idle:
                del self._idle[node]
                freed.append(node.page)
        return freed

    def _full_pages(self, tokens: Sequence[int], salt: str, first: int = 0) -> Iterator[Tokens]:
        size = self.page_size
        for start in range(first * size, len(tokens) - size + 1, size):
            page = tuple(tokens[start : start + size])
            yield (salt, *page) if salt and start == 0 else page
