"""Regular expressions for JSON numbers within bounds.

Numbers on one side of zero are written as free ones are. Beside any other bound they have no
exponent, and at most 17 significant digits; where such a bound is exclusive about 15: a reader
would round longer ones, possibly onto the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

INTEGER = "(0|-?[1-9][0-9]*)"
# Two digits of exponent keep every value finite in a double.
_EXPONENT = r"([eE][+\-]?[0-9]{1,2})?"
_NOT_NEGATIVE = rf"(0|[1-9][0-9]*)(\.[0-9]+)?{_EXPONENT}"
# With so few zeros before its digits, and such an exponent, no number is rounded to 0.
_POSITIVE = rf"(0\.0{{0,15}}[1-9][0-9]*|[1-9][0-9]*(\.[0-9]+)?){_EXPONENT}"
NUMBER = rf"-?{_NOT_NEGATIVE}"

_FRACTION_DIGITS = 15
# What a double is written with.
_CLOSED_DIGITS = 17


@dataclass(frozen=True)
class Bounds:
    """An interval; None means no bound on that side."""

    low: Decimal | None = None
    high: Decimal | None = None
    open_low: bool = False
    open_high: bool = False

    @property
    def is_free(self) -> bool:
        """Whether there is no bound."""
        return self.low is None and self.high is None

    @property
    def is_empty(self) -> bool:
        """Whether the interval is empty."""
        if self.low is None or self.high is None:
            return False
        touching = self.low == self.high and (self.open_low or self.open_high)
        return self.low > self.high or touching

    def integers(self) -> tuple[int | None, int | None]:
        """The least and the greatest integer inside; None means no bound."""
        low = high = None
        if self.low is not None:
            low = int(self.low.to_integral_value("ROUND_CEILING"))
            low += self.open_low and low == self.low
        if self.high is not None:
            high = int(self.high.to_integral_value("ROUND_FLOOR"))
            high -= self.open_high and high == self.high
        return low, high

    def both(self, other: Bounds) -> Bounds:
        """What is inside this one and another."""
        low, open_low = _tighter((self.low, self.open_low), (other.low, other.open_low), max)
        high, open_high = _tighter((self.high, self.open_high), (other.high, other.open_high), min)
        return Bounds(low, high, open_low, open_high)

    def negated(self) -> Bounds:
        """The interval of the negated numbers."""
        return Bounds(
            None if self.high is None else -self.high,
            None if self.low is None else -self.low,
            self.open_high,
            self.open_low,
        )


def _tighter(
    a: tuple[Decimal | None, bool],
    b: tuple[Decimal | None, bool],
    best: Callable[[Decimal, Decimal], Decimal],
) -> tuple[Decimal | None, bool]:
    if a[0] is None or b[0] is None:
        return b if a[0] is None else a
    if a[0] == b[0]:
        return a[0], a[1] or b[1]
    return a if best(a[0], b[0]) == a[0] else b


def integer_regex(low: int | None, high: int | None) -> str | None:
    """A regex for integers from `low` to `high`, both included; None if there are none."""
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        part = _natural(least, None if low is None else -low)
        parts += [f"-{part}"] if part else []
    if high is None or high >= 0:
        part = _natural(max(low or 0, 0), high)
        parts += [part] if part else []
    return f"({'|'.join(parts)})" if parts else None


def decimal_regex(bounds: Bounds, exponents: bool = True) -> str | None:
    """A regex for numbers inside the bounds; None if there are none.

    Args:
        exponents: Whether numbers may have one, where the bounds allow to tell their size.
    """
    if bounds.is_free:
        return NUMBER
    if bounds.is_empty:
        return None
    if exponents and bounds.low == 0 and bounds.high is None:
        return _POSITIVE if bounds.open_low else _NOT_NEGATIVE
    if exponents and bounds.high == 0 and bounds.low is None:
        return f"-{_POSITIVE}" if bounds.open_high else f"(-{_POSITIVE}|0(\\.0+)?)"
    parts = []
    # Nothing is rounded onto zero.
    is_open = (bounds.open_low and bounds.low != 0) or (bounds.open_high and bounds.high != 0)
    digits = _FRACTION_DIGITS if is_open else _CLOSED_DIGITS
    mirrored = bounds.negated()
    if mirrored.high is None or mirrored.high > 0:
        part = _nonnegative(mirrored.both(Bounds(Decimal(0), open_low=True)), digits)
        parts += [f"-{part}"] if part else []
    if bounds.high is None or bounds.high > 0 or (bounds.high == 0 and not bounds.open_high):
        part = _nonnegative(bounds, digits)
        parts += [part] if part else []
    return f"({'|'.join(parts)})" if parts else None


def _natural(low: int, high: int | None) -> str | None:
    """A regex for the natural numbers from low to high."""
    if high is None:
        if low == 0:
            return "(0|[1-9][0-9]*)"
        width = len(str(low))
        same = _same_width(str(low), "9" * width)
        return f"({same}|[1-9][0-9]{{{width},}})"
    if low > high:
        return None
    parts = []
    for width in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (width - 1) if width > 1 else 0)
        last = min(high, 10**width - 1)
        parts.append(_same_width(str(first), str(last)))
    return f"({'|'.join(parts)})"


def _same_width(low: str, high: str) -> str:
    """A regex for digit strings between two of equal length."""
    if not low:
        return ""
    if low[0] == high[0]:
        return low[0] + _same_width(low[1:], high[1:])
    width = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:] != "0" * width:
        parts.append(low[0] + _same_width(low[1:], "9" * width))
        first += 1
    if high[1:] != "9" * width:
        parts.append(high[0] + _same_width("0" * width, high[1:]))
        last -= 1
    if first <= last:
        parts.append(_digits(first, last) + (f"[0-9]{{{width}}}" if width else ""))
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _digits(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _split(value: Decimal) -> tuple[int, str]:
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _nonnegative(bounds: Bounds, digits: int) -> str | None:
    """A regex for non-negative decimals of so many digits inside the bounds."""
    bounds = bounds.both(Bounds(Decimal(0)))
    if bounds.is_empty or bounds.low is None:
        return None
    low, low_fraction = _split(bounds.low)
    # A whole number that is inside is one of those between the bounds.
    is_inside = not low_fraction and not bounds.open_low
    first = low + (not is_inside)
    if bounds.high is None:
        parts = [_with_fraction(_natural(first, None), "", "", False, None, digits)]
        if not is_inside:
            parts.append(_with_fraction(str(low), low_fraction, "", bounds.open_low, None, digits))
    else:
        high, high_fraction = _split(bounds.high)
        if low == high:
            return _with_fraction(
                str(low), low_fraction, high_fraction, bounds.open_low, bounds.open_high, digits
            )
        parts = [
            _with_fraction(_natural(first, high - 1), "", "", False, None, digits),
            _with_fraction(str(high), "", high_fraction, False, bounds.open_high, digits),
        ]
        if not is_inside:
            parts.append(_with_fraction(str(low), low_fraction, "", bounds.open_low, None, digits))
    kept = [part for part in parts if part]
    return f"({'|'.join(kept)})" if kept else None


def _with_fraction(
    whole: str | None, low: str, high: str, open_low: bool, open_high: bool | None, digits: int
) -> str | None:
    """`whole` with fractions between two; `open_high` None means up to the next integer."""
    if whole is None:
        return None
    before = 0 if whole == "0" else len(whole) if whole.isdigit() else 1
    room = max(digits - before, len(low), len(high), 1)
    fraction = _fraction(low, None if open_high is None else high, open_low, bool(open_high), room)
    bare = not low and not open_low and not (open_high and not high)
    if fraction is None:
        return whole if bare else None
    return f"{whole}(\\.{fraction}){'?' if bare else ''}"


def _fraction(low: str, high: str | None, open_low: bool, open_high: bool, room: int) -> str | None:
    """A regex for digits d with 0.low ≤ 0.d ≤ 0.high, at least one; None if there are none."""
    if room == 0:
        return None
    first = int(low[0]) if low else 0
    last = 9 if high is None else int(high[0]) if high else 0
    if first > last:
        return None
    parts = []
    inner_first, inner_last = first, last
    if low or open_low:
        inner_first += 1
        upper = high[1:] if high and first == last else ("" if high == "" else None)
        parts.append(_continued(first, low[1:], upper, open_low, open_high, room))
    if high is not None and (first != last or not (low or open_low)):
        inner_last -= 1
        lower = low[1:] if first == last else ""
        parts.append(_continued(last, lower, high[1:], False, open_high, room))
    if inner_first <= inner_last:
        tail = f"[0-9]{{0,{room - 1}}}" if room > 1 else ""
        parts.append(_digits(inner_first, inner_last) + tail)
    kept = [part for part in parts if part]
    return f"({'|'.join(kept)})" if kept else None


def _continued(
    digit: int, low: str, high: str | None, open_low: bool, open_high: bool, room: int
) -> str | None:
    """A digit on a bound: the last one, or followed by more."""
    may_end = not low and not open_low and not (high == "" and open_high)
    more = _fraction(low, high, open_low, open_high, room - 1)
    if more is None:
        return str(digit) if may_end else None
    return f"{digit}{more}{'?' if may_end else ''}"
