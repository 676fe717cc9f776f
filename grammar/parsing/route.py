"""Picks the fastest backend for a grammar; all that accept it enforce the same language.

Measured with a vocabulary of 131,072 tokens on schemas of JSONSchemaBench. xgrammar has the
cheapest masks on small grammars, and walks a tree in one call. But with counted repetitions,
ambiguous patterns or objects with many keys it compiles for seconds, and some rows then cost 60 ms
and more. llguidance compiles in milliseconds and has even mask times, as long as its lexemes are
longer than a character.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlap_spec.grammar.parsing.exclusions import excluded
from overlap_spec.grammar.parsing.expressions import Chars, Expression, Repeat, parts_of
from overlap_spec.grammar.parsing.regular import EpsilonFree
from overlap_spec.grammar.parsing.syntax import Syntax

_SMALL_RULES = 24
_LONG_COUNT = 16


@dataclass(frozen=True)
class Route:
    """Backends, in the order in which they are tried.

    Attributes:
        backends: Names, the best first.
        reason: Why the first one was picked; a short text for statistics.
    """

    backends: tuple[str, ...]
    reason: str


FOREIGN = Route(("xgrammar",), "a construct of xgrammar's own")
CHARACTERS = Route(("xgrammar", "outlines", "llguidance"), "no lexemes longer than a character")
LEXEMES = ("llguidance", "xgrammar", "outlines")
SMALL = Route(("xgrammar", "llguidance", "outlines"), "a small grammar")


def route(syntax: Syntax) -> Route:
    """The route of a grammar, before its lexemes are known.

    If it starts with llguidance and all lexemes turn out to be single characters, `CHARACTERS` is
    better.
    """
    count = max((longest_count(body) for body in syntax.rules.values()), default=0)
    if count > _LONG_COUNT:
        return Route(LEXEMES, f"counts to {count}")
    if any(excluded(body) for body in EpsilonFree(syntax).rules.values()):
        return Route(LEXEMES, "free keys beside named ones")
    if len(syntax.rules) > _SMALL_RULES:
        return Route(LEXEMES, f"{len(syntax.rules)} rules")
    return SMALL


def longest_count(expression: Expression) -> int:
    """The highest bound of a counted repetition; 0 if there is none."""
    if isinstance(expression, Chars):
        return 0
    own = 0
    if isinstance(expression, Repeat):
        own = max(expression.least, expression.most or 0)
    return max([own if own > 1 else 0, *(longest_count(part) for part in parts_of(expression))])
