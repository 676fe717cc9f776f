"""Whether a shape contains a value."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Protocol

from overlap_spec.grammar.automata.regex import Pattern
from overlap_spec.grammar.lowering.intersect import SchemaOracle, member
from overlap_spec.grammar.lowering.shapes import (
    Arrays,
    Consts,
    Contains,
    Expr,
    Numbers,
    Objects,
    Shape,
    Strings,
    Unsupported,
)
from overlap_spec.grammar.schemas.source import key_of


class Evaluator(SchemaOracle, Protocol):
    """A schema oracle that also evaluates expressions."""

    def has(self, expr: Expr, value: Any) -> bool:
        """Whether an expression contains a value, with numbers as Decimal."""


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "number")


def contains_value(shape: Shape, value: Any, oracle: Evaluator) -> bool:
    """Whether a shape contains a value."""
    if isinstance(shape, Unsupported) or kind_of(value) != shape.kind:
        return isinstance(shape, Unsupported) and kind_of(value) == shape.kind
    if isinstance(shape, Consts):
        return key_of(value) in dict(shape.values)
    if isinstance(shape, Numbers):
        return _number(shape, value)
    if isinstance(shape, Strings):
        return _string(shape, value)
    if isinstance(shape, Arrays):
        return _array(shape, value, oracle)
    return _object(shape, value, oracle)


def _number(shape: Numbers, value: Decimal) -> bool:
    bounds = shape.bounds
    if bounds.low is not None and (value < bounds.low or (bounds.open_low and value == bounds.low)):
        return False
    if bounds.high is not None and (
        value > bounds.high or (bounds.open_high and value == bounds.high)
    ):
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
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return False
    if value in shape.outside:
        return False
    if not all(Pattern(pattern, "schema").matches(value) for pattern in shape.patterns):
        return False
    return not any(Pattern(pattern, "schema").matches(value) for pattern in shape.without)


def _array(shape: Arrays, value: list[Any], oracle: Evaluator) -> bool:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return False
    if shape.unique and len(set(map(key_of, value))) < len(value):
        return False
    items = [*shape.prefix, *[shape.rest] * max(len(value) - len(shape.prefix), 0)]
    if not all(oracle.has(expr, item) for expr, item in zip(items, value, strict=False)):
        return False
    return all(_counted(one, value, oracle) for one in shape.contains)


def _counted(one: Contains, value: list[Any], oracle: Evaluator) -> bool:
    count = sum(oracle.has(one.item, item) for item in value[one.start :])
    return count >= one.least and (one.most is None or count <= one.most)


def _object(shape: Objects, value: dict[str, Any], oracle: Evaluator) -> bool:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return False
    if any(name not in value for name in shape.required):
        return False
    if not all(oracle.has(member(shape, name, oracle), held) for name, held in value.items()):
        return False
    return all(
        any(oracle.has_key(keys, name) and oracle.has(expr, held) for name, held in value.items())
        for keys, expr in shape.some
    )
