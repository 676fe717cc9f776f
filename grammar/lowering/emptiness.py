"""Whether a shape is surely empty."""

from __future__ import annotations

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.dfa import TooLargeError
from overlap_spec.grammar.lowering.intersect import SchemaOracle, member
from overlap_spec.grammar.lowering.shapes import (
    Arrays,
    Numbers,
    Objects,
    Shape,
    Strings,
    all_of,
)
from overlap_spec.grammar.lowering.strings import automaton

_FEW = 64


def shape_is_empty(shape: Shape, oracle: SchemaOracle) -> bool:
    """Whether a shape is empty; False if that is expensive to decide."""
    if isinstance(shape, Numbers):
        return _numbers(shape, oracle)
    if isinstance(shape, Strings):
        return _strings(shape)
    if isinstance(shape, Arrays):
        return _arrays(shape, oracle)
    if isinstance(shape, Objects):
        return any(oracle.is_empty(member(shape, name, oracle)) for name in shape.required)
    return False


def _numbers(shape: Numbers, oracle: SchemaOracle) -> bool:
    if shape.bounds.is_empty:
        return True
    low, high = shape.bounds.integers()
    if not shape.whole or low is None or high is None or high - low > _FEW:
        return False
    return not any(oracle.holds(shape, str(value)) for value in range(low, high + 1))


def _strings(shape: Strings) -> bool:
    if len(shape.patterns) + len(shape.without) + len(shape.outside) == 0:
        return False
    if len(shape.patterns) == 1 and not shape.without and not shape.outside:
        return False
    try:
        return automaton(shape).is_empty
    except (GrammarError, TooLargeError):
        return False


def _arrays(shape: Arrays, oracle: SchemaOracle) -> bool:
    places = [*shape.prefix[: shape.least]]
    if shape.least > len(shape.prefix):
        places.append(shape.rest)
    if any(map(oracle.is_empty, places)):
        return True
    items = [*shape.prefix, shape.rest]
    return any(
        one.least > 0
        and all(oracle.is_empty(all_of(item, one.item)) for item in items[one.start :])
        for one in shape.contains
        if one.start <= len(shape.prefix)
    )
