"""Which tokens of prompts a step computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from overlap_spec.scheduler.pages import PageAllocator
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.shares import Turns
from overlap_spec.steps import Chunk


class Prefill:
    """Shares the prompt tokens of a step, at most ``chunk_tokens``, out to the sequences that have
    some left, whose ``pages`` these are."""

    def __init__(self, chunk_tokens: int, pages: PageAllocator) -> None:
        self._chunk_tokens, self._pages, self._passes = chunk_tokens, pages, Turns()

    def chunks(
        self, prefilling: list[Sequence], grow: Callable[[Sequence, int], bool]
    ) -> Iterator[tuple[Sequence, Chunk]]:
        """The chunks of a step, of sequences that hold the pages for them; those admitted first
        come first. ``grow`` gets a sequence its pages for so many tokens, and may take the row of
        another one; False where that has to wait."""
        room = self._chunk_tokens
        for sequence, share in self._in_turn(prefilling):
            if not share or sequence.row < 0:
                continue
            self._pages.begin(sequence)
            chunk = self._chunk(sequence, share, room)
            if chunk is None:
                continue
            if not grow(sequence, chunk.end):
                break
            if chunk.behind:
                self._passes.took(sequence.request.holder)
                room -= chunk.behind
            yield sequence, sequence.asking(chunk)

    def _in_turn(self, prefilling: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Sequences with their shares of the step, those first whose holder's passes behind prompts
        come first."""
        each = list(zip(prefilling, self._shares(prefilling), strict=True))
        passing = {s.request.holder for s in prefilling if s.passing is not None}
        if len(passing) > 1:
            first = self._passes.first(sorted(passing))
            each.sort(key=lambda pair: pair[0].request.holder != first)
        return each

    def _shares(self, prefilling: list[Sequence]) -> list[int]:
        """Prompt tokens of a step for each, in their order: the one with the least left goes first.

        Half of the step is for the one admitted first as long as it needs it, so that short
        prompts, which would wait for a long one, neither do so nor keep it from its end.
        """
        left, size = self._chunk_tokens, self._pages.size
        needed = [s.prefill_tokens - s.planned_tokens for s in prefilling]
        if sum(needed) <= left:
            return needed
        cached = [len(self._pages.known(s)) * size for s in prefilling]
        needed = [n - known for n, known in zip(needed, cached, strict=True)]
        kept = min(needed[0], max(left // 2, size))
        shares = [0] * len(needed)
        for index in sorted(range(len(needed)), key=needed.__getitem__):
            if index == 0:
                kept = 0
            share = min(needed[index], left - kept)
            if share < needed[index]:
                share -= share % size
            shares[index] = share
            left -= share
        return shares

    def _chunk(self, sequence: Sequence, budget: int, room: int) -> Chunk | None:
        """The next tokens to prefill: all, or full pages of them; None if not one page fits, or
        the pass behind them has to wait: ``room`` slots are left in the step to such passes."""
        start, size = sequence.planned_tokens, self._pages.size
        end, part, behind, final = sequence.prefill_tokens, sequence.passing, 0, True
        if part is not None and end - start <= budget:
            before = (end - 1) // size * size
            if part.passes > 1 and before > start:
                # Of what comes again with each pass, no more than a page.
                budget = before - start
            else:
                behind, final = part.next_behind, part.passes == 1
                if behind is None or (behind > room and room != self._chunk_tokens):
                    return None
        if end - start > budget:
            end = start + budget // size * size
            if end == start:
                return None
            final = False
        tokens = np.array(sequence.tokens(start, end), np.int64)
        page_before = sequence.pages[start // size - 1] if start else 0
        return Chunk(sequence.row, start, tokens, final, page_before, behind)
