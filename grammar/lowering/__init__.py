"""Lowers every kind of grammar to EBNF text, the one language that backends read.

The lowering is exact or refuses: it allows nothing that the grammar forbids, and a keyword or
construct that it cannot enforce is a GrammarError that names it.
"""

from __future__ import annotations

import json
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex import parse
from overlap_spec.grammar.lowering.composite import KINDS, lower_composite
from overlap_spec.grammar.lowering.distinct import packed
from overlap_spec.grammar.lowering.ebnf import Rules, choice, literal
from overlap_spec.grammar.lowering.schema import SchemaLowering
from overlap_spec.grammar.spec import Grammar

# Keywords that may leave something to the matcher.
_COUNTED = ("uniqueItems", "minProperties")
_PUBLISHED = "//json-schema.org/"


def to_ebnf(grammar: Grammar, linear: bool = False) -> str:
    """A grammar as EBNF in GBNF's dialect, with `Regex("…")` terminals; the start rule is `root`.

    Args:
        grammar: The grammar.
        linear: Write ambiguous expressions as automata, for xgrammar; see `Rules`.

    Raises:
        GrammarError: names the keyword and its path, or the pattern and the position.
    """
    if grammar.kind in KINDS:
        return lower_composite(grammar, to_ebnf)
    if grammar.kind == "ebnf":
        return grammar.source
    if grammar.kind == "regex":
        rules = Rules(linear)
        return rules.text(rules.terminal(parse(grammar.source)))
    if grammar.kind == "choice":
        return Rules().text(choice([literal(text) for text in json.loads(grammar.source)]))
    schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.source)
    return _text(_lowering(grammar, schema, Rules(linear)))


def to_plan(grammar: Grammar) -> bytes:
    """What a grammar that `to_ebnf` has taken leaves to `distinct_matcher`; empty if nothing.

    Raises:
        GrammarError: it cannot be told where items must differ.
    """
    asks = any(f'"{keyword}"' in grammar.source for keyword in _COUNTED)
    # A published metaschema asks too, which the source refers to by its URI.
    asks |= grammar.source.count(_PUBLISHED) > grammar.source.count('"$schema":"http')
    if not grammar.apart or grammar.kind != "json_schema" or not asks:
        return b""
    lowering = _lowering(grammar, json.loads(grammar.source), Rules())
    _text(lowering)
    return packed(lowering.plan(), grammar.whitespace == "bounded")


def _lowering(grammar: Grammar, schema: Any, rules: Rules) -> SchemaLowering:
    any_order = grammar.key_order == "any"
    return SchemaLowering(
        schema, grammar.whitespace, grammar.best_effort, rules, grammar.apart, any_order
    )


def _text(lowering: SchemaLowering) -> str:
    try:
        return lowering.text()
    except RecursionError as error:
        raise GrammarError(
            "the schema is nested too deep, or has a name of some hundred characters "
            'beside free keys ("additionalProperties": false would do without these)',
            "schema",
        ) from error
