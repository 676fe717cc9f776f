"""The intersection of two shapes of one JSON type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from overlap_spec.grammar.lowering.shapes import (
    NOTHING,
    Arrays,
    Consts,
    Document,
    Expr,
    Keys,
    Not,
    Numbers,
    Objects,
    Shape,
    Strings,
    Unsupported,
    all_of,
)

T = TypeVar("T")


def intersect(a: Shape, b: Shape, oracle: Document) -> Shape | None:
    """The intersection of two shapes; None if it is empty, as far as that is cheap to see."""
    if a == b:
        return a
    if isinstance(a, Unsupported) or isinstance(b, Unsupported):
        return (a if isinstance(a, Unsupported) else b) if a.kind == b.kind else None
    if isinstance(a, Consts) or isinstance(b, Consts):
        one, other = (a, b) if isinstance(a, Consts) else (b, a)
        assert isinstance(one, Consts)
        if one.kind != other.kind:
            return None
        return consts(one.kind, [pair for pair in one.values if oracle.holds(other, pair[1])])
    if isinstance(a, Numbers) and isinstance(b, Numbers):
        return _numbers(a, b)
    if isinstance(a, Strings) and isinstance(b, Strings):
        return _strings(a, b)
    if isinstance(a, Arrays) and isinstance(b, Arrays):
        return tidy_array(_arrays(a, b))
    if isinstance(a, Objects) and isinstance(b, Objects):
        return tidy_object(_objects(a, b, oracle), oracle)
    return None


def consts(kind: str, values: Iterable[tuple[str, str]]) -> Consts | None:
    """Fixed values as a shape; None if there are none."""
    found = tuple(dict(values).items())
    return Consts(kind, found) if found else None


def joined(left: tuple[T, ...], right: tuple[T, ...]) -> tuple[T, ...]:
    """The elements of both, in order, without duplicates."""
    return (*left, *(item for item in right if item not in left)) if right else left


def least_of(a: int | None, b: int | None) -> int | None:
    """The smaller of two upper bounds; None means no bound."""
    return a if b is None else b if a is None else min(a, b)


def _numbers(a: Numbers, b: Numbers) -> Numbers | None:
    if a.whole is not None and b.whole is not None and a.whole != b.whole:
        return None
    bounds = a.bounds.both(b.bounds)
    if bounds.is_empty:
        return None
    whole = b.whole if a.whole is None else a.whole
    if whole:
        low, high = bounds.integers()
        if low is not None and high is not None and low > high:
            return None
    return Numbers(
        bounds,
        whole,
        joined(a.steps, b.steps),
        joined(a.not_steps, b.not_steps),
        joined(a.outside, b.outside),
    )


def _strings(a: Strings, b: Strings) -> Strings | None:
    least, most = max(a.least, b.least), least_of(a.most, b.most)
    if most is not None and least > most:
        return None
    patterns, without = joined(a.patterns, b.patterns), joined(a.without, b.without)
    if set(patterns) & set(without):
        return None
    return Strings(least, most, patterns, without, joined(a.outside, b.outside))


def _arrays(a: Arrays, b: Arrays) -> Arrays:
    length = max(len(a.prefix), len(b.prefix))
    one = (*a.prefix, *[a.rest] * (length - len(a.prefix)))
    other = (*b.prefix, *[b.rest] * (length - len(b.prefix)))
    return Arrays(
        tuple(all_of(p, q) for p, q in zip(one, other, strict=True)),
        all_of(a.rest, b.rest),
        max(a.least, b.least),
        least_of(a.most, b.most),
        a.unique or b.unique,
        joined(a.contains, b.contains),
    )


def tidy_array(shape: Arrays) -> Arrays | None:
    """Equal arrays with length bounds as tight as their items imply; None if empty."""
    prefix, most = shape.prefix, shape.most
    if NOTHING in prefix:
        most = least_of(most, prefix.index(NOTHING))
    if shape.rest == NOTHING:
        most = least_of(most, len(prefix))
    if most is not None and len(prefix) > most:
        prefix = prefix[:most]
    if most is not None and shape.least > most:
        return None
    if any(c.most is not None and c.least > c.most for c in shape.contains):
        return None
    return Arrays(prefix, shape.rest, shape.least, most, shape.unique, shape.contains)


def _objects(a: Objects, b: Objects, oracle: Document) -> Objects:
    named = dict(a.named)
    for name, expr in b.named:
        named[name] = _narrowed(named[name], expr, oracle) if name in named else expr
    return Objects(
        tuple(named.items()),
        joined(a.rules, b.rules),
        joined(a.required, b.required),
        joined(a.some, b.some),
        max(a.least, b.least),
        least_of(a.most, b.most),
        a.stated | b.stated,
        b.closes if a.closes is None else a.closes and b.closes is not False,
    )


def _narrowed(expr: Expr, other: Expr, oracle: Document) -> Expr:
    # Excluding what is not contained would only make equal shapes look different.
    if isinstance(other, Not) and other != NOTHING and oracle.is_empty(all_of(expr, other.body)):
        return expr
    return all_of(expr, other)


def tidy_object(shape: Objects, oracle: Document) -> Objects | None:
    """The shape; None if a required member is impossible, or too many are required."""
    if shape.most is not None and max(shape.least, len(shape.required)) > shape.most:
        return None
    if shape.some and shape.most == 0:
        return None
    if any(oracle.is_empty(member(shape, name, oracle)) for name in shape.required):
        return None
    return shape


def closed(shape: Objects, oracle: Document) -> Objects | None:
    """An object with its stated members alone, where they close it; None if it is empty."""
    if not shape.closes:
        return shape
    others = (Keys(shape.stated, inverted=True), NOTHING)
    rules = joined(shape.rules, (others,))
    return tidy_object(replace(shape, rules=rules, stated=frozenset(), closes=None), oracle)


def names_of(shape: Objects) -> tuple[str, ...]:
    """The keys that keywords name, in the order in which members are written."""
    ruled = {name for keys, _ in (*shape.rules, *shape.some) for name in keys.names}
    named = (name for name, _ in shape.named)
    return tuple(dict.fromkeys([*named, *shape.required, *sorted(ruled)]))


def member(shape: Objects, name: str, oracle: Document) -> Expr:
    """The value of the member with a name, by all rules."""
    own = dict(shape.named).get(name)
    rules = [expr for keys, expr in shape.rules if oracle.has_key(keys, name)]
    return all_of(*([] if own is None else [own]), *rules)
