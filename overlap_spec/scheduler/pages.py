"""Free pages of the caches. Target and drafter share page numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from overlap_spec.scheduler.prefix import PrefixTree


class PageAllocator:
    """Hands out pages 1 .. ``pages`` - 1; page 0 belongs to no request.

    Pages that only the prefix tree keeps count as free: they are evicted when they are needed.
    ``in_use + free == pages - 1`` always.
    """

    def __init__(self, pages: int, tree: PrefixTree) -> None:
        self.total = pages - 1
        self.tree = tree
        self._free = deque(range(1, pages))
        self._used: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free) + self.tree.idle_pages

    @property
    def in_use(self) -> int:
        return len(self._used) - self.tree.idle_pages

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` pages; the caller has checked that so many are free."""
        self.free(self.tree.evict(count - len(self._free)))
        pages = tuple(self._free.popleft() for _ in range(count))
        self._used.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Free ``pages``; KeyError if one is not in use."""
        for page in pages:
            self._used.remove(page)
            self._free.append(page)
