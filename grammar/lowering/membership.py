"""Which values a shape contains: a given one, any at all, and all others: its complement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.dfa import TooLargeError
from overlap_spec.grammar.automata.regex import Pattern
from overlap_spec.grammar.lowering.intersect import member
from overlap_spec.grammar.lowering.numbers import Bounds
from overlap_spec.grammar.lowering.shapes import (
    ANY,
    BOOLEANS,
    NOTHING,
    NULL,
    Arrays,
    Consts,
    Contains,
    Document,
    Numbers,
    Objects,
    Shape,
    Strings,
    Unsupported,
    all_of,
    negated,
)
from overlap_spec.grammar.lowering.strings import automaton
from overlap_spec.grammar.schemas.source import key_of

_FEW = 64


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "number")


def contains_value(shape: Shape, value: Any, oracle: Document) -> bool:
    """Whether a shape contains a value."""
    if kind_of(value) != shape.kind:
        return False
    if isinstance(shape, Unsupported):
        return True
    if isinstance(shape, Consts):
        return key_of(value) in dict(shape.values)
    if isinstance(shape, Numbers):
        return _number(shape, value)
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return False
    if isinstance(shape, Strings):
        return _string(shape, value)
    if isinstance(shape, Arrays):
        return _array(shape, value, oracle)
    return _object(shape, value, oracle)


def _number(shape: Numbers, value: Decimal) -> bool:
    if shape.bounds.both(Bounds(value, value)).is_empty:
        return False
    if shape.whole is not None and shape.whole != (value == value.to_integral_value()):
        return False
    if value in shape.outside or any(not _divides(step, value) for step in shape.steps):
        return False
    return not any(_divides(step, value) for step in shape.not_steps)


def _divides(step: Decimal, value: Decimal) -> bool:
    quotient = value / step
    return quotient == quotient.to_integral_value() and quotient * step == value


def _string(shape: Strings, value: str) -> bool:
    if value in shape.outside:
        return False
    if not all(Pattern(pattern, "schema").matches(value) for pattern in shape.patterns):
        return False
    return not any(Pattern(pattern, "schema").matches(value) for pattern in shape.without)


def _array(shape: Arrays, value: list[Any], oracle: Document) -> bool:
    if shape.unique and len(set(map(key_of, value))) < len(value):
        return False
    items = [*shape.prefix, *[shape.rest] * max(len(value) - len(shape.prefix), 0)]
    if not all(oracle.has(expr, item) for expr, item in zip(items, value, strict=False)):
        return False
    return all(_counted(one, value, oracle) for one in shape.contains)


def _counted(one: Contains, value: list[Any], oracle: Document) -> bool:
    count = sum(oracle.has(one.item, item) for item in value[one.start :])
    return count >= one.least and (one.most is None or count <= one.most)


def _object(shape: Objects, value: dict[str, Any], oracle: Document) -> bool:
    if any(name not in value for name in shape.required):
        return False
    if not all(oracle.has(member(shape, name, oracle), held) for name, held in value.items()):
        return False
    return all(
        any(oracle.has_key(keys, name) and oracle.has(expr, held) for name, held in value.items())
        for keys, expr in shape.some
    )


def shape_is_empty(shape: Shape, oracle: Document) -> bool:
    """Whether a shape is empty; False if that is expensive to decide."""
    if isinstance(shape, Numbers):
        return _no_number(shape, oracle)
    if isinstance(shape, Strings):
        return _no_string(shape)
    if isinstance(shape, Arrays):
        return _no_array(shape, oracle)
    if isinstance(shape, Objects):
        return any(oracle.is_empty(member(shape, name, oracle)) for name in shape.required)
    return False


def _no_number(shape: Numbers, oracle: Document) -> bool:
    if shape.bounds.is_empty:
        return True
    low, high = shape.bounds.integers()
    if not shape.whole or low is None or high is None or high - low > _FEW:
        return False
    return not any(oracle.holds(shape, str(value)) for value in range(low, high + 1))


def _no_string(shape: Strings) -> bool:
    if len(shape.patterns) <= 1 and not shape.without and not shape.outside:
        return False
    try:
        return automaton(shape).is_empty
    except (GrammarError, TooLargeError):
        return False


def _no_array(shape: Arrays, oracle: Document) -> bool:
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


def complement(shape: Shape) -> Iterator[Shape]:
    """Shapes whose union is all other values of the same JSON type.

    The caller replaces fixed arrays and objects by their structure first.
    """
    match shape:
        case Unsupported():
            yield shape
        case Consts(kind, values):
            yield from _other_consts(kind, values)
        case Numbers(bounds):
            if bounds.low is not None:
                yield Numbers(Bounds(high=bounds.low, open_high=not bounds.open_low))
            if bounds.high is not None:
                yield Numbers(Bounds(low=bounds.high, open_low=not bounds.open_high))
            if shape.whole is not None:
                yield Numbers(whole=not shape.whole)
            yield from (Numbers(not_steps=(step,)) for step in shape.steps)
            yield from (Numbers(steps=(step,)) for step in shape.not_steps)
            if shape.outside:
                yield Consts("number", tuple((key_of(v), f"{v:f}") for v in shape.outside))
        case Strings():
            yield from _other_counts(shape)
            yield from (Strings(without=(pattern,)) for pattern in shape.patterns)
            yield from (Strings(patterns=(pattern,)) for pattern in shape.without)
            if shape.outside:
                texts = (json.dumps(value, ensure_ascii=False) for value in shape.outside)
                yield Consts("string", tuple((text, text) for text in texts))
        case Arrays():
            yield from _other_arrays(shape)
        case Objects():
            yield from _other_objects(shape)


def _other_counts(shape: Strings | Arrays | Objects) -> Iterator[Shape]:
    if shape.least:
        yield type(shape)(most=shape.least - 1)
    if shape.most is not None:
        yield type(shape)(least=shape.most + 1)


def _other_consts(kind: str, values: tuple[tuple[str, str], ...]) -> Iterator[Shape]:
    if kind in ("boolean", "null"):
        every = BOOLEANS if kind == "boolean" else NULL
        rest = tuple(pair for pair in every.values if pair not in values)
        if rest:
            yield Consts(kind, rest)
        return
    found = tuple(json.loads(text, parse_float=Decimal, parse_int=Decimal) for _, text in values)
    yield Numbers(outside=found) if kind == "number" else Strings(outside=found)


def _other_arrays(shape: Arrays) -> Iterator[Shape]:
    if shape.unique:
        yield Unsupported("array", "uniqueItems")
    yield from _other_counts(shape)
    for i, item in enumerate(shape.prefix):
        if item != ANY:
            yield Arrays(prefix=(*[ANY] * i, negated(item)), least=i + 1)
    if shape.rest == NOTHING:
        yield Arrays(least=len(shape.prefix) + 1)
    elif shape.rest != ANY:
        yield Arrays(contains=(Contains(len(shape.prefix), negated(shape.rest), 1, None),))
    for one in shape.contains:
        if one.least:
            yield Arrays(contains=(Contains(one.start, one.item, 0, one.least - 1),))
        if one.most is not None:
            yield Arrays(contains=(Contains(one.start, one.item, one.most + 1, None),))


def _other_objects(shape: Objects) -> Iterator[Shape]:
    for name, expr in shape.named:
        if expr != ANY:
            yield Objects(named=((name, negated(expr)),), required=(name,))
    for keys, expr in shape.rules:
        if expr != ANY:
            yield Objects(some=((keys, negated(expr)),))
    for name in shape.required:
        yield Objects(named=((name, NOTHING),))
    for keys, expr in shape.some:
        yield Objects(rules=((keys, negated(expr)),))
    yield from _other_counts(shape)
