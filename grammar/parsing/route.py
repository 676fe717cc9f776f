"""Which backend reads a grammar best, where all that can read it read the same.

Measured at a vocabulary of 131,072 tokens on schemas of JSONSchemaBench. xgrammar's masks are the
cheapest on small grammars, and it walks a tree in one call; but it compiles for seconds where
texts are counted, where patterns are ambiguous and where objects have many keys, and then some of
its rows cost 60 ms and more. llguidance compiles in milliseconds and has even rows, as long as
its lexemes are longer than a character.
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
    """Backends in the order in which they are tried.

    Attributes:
        backends: Names, the best first.
        reason: Why the first one; a short text for statistics.
    """

    backends: tuple[str, ...]
    reason: str


FOREIGN = Route(("xgrammar",), "a construct of xgrammar's own")
CHARACTERS = Route(("xgrammar", "outlines", "llguidance"), "no lexemes longer than a character")
LEXEMES = ("llguidance", "xgrammar", "outlines")
SMALL = Route(("xgrammar", "llguidance", "outlines"), "a small grammar")


def route(syntax: Syntax) -> Route:
    """The route of a grammar, before its lexemes are known.

    Where it begins with llguidance and only single characters turn out to be lexemes,
    `CHARACTERS` is the better one.
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
    """The highest bound of a counted repetition, 0 where nothing is counted."""
    if isinstance(expression, Chars):
        return 0
    own = 0
    if isinstance(expression, Repeat):
        own = max(expression.least, expression.most or 0)
    return max([own if own > 1 else 0, *(longest_count(part) for part in parts_of(expression))])
