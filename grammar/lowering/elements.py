"""Objects written as elements with one value each, as some models write the arguments of calls.

A string stands as it is, without quotes, and never contains what ends its element; any other value
is JSON, but for lists and objects in `cohere_xml`, which are elements again. Elements come in the
order of `properties`, an optional line break between two and around a value that is not a string.
Members that the schema does not name are not written.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.escape import plain
from overlap_spec.grammar.automata.regex_ast import EMPTY, Node, Ref
from overlap_spec.grammar.ir.rules import choice, literal, repeat, sequence
from overlap_spec.grammar.lowering.free_text import free_text
from overlap_spec.grammar.lowering.intersect import member
from overlap_spec.grammar.lowering.keywords import refusal
from overlap_spec.grammar.lowering.schema import SchemaLowering
from overlap_spec.grammar.lowering.shapes import (
    NOTHING,
    Arrays,
    Consts,
    Expr,
    Objects,
    Shape,
    Strings,
)
from overlap_spec.grammar.lowering.strings import string_language
from overlap_spec.grammar.schemas.source import json_path

_BREAK = repeat(literal("\n"), 0, 1)


@dataclass(frozen=True)
class Style:
    """How an element is written.

    Args:
        start: What it starts with; `{key}` and `{type}` are those of the member.
        types: The name of each JSON type; empty if it is not written.
        nested: How a list's items start, where lists and objects are elements too.
        escaped: Whether `&`, `<`, `>` and `"` in keys are entities.
    """

    start: str
    end: str
    types: tuple[str, ...] = ()
    nested: str = ""
    escaped: bool = False


_KINDS = ("string", "number", "boolean", "null", "object", "array")
STYLES = {
    "qwen_xml": Style("<parameter={key}>", "</parameter>"),
    "glm_xml": Style("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>"),
    "cohere_xml": Style(
        '<cofl:value name="{key}" type="{type}">',
        "</cofl:value>",
        ("raw", "json", "json", "json", "dict", "list"),
        '<cofl:value type="{type}">',
        True,
    ),
    "kimi_k3_xml": Style(
        '<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>", _KINDS
    ),
}
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}


def lower_elements(lowering: SchemaLowering, style: str) -> Node:
    """The expression of a schema's objects as elements.

    Raises:
        GrammarError: names the keyword and its path; or the schema allows no object.
    """
    writer = _Elements(lowering, STYLES[style])
    found = writer.objects(lowering.resolver.expr(lowering.root, "$"), "$")
    if found is None:
        raise GrammarError(f"$: style {style!r} needs a schema that allows objects", "schema")
    return found


class _Elements:
    def __init__(self, lowering: SchemaLowering, style: Style) -> None:
        self.lowering, self.style = lowering, style
        self.rules, self.resolver = lowering.rules, lowering.resolver
        self._known: dict[tuple[Expr, str], Ref | None] = {}

    def objects(self, expr: Expr, path: str) -> Node | None:
        """The objects of an expression, as elements; None if there is none."""
        shapes = [shape for shape in self.resolver.written(expr) if shape.kind == "object"]
        ways = [self._object(shape, path) for shape in shapes]
        found = [way for way in ways if way is not None]
        return choice(found) if found else None

    def _object(self, shape: Shape, path: str) -> Node | None:
        if not isinstance(shape, Objects):
            raise refusal("enum", path, "fixes objects, which are not written as elements")
        names = dict.fromkeys([*(name for name, _ in shape.named), *shape.required])
        most = len(names) if shape.most is None else shape.most
        if shape.some or shape.least > len(shape.required) or most < len(names):
            raise refusal("minProperties", path, "and its like do not go with elements")
        parts: list[Node] = []
        for name in names:
            here = json_path(path, "properties", name)
            wanted = member(shape, name, self.resolver)
            one = None if wanted == NOTHING else self._member(name, wanted, here)
            if one is None and name in shape.required:
                return None
            if one is not None:
                one = sequence(_BREAK, one)
                parts.append(one if name in shape.required else repeat(one, 0, 1))
        return sequence(*parts, _BREAK)

    def _member(self, name: str, expr: Expr, path: str) -> Node | None:
        key = "".join(_ENTITIES.get(c, c) for c in name) if self.style.escaped else name
        if not re.fullmatch(r"[^\s<>\"|]+", key):
            raise refusal("properties", path, "has a name that cannot be written as an element")
        return self._element(self.style.start.replace("{key}", key), expr, path)

    def _element(self, start: str, expr: Expr, path: str) -> Node | None:
        """An element with a value of an expression; None if there is no such value."""
        if (expr, start) not in self._known:
            rule = self._known[expr, start] = self.rules.reserve()
            ways = [way for s in self.resolver.written(expr) for way in self._ways(start, s, path)]
            if not ways:
                self._known[expr, start] = None
            self.rules.define(rule, choice(ways) if ways else rule)
        return self._known[expr, start]

    def _ways(self, start: str, shape: Shape, path: str) -> list[Node]:
        named = dict(zip(_KINDS, self.style.types, strict=False)).get(shape.kind, "")
        head, *more = map(literal, start.replace("{type}", named).split("\n"))
        head = sequence(head, *(n for part in more for n in (_BREAK, part)))
        end = literal(self.style.end)
        if isinstance(shape, Strings):
            rest = self._text(shape, path)
            return [] if rest is None else [sequence(head, rest)]
        if isinstance(shape, Consts) and shape.kind == "string":
            texts = [json.loads(text) for _, text in shape.values]
            return [sequence(head, literal(t), end) for t in texts if self.style.end not in t]
        if self.style.nested and shape.kind == "object":
            inner = self._object(shape, path)
            return [] if inner is None else [sequence(head, inner, end)]
        if self.style.nested and shape.kind == "array":
            items = self._items(shape, path)
            return [] if items is None else [sequence(head, items, end)]
        inside = self.lowering.ways(shape, path, 0)
        return [sequence(head, _BREAK, way, _BREAK, end) for way in inside]

    def _text(self, shape: Strings, path: str) -> Node | None:
        """A string and the end of its element."""
        end = self.style.end
        if shape == Strings():
            return free_text(self.rules, {end: EMPTY}, may_end=False)
        kept = replace(shape, without=(*shape.without, re.escape(end)))
        language = string_language(kept, path, plain)
        return None if language is None else sequence(self.rules.token(language), literal(end))

    def _items(self, shape: Shape, path: str) -> Node | None:
        simple = isinstance(shape, Arrays) and not (shape.prefix or shape.unique or shape.contains)
        if not simple:
            raise refusal("items", path, "and its like do not go with lists of elements")
        assert isinstance(shape, Arrays)
        one = self._element(self.style.nested, shape.rest, json_path(path, "items"))
        if one is None:
            return None if shape.least else EMPTY
        return repeat(sequence(_BREAK, one), shape.least, shape.most)
