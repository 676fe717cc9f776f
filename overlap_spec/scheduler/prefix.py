"""Prefix reuse: a tree over full pages of computed tokens, shared by target and drafter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

# The tokens of a page, behind the salt of a path's first.
Tokens = tuple[int | str, ...]


@dataclass(eq=False)
class Node:
    """One full page after its parent's.

    ``holders``: sequences on whose path it lies. ``state``: the slot of the states at its end, of
    step ``since``; None: none are kept. ``starting``: sequences that have yet to start from them.
    """

    parent: Node | None
    tokens: Tokens
    page: int
    holders: int = 0
    detached: bool = False
    state: int | None = None
    since: int = 0
    starting: int = 0
    children: dict[Tokens, Node] = field(default_factory=dict)


class PrefixTree:
    """Pages by the tokens that lead to them; each sequence holds the nodes on its path.

    A sequence that holds a node holds its ancestors, so an unheld node has no held descendant:
    evicted in the order in which they were let go, deepest first, nodes are always leaves.

    Args:
        page_size: Tokens of a page.
        slots: For states at the ends of pages, if the model has layers without keys, else None.
    """

    def __init__(self, page_size: int, slots: Iterable[int] | None = None) -> None:
        self.page_size = page_size
        self.has_states, self._slots = slots is not None, [*(slots or ())]
        # Those that have one, used longest ago first.
        self._with_state: OrderedDict[Node, None] = OrderedDict()
        self._root = Node(None, (), 0)
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def idle_pages(self) -> int:
        """Pages that no sequence holds, and that :meth:`evict` could free."""
        return len(self._idle)

    def find(self, tokens: Sequence[int], salt: str) -> list[Node]:
        """The path of the longest run of full pages that ``tokens`` start with, among those that
        were inserted with the same salt."""
        path, children = list[Node](), self._root.children
        for page in self._full_pages(tokens, salt):
            if page not in children:
                break
            path.append(children[page])
            children = path[-1].children
        return path

    def start(self, path: list[Node]) -> list[Node]:
        """The nodes of a path behind which a sequence can start: all, or those up to the last at
        whose end states are kept."""
        last = len(path)
        while self.has_states and last and path[last - 1].state is None:
            last -= 1
        if self.has_states and last:
            self._with_state.move_to_end(path[last - 1])
        return path[:last]

    def keep(self, node: Node, step: int) -> int | None:
        """A slot for the states at a node's end, which ``step`` computes; None: they are kept, or
        every slot is one that this step writes or that a sequence has yet to start from."""
        if node.state is not None or node.detached:
            return None
        if not self._slots:
            olds = (n for n in self._with_state if n.since < step and not n.starting)
            old = next(olds, None)
            if old is None:
                return None
            self._forget(old)
        node.state, node.since = self._slots.pop(), step
        self._with_state[node] = None
        return node.state

    def _forget(self, node: Node) -> None:
        """Keep no states at a node's end."""
        if node.state is not None:
            del self._with_state[node]
            self._slots.append(node.state)
            node.state = None

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
            if page not in node.children:
                node.children[page] = Node(node, page, pages[index])
            node = node.children[page]
            self.acquire([node])
            path.append(node)

    def merge(self, path: Sequence[Node], pages: Sequence[int]) -> list[int]:
        """Give the nodes of a path that its sequence alone holds, and has computed again, its own
        pages; those that this frees."""
        freed = []
        for node, own in zip(path, pages, strict=False):
            if node.page != own and node.holders == 1 and not node.detached:
                freed.append(node.page)
                node.page = own
        return freed

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
            self._forget(node)
            pages.append(node.page)
        return pages

    def detach(self, path: Sequence[Node]) -> list[int]:
        """Make these nodes, and all after them, unfindable: their content is not to be trusted; the
        pages that this frees. Others follow when their holders let go."""
        if not path or path[0].detached:
            return []
        freed, todo = [], [path[0]]
        assert todo[0].parent is not None
        del todo[0].parent.children[todo[0].tokens]
        while todo:
            node = todo.pop()
            node.detached = True
            self._forget(node)
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
