"""Lowers grammars that contain other grammars: structural tags, tool calls and thinking.

Free text is exact: no trigger, exclusion or marker occurs anywhere in it. Schemas and patterns
inside are lowered as they are on their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex_ast import EMPTY, Node, Ref
from overlap_spec.grammar.ir.rules import Rules, choice, literal, repeat, sequence
from overlap_spec.grammar.lowering.elements import lower_elements
from overlap_spec.grammar.lowering.free_text import free_start, free_text
from overlap_spec.grammar.lowering.schema import SchemaLowering
from overlap_spec.grammar.reasoning.reply import GAP, MOST_GAP
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.tools.format import ToolFormat
from overlap_spec.grammar.tools.formats import load_format

KINDS = ("structural_tag", "tools", "after_thinking")
Lower = Callable[[Rules, Grammar], Node]


def lower_composite(rules: Rules, grammar: Grammar, lower: Lower) -> Node:
    """The start expression of a grammar of one of the `KINDS`.

    Raises:
        GrammarError: as `lower` raises it.
    """
    source = json.loads(grammar.source)
    if grammar.kind == "structural_tag":
        return _Tags(rules, grammar, lower).lower(source, ())
    if grammar.kind == "tools":
        return _Calls(rules, grammar, lower).lower(source)
    assert grammar.inner is not None
    parts = _Parts(rules, grammar, lower)
    inner = sequence(repeat(literal(GAP), 0, MOST_GAP), parts.add(grammar.inner))
    root = free_text(rules, {source["end"]: inner}, may_end=False)
    if source["begin"]:
        root = choice([sequence(literal(source["begin"]), root), parts.add(grammar.inner)])
    return root


class _Parts:
    """The rules under construction, and the grammars inside."""

    def __init__(self, rules: Rules, grammar: Grammar, lower: Lower) -> None:
        self.rules = rules
        self._grammar, self._lower = grammar, lower
        self._known: dict[Grammar, Node] = {}

    def add(self, inner: Grammar) -> Node:
        """The rule of a grammar inside."""
        if inner not in self._known:
            start = self._lower(self.rules, inner)
            self._known[inner] = start if isinstance(start, Ref) else self.rules.add(start)
        return self._known[inner]

    def json(self, schema: Any, best_effort: bool = False) -> Node:
        """The rule of JSON under a schema."""
        made = Grammar.json_schema(
            schema,
            whitespace=self._grammar.whitespace,
            best_effort=best_effort,
            additional_properties=self._grammar.additional_properties,
        )
        return self.add(made)

    def elements(self, schema: Any, style: str) -> Node:
        """The rule of an object's members as elements."""
        lowering = SchemaLowering(self.rules, self._grammar, schema)
        return self.rules.add(lower_elements(lowering, style))


class _Tags(_Parts):
    def lower(self, form: dict[str, Any], ends: tuple[str, ...]) -> Node:
        """The expression of a format; `ends` close the tag around it and occur in no free text."""
        kind = form["type"]
        if kind == "const_string":
            return literal(form["value"])
        if kind == "json_schema" and form["style"] != "json":
            return self.elements(form["json_schema"], form["style"])
        if kind == "json_schema":
            return self.json(form["json_schema"])
        if kind == "regex":
            return self.add(Grammar.regex(form["pattern"]))
        if kind == "grammar":
            return self.add(Grammar.ebnf(form["grammar"]))
        if kind == "any_text":
            return free_text(self.rules, dict.fromkeys([*form["excludes"], *ends]), may_end=True)
        if kind == "sequence":
            return sequence(*(self.lower(part, ends) for part in form["elements"]))
        if kind == "or":
            return choice([self.lower(part, ends) for part in form["elements"]])
        if kind == "tag":
            return self._tag(form, form["begin"], ends)
        if kind == "triggered_tags":
            return self._triggered(form, ends)
        if kind == "tags_with_separator":
            return self._separated(form, ends)
        if kind == "dispatch":
            after = {text: self.lower(part, ends) for text, part in form["rules"]}
            return self._dispatch(after, form["loop"], tuple(form["excludes"]))
        least, most = {"optional": (0, 1), "plus": (1, None), "star": (0, None)}.get(kind) or (
            form["min"],
            None if form["max"] == -1 else form["max"],
        )
        return repeat(self.lower(form["content"], ends), least, most)

    def _tag(self, tag: dict[str, Any], begin: str, ends: tuple[str, ...]) -> Node:
        inside = tuple(end for end in tag["end"] if end) or ends
        closing = choice([literal(end) for end in tag["end"]])
        return self.rules.add(sequence(literal(begin), self.lower(tag["content"], inside), closing))

    def _triggered(self, form: dict[str, Any], ends: tuple[str, ...]) -> Node:
        after: dict[str, Node | None] = {}
        for trigger in form["triggers"]:
            rest = [
                self._tag(tag, tag["begin"].removeprefix(trigger), ())
                for tag in form["tags"]
                if tag["begin"].startswith(trigger)
            ]
            after[trigger] = choice(rest) if rest else None
        loop, excludes = not form["stop_after_first"], (*form["excludes"], *ends)
        if not form["at_least_one"]:
            return self._dispatch(after, loop, excludes)
        first = choice([self._tag(tag, tag["begin"], ()) for tag in form["tags"]])
        return sequence(first, self._dispatch(after, loop, excludes)) if loop else first

    def _dispatch(
        self, after: Mapping[str, Node | None], loop: bool, excludes: tuple[str, ...]
    ) -> Node:
        exits: dict[str, Node | None] = dict.fromkeys(excludes)
        again = self.rules.reserve() if loop else None
        for text, part in after.items():
            # A trigger without a tag is a dead end.
            exits.setdefault(text, None if part is None else sequence(part, again or EMPTY))
        start = free_text(self.rules, exits, may_end=True)
        if again is None:
            return start
        self.rules.define(again, start)
        return again

    def _separated(self, form: dict[str, Any], ends: tuple[str, ...]) -> Node:
        one = choice([self._tag(tag, tag["begin"], ends) for tag in form["tags"]])
        if not form["stop_after_first"]:
            one = sequence(one, repeat(sequence(literal(form["separator"]), one), 0, None))
        return one if form["at_least_one"] else repeat(one, 0, 1)


class _Calls(_Parts):
    def lower(self, source: dict[str, Any]) -> Node:
        form, wanted = load_format(source["format"]), source["choice"]
        starts = dict.fromkeys(form.starts)
        if wanted == "none":
            return self._free(form, dict.fromkeys(starts))
        heads = [opening + form.begin for opening in form.openings]
        calls = self._calls(form, source)
        if wanted != "auto" or "otherwise" in source:
            whole = [sequence(literal(head), calls) for head in heads]
            if wanted == "auto":
                whole.append(self.add(Grammar.unpacked(source["otherwise"])))
            return choice(whole)
        after: dict[str, Node | None] = {}
        for start in starts:
            rest = [head.removeprefix(start) for head in heads if head.startswith(start)]
            after[start] = choice([sequence(literal(r), calls) for r in rest])
        return self._free(form, after)

    def _free(self, form: ToolFormat, exits: dict[str, Node | None]) -> Node:
        if form.anywhere:
            return free_text(self.rules, exits, may_end=True)
        return free_start(self.rules, exits)

    def _calls(self, form: ToolFormat, source: dict[str, Any]) -> Node:
        """What follows the `begin` of the first call."""
        names, tools = source["choice"], source["tools"]
        if isinstance(names, list):
            tools = [tool for tool in tools if tool[0] in names]
        bodies = [
            sequence(
                literal(name + form.middle), self._arguments(schema, strict), literal(form.end)
            )
            for name, schema, strict in tools
        ]
        body = self.rules.add(choice(bodies))
        again = sequence(literal(form.separator + form.begin), body)
        single = isinstance(names, list) or not source["parallel"]
        more = EMPTY if single else repeat(again, 0, None)
        return self.rules.add(sequence(body, more, literal(form.close)))

    def _arguments(self, schema: Any, strict: bool) -> Node:
        if strict:
            return self.json(schema)
        try:
            return self.json(schema, best_effort=True)
        except GrammarError:
            return self.json({"type": "object"})
