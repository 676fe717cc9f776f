"""Counts of values by size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np


class Buckets:
    """Counts values in buckets; many at once in a time that hardly depends on how many.

    Args:
        ends: Largest value of each bucket, ascending; one more bucket has what is beyond.

    Attributes:
        counts: Values in each bucket.
        sum: Of all values.
    """

    def __init__(self, ends: Sequence[float]) -> None:
        self.ends, self.counts = tuple(ends), [0] * (len(ends) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count one value, ``count`` times."""
        self.counts[bisect_left(self.ends, value)] += count
        self.sum += value * count

    def add_all(self, values: Sequence[float]) -> None:
        """Count many values."""
        array = np.asarray(values, dtype=np.float64)
        places = np.searchsorted(self.ends, array)
        found = np.bincount(places, minlength=len(self.counts)).tolist()
        self.counts = [old + new for old, new in zip(self.counts, found, strict=True)]
        self.sum += float(array.sum())
