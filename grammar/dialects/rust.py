"""Expressions in Rust's regex syntax, for outlines-core and llguidance."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from overlap_spec.grammar.automata.charset import Ranges
from overlap_spec.grammar.automata.regex_ast import Alternation, CharClass, Concat, Node, Ref

_BARE = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ \"':;,=<>!@%")


def to_regex(node: Node, rule: Callable[[str], str]) -> str:
    """An expression in Rust's regex syntax, safe to embed in a larger one.

    Args:
        node: Its classes must not be empty.
    """
    if isinstance(node, CharClass):
        return _class(node.members)
    if isinstance(node, Ref):
        return f"(?:{rule(node.name)})"
    if isinstance(node, Concat):
        return "".join(to_regex(part, rule) for part in node.parts)
    if isinstance(node, Alternation):
        return f"(?:{'|'.join(to_regex(way, rule) for way in node.ways)})"
    body = f"(?:{to_regex(node.body, rule)})"
    least, most = node.least, node.most
    if most is None:
        return body + ("*+"[least] if least < 2 else f"{{{least},}}")
    return body + ("?" if (least, most) == (0, 1) else f"{{{least},{most}}}")


@lru_cache(4096)
def _class(members: Ranges) -> str:
    (low, high), *more = members
    if low == high and not more:
        return _point(low)
    spans = (_point(low) + (f"-{_point(high)}" if high > low else "") for low, high in members)
    return f"[{''.join(spans)}]"


def _point(point: int) -> str:
    return chr(point) if point in _BARE else f"\\x{{{point:x}}}"
