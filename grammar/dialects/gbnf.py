"""A grammar in xgrammar 0.2.8's dialect of GBNF.

The library compiles a `Regex("…")` terminal into one automaton, which makes masks a thousand times
cheaper than rules. But it merges states wrongly if two alternatives share a prefix (`(c(c|)|c)`
accepts "ccc") or if `?` follows a loop. So only deterministic tokens become terminals, with `?`
written as an alternation. Those that count or are not deterministic become automata, one rule per
state, a character followed by the next state, which is as cheap; those that are too large for
that, rules. A start rule that is referred to loses tokens (`root ::= "c" root "a"? | "a"` after
"c"), so the start rule is never one of these.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache

from overlap_spec.grammar.automata.charset import UTF8_LENGTHS, Ranges, intersect
from overlap_spec.grammar.automata.dfa import Dfa, TooLargeError, from_node
from overlap_spec.grammar.automata.escape import plain
from overlap_spec.grammar.automata.regex_ast import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Ref,
    Repetition,
    is_deterministic,
    references,
)
from overlap_spec.grammar.ir.route import longest_count
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth, states
from overlap_spec.grammar.ir.tokens import Token

# The library pays for each state of an automaton that counts.
_MOST_COUNTING = 600


@bounded_depth()
def to_gbnf(syntax: Syntax) -> str:
    """Write a grammar as GBNF, whose start rule is `root`.

    Raises:
        GrammarError: it is nested too deep.
    """
    return _Writer(syntax).text


class _Writer:
    def __init__(self, syntax: Syntax) -> None:
        self.names = {name: f"r{i}" for i, name in enumerate([*syntax.rules, *syntax.tokens])}
        self.lines: list[str] = []
        if any("root" in references(body) for body in syntax.rules.values()):
            self.lines.append(f"root ::= {self.names['root']}")
        else:
            self.names["root"] = "root"
        for name, body in syntax.rules.items():
            self.lines.append(f"{self.names[name]} ::= {self.rule(body)}")
        for name, token in syntax.tokens.items():
            self.token(self.names[name], token)
        self.text = "\n".join(self.lines) + "\n"

    def token(self, name: str, token: Token) -> None:
        """Add the rules of a token."""
        node, made = token.node, None
        if isinstance(token.language, Dfa):
            if node is None or not is_deterministic(node):
                made = states(name, token.language, token.escape)
        else:
            assert node is not None
            counts = longest_count(node)
            if counts or not is_deterministic(node):
                with suppress(TooLargeError):
                    dfa = from_node(node)
                    if not dfa.is_empty and not (counts and len(dfa.moves) > _MOST_COUNTING):
                        made = states(name, dfa, plain)
        if made is not None:
            self.names |= dict(zip(made, made, strict=True))
            self.lines += [f"{state} ::= {self.rule(body)}" for state, body in made.items()]
        elif node is not None and is_deterministic(node):
            self.lines.append(f"{name} ::= Regex({_literal(to_regex(node))})")
        elif node is not None:
            self.lines.append(f"{name} ::= {self.rule(node)}")

    def rule(self, node: Node) -> str:
        """An expression as the body of a rule."""
        if isinstance(node, CharClass):
            return _class(node.members, r"\U{:08x}")
        if isinstance(node, Ref):
            return self.names[node.name]
        if isinstance(node, Concat):
            return self.sequence(node) or '""'
        if isinstance(node, Alternation):
            return f"({' | '.join(map(self.rule, node.ways))})"
        least, most = node.least, node.most
        if most == 0:
            return '""'
        body = f"({self.rule(node.body)})"
        if (least, most) == (0, 1):
            return f"{body}?"
        if most is None:
            return f"{body}{{{least},}}" if least > 1 else f"{body}{'*+'[least]}"
        return f"{body}{{{least},{most}}}"

    def sequence(self, node: Concat) -> str:
        """A sequence, with neighbouring single characters as one literal."""
        found: list[str] = []
        text = ""
        for part in node.parts:
            if isinstance(part, CharClass) and _is_char(part.members):
                text += chr(part.members[0][0])
                continue
            found += [_literal(text)] if text else []
            text = ""
            found.append(self.rule(part))
        return " ".join([*found, _literal(text)] if text else found)


def _is_char(members: Ranges) -> bool:
    return len(members) == 1 and members[0][0] == members[0][1]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def to_regex(node: Node) -> str:
    """An expression without references, in the syntax of a `Regex("…")` terminal."""
    if isinstance(node, CharClass):
        return _regex_class(node.members)
    if isinstance(node, Concat):
        return "".join(to_regex(part) for part in node.parts)
    if isinstance(node, Alternation):
        return f"({'|'.join(to_regex(way) for way in node.ways)})"
    assert isinstance(node, Repetition)
    body, least, most = f"({to_regex(node.body)})", node.least, node.most
    if most is None:
        return body * (least - 1) + f"{body}+" if least else f"{body}*"
    if most == 0:
        return ""
    if most == 1:
        return body if least else f"({to_regex(node.body)}|)"
    counted = f"{body}{{{max(least, 1)},{most}}}"
    return counted if least else f"({counted}|)"


@lru_cache(8192)
def _regex_class(ranges: Ranges) -> str:
    """A class for a non-empty set, one for each UTF-8 length: if a range spans lengths, the library
    also accepts overlong encodings."""
    lengths = (intersect(ranges, (span,)) for span in UTF8_LENGTHS)
    classes = [_class(part, r"\u{{{:x}}}") for part in lengths if part]
    return classes[0] if len(classes) == 1 else f"({'|'.join(classes)})"


@lru_cache(8192)
def _class(ranges: Ranges, point: str) -> str:
    spans = (
        point.format(low) + (f"-{point.format(high)}" if high > low else "") for low, high in ranges
    )
    return f"[{''.join(spans)}]"
