"""Pages of the caches: which are free, and which a sequence holds. Target and drafter share page
numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from overlap_spec.scheduler.prefix import Node, PrefixTree
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.steps import Chunk

Grant = tuple[int, int, tuple[int, ...]]


class PageAllocator:
    """Hands out pages 1 .. ``pages`` - 1, to sequences for their keys and the window behind them;
    page 0 belongs to no request.

    Pages that only the prefix tree keeps count as free: they are evicted when they are needed.
    ``in_use + free == pages - 1`` always. What was freed last is handed out first, and a page that
    never was in use last of all: on a CPU the caches' memory is taken as pages are first written.

    Args:
        pages: Of the caches, page 0 included.
        tree: Of pages for prompts that start alike, if these are kept (``reuse``).
        reserve_tokens: Slots after its committed length that a running sequence owns.

    Attributes:
        total, touched: Pages that can be handed out, and that ever were.
        longest: Tokens of the longest sequence that can run at all.
        size: Slots of a page, in tokens.
        granted: Pages of rows that no plan has told of yet, as :attr:`StepPlan.pages` has them.
        untrusted: Pages freed since the last plan that may hold what is no number.
    """

    def __init__(
        self, pages: int, tree: PrefixTree, reserve_tokens: int = 0, reuse: bool = True
    ) -> None:
        self.total, self.touched, self.size = pages - 1, 0, tree.page_size
        self.tree, self._reserve_tokens, self._reuse = tree, reserve_tokens, reuse
        self.longest = self.total * self.size - reserve_tokens
        self.granted: list[Grant] = []
        self.untrusted: list[int] = []
        self._freed: list[int] = []
        self._used: set[int] = set()

    @property
    def in_use(self) -> int:
        return len(self._used) - self.tree.idle_pages

    @property
    def free_count(self) -> int:
        return self.total - self.in_use

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` pages; the caller has checked that so many are free."""
        self.free(self.tree.evict(count - (self.total - len(self._used))))
        again = min(count, len(self._freed))
        fresh = range(self.touched + 1, self.touched + 1 + count - again)
        self.touched += len(fresh)
        pages = (*(self._freed.pop() for _ in range(again)), *fresh)
        self._used.update(pages)
        return pages

    def free(self, pages: Iterable[int], untrusted: bool = False) -> None:
        """Free ``pages``; KeyError if one is not in use."""
        for page in pages:
            self._used.remove(page)
            self._freed.append(page)
            if untrusted:
                self.untrusted.append(page)

    def needed(self, tokens: int) -> int:
        """Pages of a sequence with so many keys."""
        return -(-(tokens + self._reserve_tokens) // self.size)

    def give(self, sequence: Sequence, count: int) -> None:
        """Give a sequence more pages; the caller has checked that so many are free."""
        pages = self.take(count)
        self.granted.append((sequence.row, len(sequence.pages), pages))
        sequence.pages += pages

    def known(self, sequence: Sequence) -> list[Node]:
        """Pages with the first tokens of a sequence that has not begun, behind which it can."""
        if not self._reuse or sequence.planned_tokens or sequence.pages:
            return []
        tokens = sequence.tokens(0, sequence.reusable_tokens)
        alike = self.tree.find(tokens, sequence.request.page_salt)
        sequence.branch_tokens = len(alike) * self.size
        return self.tree.start(alike)

    def begin(self, sequence: Sequence) -> None:
        """Before its first chunk: let a sequence start after pages that hold its first tokens."""
        path = self.known(sequence)
        if path:
            if self.tree.has_states:
                sequence.start = path[-1]
                sequence.start.starting += 1
            self.tree.acquire(path)
            sequence.path = path
            sequence.pages = [node.page for node in path]
            self.granted.append((sequence.row, 0, tuple(sequence.pages)))
            sequence.planned_tokens = sequence.committed_tokens = len(path) * self.size
            sequence.stats.cached_tokens = sequence.planned_tokens

    def offer(self, sequence: Sequence, tokens: int) -> None:
        """Let others start after the sequence's first ``tokens`` tokens, from the next step on."""
        if self._reuse:
            known, salt = sequence.tokens(0, tokens), sequence.request.page_salt
            self.tree.insert(known, sequence.pages, sequence.path, salt)

    def with_states(self, sequence: Sequence, chunk: Chunk, step: int) -> Chunk:
        """A chunk of ``step`` that is planned, told from which states it starts, and which of them
        are kept: those behind the last page after which the same prompt can start, and those where
        the prompts of others went another way."""
        if not self.tree.has_states:
            return chunk
        start, last = self._begun(sequence), (sequence.prefill_tokens - 1) // self.size
        kept = []
        for page in sorted({sequence.branch_tokens // self.size, last}):
            behind = page * self.size - chunk.start
            if 0 < behind <= len(chunk.tokens) and page <= len(sequence.path):
                slot = self.tree.keep(sequence.path[page - 1], step)
                kept += [] if slot is None else [(behind, slot)]
        return replace(chunk, state=start, kept=tuple(kept))

    def _begun(self, sequence: Sequence) -> int | None:
        """The slot of the states that a sequence has waited to start from, which it now does."""
        node, sequence.start = sequence.start, None
        if node is not None:
            node.starting -= 1
        return None if node is None else node.state

    def take_back(self, sequence: Sequence) -> None:
        """Take all pages from a sequence that leaves its row."""
        self.granted = [grant for grant in self.granted if grant[0] != sequence.row]
        self._begun(sequence)
        if sequence.error is None and not sequence.untrusted:
            self.offer(sequence, sequence.committed_tokens)
        shared = {node.page for node in sequence.path}
        self.free((page for page in sequence.pages if page not in shared), sequence.untrusted)
        self.free(self.tree.release(sequence.path), untrusted=True)
        sequence.pages, sequence.path = [], []

    def distrust(self, sequence: Sequence) -> None:
        """Allow no reuse of what the sequence's pages hold: it may be no numbers. Others that hold
        some of them read on; all are cleared when nobody does."""
        sequence.untrusted = True
        self.free(self.tree.detach(sequence.path), untrusted=True)

    def flush(self) -> int:
        """Forget the pages that no sequence holds; how many there were."""
        pages = self.tree.evict(self.tree.idle_pages)
        self.free(pages)
        return len(pages)
