"""Free pages of the caches. Target and drafter share page numbers."""

from __future__ import annotations

from collections import deque


class PageAllocator:
    """Hands out pages 1 .. ``pages`` - 1; page 0 is nobody's.

    ``in_use + free == pages - 1`` always.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages - 1
        self._free = deque(range(1, pages))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return len(self._used)

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` pages; the caller has checked that so many are free."""
        pages = tuple(self._free.popleft() for _ in range(count))
        self._used.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Free ``pages``; KeyError if one is not in use."""
        for page in pages:
            self._used.remove(page)
            self._free.append(page)
