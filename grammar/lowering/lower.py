"""Lowers every kind of grammar to the rules and tokens that backends read.

The lowering is exact or refuses: it allows nothing that the grammar forbids, and a keyword or
construct that it cannot enforce is a GrammarError that names it.
"""

from __future__ import annotations

import json
from functools import lru_cache

from overlap_spec.grammar.automata.regex import parse
from overlap_spec.grammar.automata.regex_ast import Node
from overlap_spec.grammar.distinct.plan import of_objects, packed
from overlap_spec.grammar.ir.rules import Rules, choice, literal
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth
from overlap_spec.grammar.lowering.composite import KINDS, lower_composite
from overlap_spec.grammar.lowering.schema import SchemaLowering
from overlap_spec.grammar.parsing import read
from overlap_spec.grammar.spec import Grammar

# Keywords that may leave something to the matcher.
_COUNTED = ("uniqueItems", "minProperties")
_PUBLISHED = "//json-schema.org/"


def lower(grammar: Grammar) -> Syntax:
    """A grammar as rules and tokens.

    Raises:
        GrammarError: names the keyword and its path, or the pattern and the position.
    """
    return _lowered(grammar)[0]


def to_plan(grammar: Grammar) -> bytes:
    """What a grammar that `lower` has taken leaves to `distinct.matcher`; empty if nothing.

    Raises:
        GrammarError: it cannot be told where items must differ.
    """
    if not grammar.apart:
        return b""
    if grammar.kind == "json_object":
        return packed(of_objects(), grammar.whitespace == "bounded")
    asks = any(f'"{keyword}"' in grammar.source for keyword in _COUNTED)
    # A published metaschema asks too, which the source refers to by its URI.
    asks |= grammar.source.count(_PUBLISHED) > grammar.source.count('"$schema":"http')
    if grammar.kind != "json_schema" or not asks:
        return b""
    lowering = _lowered(grammar)[1]
    assert lowering is not None
    return packed(lowering.plan(), grammar.whitespace == "bounded")


# A compile asks for the rules, then for the plan; `auto` may ask for several backends.
@lru_cache(maxsize=2)
@bounded_depth()
def _lowered(grammar: Grammar) -> tuple[Syntax, SchemaLowering | None]:
    rules = Rules()
    if grammar.kind == "ebnf":
        return read(grammar.source), None
    if grammar.kind == "json_schema":
        lowering = SchemaLowering(rules, grammar, json.loads(grammar.source))
        return rules.syntax(lowering.start()), lowering
    return rules.syntax(_lower(rules, grammar)), None


def _lower(rules: Rules, grammar: Grammar) -> Node:
    """The start expression of a grammar, whose rules are added."""
    if grammar.kind in KINDS:
        return lower_composite(rules, grammar, _lower)
    if grammar.kind == "ebnf":
        return rules.embed(read(grammar.source))
    if grammar.kind == "regex":
        return rules.token(parse(grammar.source))
    if grammar.kind == "choice":
        return choice([literal(text) for text in json.loads(grammar.source)])
    schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.source)
    return SchemaLowering(rules, grammar, schema).start()
