"""JSON Schema to rules: every text that the grammar allows is valid, in the requested layout.

Members of an object come in the order of `properties`, then required names that are not among
them, then free keys, unless any order is asked for: that multiplies the rules (`any_order`). A
value that the schema fixes (`enum`, keys) has one written form.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.escape import in_json, once_in_json
from overlap_spec.grammar.automata.regex_ast import Node
from overlap_spec.grammar.distinct.plan import DistinctPlan
from overlap_spec.grammar.distinct.text import Node as WatchedNode
from overlap_spec.grammar.ir.rules import Rules, choice, literal
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.any_order import Orders
from overlap_spec.grammar.lowering.arrays import ArrayWriter, fixed_items
from overlap_spec.grammar.lowering.layout import Layout
from overlap_spec.grammar.lowering.numeric import number_language
from overlap_spec.grammar.lowering.objects import ObjectWriter, counts_keys
from overlap_spec.grammar.lowering.resolver import Resolver
from overlap_spec.grammar.lowering.shapes import (
    Arrays,
    Consts,
    Expr,
    Numbers,
    Objects,
    Shape,
    Strings,
    Unsupported,
)
from overlap_spec.grammar.lowering.strings import string_language
from overlap_spec.grammar.lowering.values import Once, Values
from overlap_spec.grammar.spec import Grammar

_DEEPEST = 200
_DEEPEST_INDENT = 24


class SchemaLowering:
    """Lowers one schema document, already checked against its metaschema.

    Items and keys that must differ, and that no rules keep apart, are left to a matcher where the
    grammar is :attr:`apart`; :attr:`looks` tells whether there are such. In any order are members
    but inside items that must differ.

    Args:
        grammar: Its options.
        root: The document.
    """

    def __init__(self, rules: Rules, grammar: Grammar, root: Any) -> None:
        self.root, self.rules, self.layout = root, rules, Layout(rules, grammar.whitespace)
        self.orders = Orders(self.layout) if grammar.key_order == "any" else None
        self.best_effort, self.apart, self.looks = grammar.best_effort, grammar.apart, False
        self.resolver = Resolver(root, grammar)
        self.values = Values(self.resolver)
        self._known: dict[tuple[Expr, int, Once], Node | None] = {}
        self._recursive: set[tuple[Expr, int, Once]] = set()

    def start(self) -> Node:
        """The expression of the whole document.

        Raises:
            GrammarError: names the keyword that cannot be enforced, or no value is valid.
        """
        start = self.value(self.resolver.expr(self.root, "$"), "$", 0)
        if start is None:
            wrong = "$: no value is valid under this schema"
            if self.resolver.has_closed:
                wrong += (
                    ", whose objects have the members alone that it names: name those that it "
                    'needs, or say additionalProperties or additional_properties="schema"'
                )
            raise GrammarError(wrong, "schema")
        return start

    def plan(self) -> list[WatchedNode]:
        """Where items and keys must differ, after :meth:`start`; see `distinct`.

        Raises:
            GrammarError: that cannot be told.
        """
        if not self.looks:
            return []
        made = DistinctPlan(
            self.resolver,
            lambda shape, path: ObjectWriter(self, shape, path, 0).free_values(),
            lambda shape: fixed_items(shape, self.resolver) is not None,
            lambda shape: counts_keys(shape) and ObjectWriter(self, shape, "$", 0).is_free,
        )
        return made.of(self.resolver.expr(self.root, "$"))

    def value(self, expr: Expr, path: str, depth: int, once: Once = Once.NO) -> Node | None:
        """An expression for a value at `depth`, written once where asked; None if none is valid."""
        if depth > (_DEEPEST_INDENT if self.layout.by_depth else _DEEPEST):
            why = "indentation needs a bounded depth" if self.layout.by_depth else "nested too deep"
            raise GrammarError(f"{path}: {why}", "schema")
        key = (expr, depth if self.layout.by_depth else 0, once)
        if key in self._known:
            self._recursive.add(key)
            return self._known[key]
        name = self._known[key] = self.rules.reserve()
        parts = [
            part
            for shape in self.resolver.written(expr)
            for part in self.ways(shape, path, depth, once)
        ]
        found = choice(parts) if parts else None
        if key in self._recursive or len(parts) > 1:
            # A rule that only refers to another would hide from the backend what follows it.
            if found is not None:
                self.rules.define(name, found)
            found = name if parts else None
        self._known[key] = found
        return found

    def ways(self, shape: Shape, path: str, depth: int, once: Once = Once.NO) -> list[Node]:
        """Expressions whose union is a shape, at `depth`."""
        try:
            return self._shape(shape, path, depth, once)
        except GrammarError:
            loose = _loose(shape) if self.best_effort else shape
            if loose == shape:
                raise
            return [] if loose is None else self._shape(loose, path, depth, once)

    def _shape(self, shape: Shape, path: str, depth: int, once: Once) -> list[Node]:
        if isinstance(shape, Arrays | Objects) and once is not Once.NO:
            is_open = once is Once.ITEM and self.values.is_open(shape)
            once = Once.NO if is_open else Once.INSIDE
        if isinstance(shape, Objects):
            return ObjectWriter(self, shape, path, depth, once).rule()
        if isinstance(shape, Consts):
            return self._fixed(shape, depth, once)
        if isinstance(shape, Unsupported):
            raise keywords.refusal(
                "not", path, f"negates {shape.keyword!r}, which is not supported"
            )
        if isinstance(shape, Arrays):
            found = ArrayWriter(self, shape, path, depth, once).rule()
        elif isinstance(shape, Strings):
            escape = in_json if once is Once.NO else once_in_json
            language = string_language(shape, path, escape)
            found = None if language is None else self.rules.quoted(language, escape)
        else:
            found = self._number(shape, path, once)
        return [] if found is None else [found]

    def _fixed(self, shape: Consts, depth: int, once: Once) -> list[Node]:
        values = [json.loads(text) for _, text in shape.values]
        whole = [int(v) for v in values if isinstance(v, float) and v.is_integer()]
        if once is not Once.NO:
            values = [v for v in values if not (isinstance(v, float) and v.is_integer())]
        # 2.0 equals 2: allow both forms, or the shorter one.
        values += whole
        return [self.layout.value(value, depth) for value in values]

    def _number(self, shape: Numbers, path: str, once: Once) -> Node | None:
        language = number_language(shape, path, once is not Once.NO)
        if language is None:
            return None
        if isinstance(language, list):
            return choice([literal(text) for text in language])
        return self.rules.token(language)


def _loose(shape: Shape) -> Shape | None:
    """A shape without the constraints that may be refused; None if nothing is left."""
    if isinstance(shape, Strings):
        return replace(shape, patterns=(), without=(), outside=())
    if isinstance(shape, Numbers):
        return replace(shape, steps=(), not_steps=(), outside=())
    if isinstance(shape, Arrays):
        return replace(shape, unique=False, contains=())
    if isinstance(shape, Objects):
        kept = tuple((keys, expr) for keys, expr in shape.rules if not keys.exprs)
        return replace(shape, rules=kept, some=(), least=min(shape.least, len(shape.required)))
    return None if isinstance(shape, Unsupported) else shape
