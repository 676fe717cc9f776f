"""Which part of a model one rank of tensor parallelism holds (Megatron-LM, arXiv 1909.08053).

Heads, keys' heads, the feed-forward's channels and the vocabulary are cut into equal runs, one a
rank; norms, biases of sums and the router of experts are whole on every rank. Where there are more
ranks than heads of keys, several ranks hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Part number ``rank`` of ``size``; the whole by default."""

    rank: int = 0
    size: int = 1

    def part(self, count: int) -> int:
        """How many of ``count`` this rank holds; at least one."""
        return max(1, count // self.size)

    def run(self, count: int) -> tuple[int, int]:
        """The first of ``count`` that this rank holds, and how many."""
        return self.rank * count // self.size, self.part(count)

    def padded_part(self, count: int) -> int:
        """Rows of a rank, where the last rank's are filled up."""
        return -(-count // self.size)

    def padded_run(self, count: int) -> tuple[int, int]:
        """The first of ``count`` rows that this rank holds, and how many of its own are real."""
        own = self.padded_part(count)
        first = min(self.rank * own, count)
        return first, min(own, count - first)


WHOLE = Shard()
