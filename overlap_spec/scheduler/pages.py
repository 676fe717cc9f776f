"""Free pages of the caches. Target and drafter share page numbers."""

from __future__ import annotations

from collections.abc import Iterable

from overlap_spec.scheduler.prefix import PrefixTree


class PageAllocator:
    """Hands out pages 1 .. ``pages`` - 1; page 0 belongs to no request.

    Pages that only the prefix tree keeps count as free: they are evicted when they are needed.
    ``in_use + free == pages - 1`` always. What was freed last is handed out first, and a page that
    never was in use last of all: on a CPU the caches' memory is taken as pages are first written.

    Attributes:
        total: Pages that can be handed out.
        touched: Pages that ever were.
    """

    def __init__(self, pages: int, tree: PrefixTree) -> None:
        self.total = pages - 1
        self.touched = 0
        self.tree = tree
        self._freed: list[int] = []
        self._used: set[int] = set()

    @property
    def free_count(self) -> int:
        return self._unused + self.tree.idle_pages

    @property
    def in_use(self) -> int:
        return len(self._used) - self.tree.idle_pages

    @property
    def _unused(self) -> int:
        return len(self._freed) + self.total - self.touched

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` pages; the caller has checked that so many are free."""
        self.free(self.tree.evict(count - self._unused))
        again = min(count, len(self._freed))
        fresh = range(self.touched + 1, self.touched + 1 + count - again)
        self.touched += len(fresh)
        pages = (*(self._freed.pop() for _ in range(again)), *fresh)
        self._used.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Free ``pages``; KeyError if one is not in use."""
        for page in pages:
            self._used.remove(page)
            self._freed.append(page)
