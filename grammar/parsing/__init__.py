"""Grammars that users write as text, read as trees."""

from __future__ import annotations

from overlap_spec.grammar.ir.syntax import Syntax
from overlap_spec.grammar.parsing import ebnf, lark


def read(text: str) -> Syntax:
    """Read EBNF or Lark text.

    Raises:
        GrammarError: it has an error, named with its place.
        ForeignConstruct: a construct of EBNF that only xgrammar has.
    """
    return lark.read(text) if lark.is_lark(text) else ebnf.read(text)
