"""Picks the fastest backend for a grammar; all that accept it enforce the same language.

Measured with a vocabulary of 131,072 tokens on schemas of JSONSchemaBench. xgrammar has the
cheapest masks on small grammars, and walks a tree in one call. But inside a JSON string of any text
a mask takes it 40 µs and a tree 200, against 9 and 50, and its compile 13 ms, against 1. With
counted repetitions, ambiguous patterns or objects with many keys it compiles for seconds, and some
rows then cost 60 ms and more. llguidance compiles in milliseconds and has even mask times, as long
as its lexemes are longer than a character.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlap_spec.grammar.automata.dfa import Dfa
from overlap_spec.grammar.automata.escape import plain
from overlap_spec.grammar.automata.regex_ast import CharClass, Node, Repetition, parts_of
from overlap_spec.grammar.ir.slice_hints import is_free
from overlap_spec.grammar.ir.syntax import Syntax
from overlap_spec.grammar.ir.tokens import Except, Token

_SMALL_RULES = 24
# Beyond, xgrammar's masks are the slower ones: 1 ms in `[a-z]{1,4}`, 8 ms in `[a-z]{1,8}`.
_LONG_COUNT = 3
# Beyond, xgrammar compiles an automaton for seconds.
_MOST_STATES = 600


@dataclass(frozen=True)
class Route:
    """Backends, in the order in which they are tried.

    Attributes:
        reason: Why the first one was picked; a short text for statistics.
    """

    backends: tuple[str, ...]
    reason: str


FOREIGN = Route(("xgrammar",), "a construct of xgrammar's own")
CHARACTERS = Route(("xgrammar", "outlines", "llguidance"), "no lexemes longer than a character")
LEXEMES = ("llguidance", "xgrammar", "outlines")
# llguidance would read it by characters, and may find that too much in the midst of a text.
AUTOMATON = Route(CHARACTERS.backends, "an automaton that is too large for an expression")
SMALL = Route(("xgrammar", "llguidance", "outlines"), "a small grammar")


def route(syntax: Syntax) -> Route:
    """The route of a grammar, before its lexemes are known.

    If it starts with llguidance and all lexemes turn out to be single characters, `CHARACTERS` is
    better.
    """
    if any(map(_is_large, syntax.tokens.values())):
        return AUTOMATON
    rules = syntax.loops.rules
    count = max(map(longest_count, rules.values()), default=0)
    if count > _LONG_COUNT:
        return Route(LEXEMES, f"counts to {count}")
    if any(isinstance(token.language, Except | Dfa) for token in syntax.tokens.values()):
        # An automaton, too, is written for xgrammar in rules, and a mask inside takes it 80 ms.
        return Route(LEXEMES, "free keys beside named ones, or of patterns")
    if any(map(_is_free_string, syntax.tokens.values())):
        return Route(LEXEMES, "strings of any text")
    if len(rules) > _SMALL_RULES:
        return Route(LEXEMES, f"{len(rules)} rules")
    return SMALL


def _is_large(token: Token) -> bool:
    """Whether a token is an automaton that becomes no expression, and that xgrammar reads soon."""
    language = token.language
    return isinstance(language, Dfa) and len(language.moves) <= _MOST_STATES and token.node is None


def _is_free_string(token: Token) -> bool:
    """Whether a token is of any text, inside a JSON string."""
    return token.escape is not plain and token.node is not None and is_free(token.node)


def longest_count(node: Node) -> int:
    """The highest bound of a counted repetition; 0 if there is none."""
    own = max(node.least, node.most or 0) if isinstance(node, Repetition) else 0
    inside = (longest_count(part) for part in parts_of(node) if not isinstance(part, CharClass))
    return max(own if own > 1 else 0, *inside, 0)
