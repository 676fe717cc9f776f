"""Number shapes as expressions or automata."""

from __future__ import annotations

from decimal import Decimal

from overlap_spec.grammar.automata import dfa
from overlap_spec.grammar.automata.dfa import Dfa, Move, TooLargeError
from overlap_spec.grammar.automata.regex import parse
from overlap_spec.grammar.automata.regex_ast import Node
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.numbers import INTEGER, Bounds, decimal_regex, integer_regex
from overlap_spec.grammar.lowering.shapes import Numbers

_MOST_VALUES = 4096
_MOST_DIGITS = 64
# About 15 significant digits, as in `numbers`.
_PLAIN = (
    r"-?(0|[1-9][0-9]*|0\.[0-9]{1,15}|[1-9][0-9]{0,6}\.[0-9]{1,8}|[1-9][0-9]{7,11}\.[0-9]{1,3})"
)
_INTEGRAL = r"-?[0-9]+(\.0+)?"


# One form for each number.
_ONCE = r"(0|-?[1-9][0-9]*|-?(0|[1-9][0-9]*)\.[0-9]*[1-9])"


def number_language(shape: Numbers, path: str, once: bool = False) -> Node | Dfa | list[str] | None:
    """The written forms of a shape's numbers: an expression, an automaton, or a list; None if
    there are none.

    Args:
        once: Write each number in one form.

    Raises:
        Refusal: a `multipleOf` needs too large an automaton, or a bound has too many digits.
    """
    bounds = shape.bounds
    _check_digits(bounds, path)
    plain = not shape.steps and not shape.not_steps and not shape.outside
    # Whole numbers have one form anyway.
    if plain and shape.whole is not False and (shape.whole or not once):
        regex = _regex(bounds, shape.whole, exponents=True)
        return None if regex is None else parse(regex)
    try:
        made = _automaton(shape)
        if made is not None and once:
            made = dfa.both(made, dfa.from_node(parse(_ONCE)))
    except TooLargeError as error:
        values = _listed(shape)
        if values is None:
            raise keywords.refusal("multipleOf", path, "needs too large an automaton") from error
        return [str(value) for value in values] or None
    return None if made is None or made.is_empty else made


def _check_digits(bounds: Bounds, path: str) -> None:
    # Each digit of a bound is a group inside that of the one before it.
    low = "minimum", bounds.low, bounds.open_low, 1
    high = "maximum", bounds.high, bounds.open_high, -1
    for keyword, bound, is_open, side in (low, high):
        if bound is None:
            continue
        # The numbers away from zero begin at the next whole one.
        whole, _, fraction = f"{bound.copy_abs():f}".partition(".")
        first = int(whole) + (is_open and bound * side > 0)
        digits = len(str(first).rstrip("0")) + len(fraction)
        if digits > _MOST_DIGITS:
            named = f"exclusive{keyword.title()}" if is_open else keyword
            reason = f"has {digits} digits: bounds of up to {_MOST_DIGITS} are supported"
            raise keywords.refusal(named, path, reason)


def _regex(bounds: Bounds, whole: bool | None, exponents: bool = False) -> str | None:
    if not whole:
        return decimal_regex(bounds, exponents)
    return INTEGER if bounds.is_free else integer_regex(*bounds.integers())


def _automaton(shape: Numbers) -> Dfa | None:
    # Without an exponent, a value has one form up to trailing zeros after the point.
    free = shape.bounds.is_free and not shape.whole
    regex = _PLAIN if free else _regex(shape.bounds, shape.whole)
    if regex is None:
        return None
    found = dfa.from_node(parse(regex))
    if shape.whole is False:
        found = dfa.both(found, dfa.neither(dfa.from_node(parse(_INTEGRAL))))
    for value in shape.outside:
        found = dfa.both(found, dfa.neither(dfa.from_node(parse(_spellings(value)))))
    for step in shape.steps:
        found = dfa.both(found, multiples(step))
    for step in shape.not_steps:
        found = dfa.both(found, dfa.neither(multiples(step)))
    return found


def _spellings(value: Decimal) -> str:
    whole, _, fraction = f"{abs(value):f}".partition(".")
    fraction = fraction.rstrip("0")
    sign = "-?" if value == 0 else "-" if value < 0 else ""
    return f"{sign}{whole}\\.{fraction}0*" if fraction else f"{sign}{whole}(\\.0+)?"


def multiples(step: Decimal) -> Dfa:
    """An automaton for decimals without exponent that are multiples of a step.

    With the step m/10^k, it tracks the digits, read as one integer, modulo m, and counts the
    digits after the point up to k; any further digit is 0.
    """
    plain = step.normalize()
    places = max(-int(plain.as_tuple().exponent), 0)
    unit = int(plain.scaleb(places))
    if unit * (places + 2) > dfa.MOST_STATES:
        raise TooLargeError
    # State 0 is the start, 1 is after the sign. Layer 0 is before the point, layer n + 1 has n
    # digits after it; in a layer, the state is the number modulo m.
    layers = [2 + unit * n for n in range(places + 2)]
    rows: list[list[Move]] = [[(0x2D, 0x2D, 1), *_digits(0, unit, layers[0])]]
    rows.append(_digits(0, unit, layers[0]))
    final = [False, False]
    for n, layer in enumerate(layers):
        for rest in range(unit):
            if n == 0:
                row = [(0x2E, 0x2E, layers[1] + rest), *_digits(rest, unit, layer)]
            elif n <= places:
                row = _digits(rest, unit, layers[n + 1])
            else:
                row = [] if rest else [(0x30, 0x30, layer)]
            rows.append(row)
            final.append(rest * 10 ** (places - max(n - 1, 0)) % unit == 0)
    return dfa.minimal(Dfa(tuple(tuple(row) for row in rows), tuple(final)))


def _digits(rest: int, unit: int, layer: int) -> list[Move]:
    return [(0x30 + d, 0x30 + d, layer + (rest * 10 + d) % unit) for d in range(10)]


def _listed(shape: Numbers) -> list[int] | None:
    """The numbers, if they are a few integers; else None."""
    low, high = shape.bounds.integers()
    if len(shape.steps) != 1 or shape.not_steps or shape.whole is False or shape.outside:
        return None
    step = shape.steps[0]
    if low is None or high is None or step != int(step) or (high - low) // step > _MOST_VALUES:
        return None
    return list(range(-(-low // int(step)) * int(step), high + 1, int(step)))
