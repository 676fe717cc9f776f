"""The complement of a shape, as shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal

from overlap_spec.grammar.lowering.numbers import Bounds
from overlap_spec.grammar.lowering.shapes import (
    ANY,
    BOOLEANS,
    NOTHING,
    NULL,
    Arrays,
    Consts,
    Contains,
    Expr,
    Keys,
    Numbers,
    Objects,
    Shape,
    Strings,
    Unsupported,
    negated,
)
from overlap_spec.grammar.schemas.source import key_of


def complement(shape: Shape) -> Iterator[Shape]:
    """Shapes whose union is all other values of the same JSON type.

    The caller replaces fixed arrays and objects by their structure first.
    """
    if isinstance(shape, Unsupported):
        yield shape
    elif isinstance(shape, Consts):
        yield from _consts(shape)
    elif isinstance(shape, Numbers):
        yield from _numbers(shape)
    elif isinstance(shape, Strings):
        yield from _strings(shape)
    elif isinstance(shape, Arrays):
        yield from _arrays(shape)
    else:
        yield from _objects(shape)


def _consts(shape: Consts) -> Iterator[Shape]:
    if shape.kind in ("boolean", "null"):
        rest = [pair for pair in (BOOLEANS if shape.kind == "boolean" else NULL).values
                if pair not in shape.values]  # fmt: skip
        if rest:
            yield Consts(shape.kind, tuple(rest))
        return
    values = [json.loads(text, parse_float=Decimal, parse_int=Decimal) for _, text in shape.values]
    if shape.kind == "number":
        yield Numbers(outside=tuple(values))
    else:
        yield Strings(outside=tuple(values))


def _numbers(shape: Numbers) -> Iterator[Shape]:
    low, high = shape.bounds.low, shape.bounds.high
    if low is not None:
        yield Numbers(Bounds(high=low, open_high=not shape.bounds.open_low))
    if high is not None:
        yield Numbers(Bounds(low=high, open_low=not shape.bounds.open_high))
    if shape.whole is not None:
        yield Numbers(whole=not shape.whole)
    for step in shape.steps:
        yield Numbers(not_steps=(step,))
    for step in shape.not_steps:
        yield Numbers(steps=(step,))
    if shape.outside:
        yield Consts("number", tuple((key_of(v), f"{v:f}") for v in shape.outside))


def _strings(shape: Strings) -> Iterator[Shape]:
    if shape.least:
        yield Strings(most=shape.least - 1)
    if shape.most is not None:
        yield Strings(least=shape.most + 1)
    for pattern in shape.patterns:
        yield Strings(without=(pattern,))
    for pattern in shape.without:
        yield Strings(patterns=(pattern,))
    if shape.outside:
        texts = (json.dumps(value, ensure_ascii=False) for value in shape.outside)
        yield Consts("string", tuple((text, text) for text in texts))


def _arrays(shape: Arrays) -> Iterator[Shape]:
    if shape.unique:
        yield Unsupported("array", "uniqueItems")
    if shape.least:
        yield Arrays(most=shape.least - 1)
    if shape.most is not None:
        yield Arrays(least=shape.most + 1)
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


def _objects(shape: Objects) -> Iterator[Shape]:
    for name, expr in shape.named:
        if expr != ANY:
            yield Objects(named=((name, negated(expr)),), required=(name,))
    for keys, expr in shape.rules:
        if expr != ANY:
            yield having(keys, negated(expr))
    for name in shape.required:
        yield Objects(named=((name, NOTHING),))
    for keys, expr in shape.some:
        yield Objects(rules=((keys, negated(expr)),))
    if shape.least:
        yield Objects(most=shape.least - 1)
    if shape.most is not None:
        yield Objects(least=shape.most + 1)


def having(keys: Keys, expr: Expr) -> Objects:
    """Objects with a member whose key is in the set and whose value matches the expression."""
    return Objects(some=((keys, expr),))
