"""Every kind of grammar as EBNF text, the one language that backends need to read.

The lowering is exact or refuses: nothing that the grammar forbids gets through, and a keyword or
a construct that cannot be held to is a GrammarError that names it.
"""

from __future__ import annotations

import json

from overlap_spec.grammar.lowering.ebnf import Rules, choice, literal
from overlap_spec.grammar.lowering.regex import parse
from overlap_spec.grammar.lowering.schema import SchemaLowering
from overlap_spec.grammar.spec import Grammar


def to_ebnf(grammar: Grammar) -> str:
    """EBNF in GBNF's dialect, with `Regex("…")` terminals; the start rule is `root`.

    Raises:
        GrammarError: names the keyword and its path, or the pattern and the position.
    """
    if grammar.kind == "ebnf":
        return grammar.source
    if grammar.kind == "regex":
        rules = Rules()
        return rules.text(rules.terminal(parse(grammar.source)))
    if grammar.kind == "choice":
        return Rules().text(choice([literal(text) for text in json.loads(grammar.source)]))
    schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.source)
    return SchemaLowering(schema, grammar.whitespace, grammar.best_effort).text()
