"""Figures of samples: percentiles, spreads, ratios of neighbours in time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean as mean
from statistics import median
from typing import Any

__all__ = ["mean", "median", "paired", "percentile", "rounded", "spread"]


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which ``percent`` of 100 lie, linear between neighbours.

    Raises:
        ValueError: no values, or a percent outside 0 to 100.
    """
    ordered = sorted(values)
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(ordered)} values")
    at = (len(ordered) - 1) * percent / 100
    low, share = math.floor(at), at % 1
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * share


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least, most and count of a figure over its repetitions."""
    ordered = sorted(values)
    return {"median": median(ordered), "min": ordered[0], "max": ordered[-1], "n": len(ordered)}


def paired(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Spread of ``values[i] / base[i]``: of two things measured in turn in one run.

    The pairs cancel what a noisy machine does to both.

    Raises:
        ValueError: not one base each.
    """
    return spread(value / other for value, other in zip(values, base, strict=True))


def rounded(value: Any, digits: int = 5) -> Any:
    """Plain data with its floats at so many significant digits: what a record shows."""
    if isinstance(value, float) and value and math.isfinite(value):
        return round(value, digits - 1 - math.floor(math.log10(abs(value))))
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value
