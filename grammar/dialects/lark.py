"""A grammar in llguidance's dialect of Lark, over lexemes that its greedy lexer reads exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from overlap_spec.grammar.automata.regex_ast import (
    Concat,
    Node,
    Ref,
    Repetition,
    parts_of,
    references,
)
from overlap_spec.grammar.dialects.rust import to_regex
from overlap_spec.grammar.ir.lexemes import Lexemes, cut
from overlap_spec.grammar.ir.slice_hints import later, letters_first, straight
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth

_DEEPEST = 5
_OPTIONS = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class Lark:
    """A grammar in llguidance's dialect of Lark.

    Attributes:
        depth: How many names and groups stand inside one another, at most.
        by_characters: Whether its lexemes are single characters; a mask then costs milliseconds.
    """

    text: str
    depth: int
    by_characters: bool = False


@lru_cache(maxsize=2)
@bounded_depth()
def to_lark(syntax: Syntax) -> Lark:
    """Write a grammar as Lark.

    Raises:
        GrammarError: it is too large, or nested too deep.
    """
    lexemes = cut(syntax)
    depth = _depth({**lexemes.parsed, **lexemes.lexed})
    return Lark(_LarkWriter(lexemes).text, depth, lexemes.by_characters)


def _depth(rules: Mapping[str, Node]) -> int:
    """Of rules read depth first, each where it is first referred to."""
    deepest, seen = 0, set[str]()
    pending: list[tuple[Node, int]] = [(Ref("root"), 0)] if "root" in rules else []
    while pending:
        node, depth = pending.pop()
        if isinstance(node, Ref):
            if node.name in seen:
                continue
            seen.add(node.name)
            inside: tuple[Node, ...] = (rules[node.name],)
        else:
            inside = parts_of(node) if references(node) else ()
        deepest = max(deepest, depth)
        pending += [(part, depth + 1) for part in reversed(inside)]
    return deepest


class _LarkWriter:
    """Writes a grammar over lexemes as Lark: rules in lower case, lexemes in upper case."""

    def __init__(self, lexemes: Lexemes) -> None:
        self.names = {name: f"r{i}" for i, name in enumerate(lexemes.parsed)}
        self.names |= {name: f"L{i}" for i, name in enumerate(lexemes.lexed)}
        self.rules = {**lexemes.parsed, **lexemes.lexed}
        self.excepts = lexemes.excepts
        own_names = self.names.copy()
        self.lines: list[str] = []
        for name in lexemes.names:
            self._beside(name)
        used = dict.fromkeys(["root"] if "root" in self.rules else [])
        pending = list(used)
        while pending:
            name = pending.pop()
            own, written = own_names[name], self._but(name)
            inner = set() if written else references(self.rules[name])
            self.lines.append(f"{own}: {written or self._of(own, self.rules[name], 0)}")
            new = sorted(inner - used.keys(), reverse=True)
            used |= dict.fromkeys(new)
            pending += new
        starts = [*(self.names[name] for name in used if name == "root")]
        starts += ['""'] if lexemes.may_be_empty else []
        self.text = _OPTIONS + "\n".join([f"start: {' | '.join(starts)}", *self.lines]) + "\n"

    def _beside(self, lexeme: str) -> None:
        """Add lexemes for some of a lexeme's texts; rules then refer to any of them."""
        names = [self.names[lexeme]]
        for hint in (later, straight):
            found = hint(self.rules[lexeme], self.rules)
            if found is not None:
                names.append(f"{hint.__name__.upper()}_{names[0]}")
                self.lines.append(f"{names[-1]}: {self._of(names[-1], found, 0)}")
        if len(names) > 1:
            self.names[lexeme] = f"any_{names[0].lower()}"
            self.lines.append(f"{self.names[lexeme]}: {' | '.join(names)}")

    def _but(self, name: str) -> str | None:
        """A lexeme that leaves out some texts, by the library's operator for it; None of others.

        Covers the quotes around it too; otherwise the library does not profit.
        """
        node = self.rules[name]
        parts = [Ref(name)] if name in self.excepts else list(parts_of(node))
        inside = [part.name for part in parts if isinstance(part, Ref)]
        if len(inside) != 1 or inside[0] not in self.excepts:
            return None
        at = parts.index(Ref(inside[0]))
        if any(references(part) for part in (*parts[:at], *parts[at + 1 :])):
            return None
        left, base, right = (
            "".join(to_regex(part, str) for part in some)
            for some in (parts[:at], [self.rules[inside[0]]], parts[at + 1 :])
        )
        texts = "|".join(to_regex(text, str) for text in self.excepts[inside[0]])
        return f"/{left}{base}{right}/" + (f" & ~/{left}(?:{texts}){right}/" if texts else "")

    def _of(self, owner: str, node: Node, depth: int) -> str:
        if not references(node):
            return f"/{to_regex(letters_first(node), self.names.__getitem__)}/"
        if isinstance(node, Ref):
            return self.names[node.name]
        if depth == _DEEPEST:
            # The library does not parse deeply nested parentheses.
            name = f"{owner}_{len(self.lines)}"
            self.lines.append("")
            at = len(self.lines) - 1
            self.lines[at] = f"{name}: {self._of(name, node, 0)}"
            return name
        if isinstance(node, Repetition):
            most = "" if node.most is None else node.most
            body = self._of(owner, node.body, depth + 1)
            return f"({body}){{{node.least},{most}}}"
        mark = " " if isinstance(node, Concat) else " | "
        inside = mark.join(self._of(owner, p, depth + 1) for p in parts_of(node))
        return f"({inside})" if inside else '""'
