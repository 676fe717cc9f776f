"""Lowers every kind of grammar to EBNF text, the one language that backends read.

The lowering is exact or refuses: it allows nothing that the grammar forbids, and a keyword or
construct that it cannot enforce is a GrammarError that names it.
"""

from __future__ import annotations

import json

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex import parse
from overlap_spec.grammar.lowering.composite import KINDS, lower_composite
from overlap_spec.grammar.lowering.ebnf import Rules, choice, literal
from overlap_spec.grammar.lowering.schema import SchemaLowering
from overlap_spec.grammar.spec import Grammar


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
    lowering = SchemaLowering(schema, grammar.whitespace, grammar.best_effort, Rules(linear))
    try:
        return lowering.text()
    except RecursionError as error:
        raise GrammarError(
            "the schema is nested too deep, or has a name of some hundred characters "
            'beside free keys ("additionalProperties": false would do without these)',
            "schema",
        ) from error
