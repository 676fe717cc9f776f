"""Splits a grammar into lexemes, for parsers that read text through a lexer.

Such a lexer is greedy: it ends a lexeme only if no lexeme can continue. It reads the grammar
exactly if, wherever a lexeme may end, no byte both starts what may follow and continues a lexeme.
`cut` makes lexemes as long as possible and proves this, splitting those that violate it. If that
fails, every lexeme is a single character, and none of those is a prefix of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from overlap_spec.grammar.automata.charset import ALL, intersect, negate
from overlap_spec.grammar.automata.regex_ast import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Ref,
    Repetition,
    mapped,
    parts_of,
    references,
)
from overlap_spec.grammar.ir.epsilon import EpsilonFree
from overlap_spec.grammar.ir.network import Bytes, Closures, Network
from overlap_spec.grammar.ir.rules import sequence
from overlap_spec.grammar.ir.syntax import Syntax

_MOST_SETS = 5_000
"""Beyond this many sets of states, the proof is given up and lexemes are characters."""
_MOST_ROUNDS = 16
_QUOTE, _BACKSLASH = ((0x22, 0x22),), ((0x5C, 0x5C),)
_SPECIAL = _QUOTE + _BACKSLASH
_MARKS = [((ord(mark), ord(mark)),) for mark in "{}[],:"]


@dataclass
class Lexemes:
    """A grammar over lexemes.

    Attributes:
        parsed: Rules over lexemes and each other; empty if `root` itself is one lexeme.
        lexed: Lexemes and the rules that they refer to; none is recursive.
        names: The lexemes among `lexed`.
        excepts: As in `Syntax`, of those in `lexed`.
        quoted: As in `Syntax`, of those in `lexed`.
    """

    parsed: dict[str, Node] = field(default_factory=dict)
    lexed: dict[str, Node] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    excepts: dict[str, tuple[Node, ...]] = field(default_factory=dict)
    quoted: set[str] = field(default_factory=set)
    may_be_empty: bool = False
    by_characters: bool = False


def cut(syntax: Syntax) -> Lexemes:
    """Split a grammar into the longest lexemes that a greedy lexer reads exactly.

    Raises:
        GrammarError: the grammar is too large.
    """
    if "root" not in syntax.loops.recursive:
        return _one(EpsilonFree(syntax.plain))
    return _longest(EpsilonFree(syntax.loops)) or _Cutter(EpsilonFree(syntax.plain), None).cut()


def _one(grammar: EpsilonFree) -> Lexemes:
    names = ["root"] if "root" in grammar.rules else []
    return Lexemes({}, dict(grammar.rules), names, may_be_empty=grammar.root_nullable)


def _longest(grammar: EpsilonFree) -> Lexemes | None:
    """The longest lexemes that the proof allows; None if they are characters."""
    split: dict[Node, int] = {}
    for _ in range(_MOST_ROUNDS):
        made = _Cutter(grammar, split).cut()
        against = conflict(made)
        if not against:
            return made
        shapes: dict[Node, int] = {}
        for name, at in against.items():
            if at and isinstance(made.lexed[name], Concat):
                shapes[made.lexed[name]] = at
        if not shapes:
            break
        split |= shapes
    return None


class _Cutter:
    def __init__(self, grammar: EpsilonFree, split: dict[Node, int] | None) -> None:
        self.grammar = grammar
        self.whole = split is not None
        self.split = split or {}
        # A rule with quotes of its own is more than one JSON token.
        self.leaves = {
            name
            for name, body in grammar.rules.items()
            if not references(body) and (name in grammar.quoted or not _has_quote(body))
        }
        self.made = Lexemes(
            quoted=grammar.quoted, may_be_empty=grammar.root_nullable, by_characters=not self.whole
        )
        self.known: dict[Node, str] = {}

    def cut(self) -> Lexemes:
        for name, body in self.grammar.rules.items():
            if self.whole and name in self.leaves:
                self.made.lexed[name] = body
                if name in self.grammar.excepts:
                    self.made.excepts[name] = self.grammar.excepts[name]
            elif name not in self.grammar.plain:
                self.made.parsed[name] = self._parsed(body)
        return self.made

    def _parsed(self, node: Node) -> Node:
        if isinstance(node, CharClass):
            return self._lexeme(node)
        if isinstance(node, Concat):
            return self._chain(node)
        if isinstance(node, Ref):
            if self.whole and node.name in self.leaves:
                return self._lexeme(node)
            plain = self.grammar.plain.get(node.name)
            return Repetition(Ref(plain), 0, 1) if plain else node
        if isinstance(node, Repetition) and self.whole and self._is_regular(node):
            return self._lexeme(node)
        return mapped(node, self._parsed)

    def _chain(self, node: Concat) -> Node:
        runs = self._runs(node.parts)
        made = [
            self._lexeme(run) if self.whole and self._is_regular(run) else self._parsed(run)
            for run in runs
        ]
        return sequence(*made)

    def _runs(self, parts: tuple[Node, ...]) -> list[Node]:
        """Join neighbours as JSON tokens are: quoted strings, and punctuation between values.

        A heuristic: right for JSON, harmless for other languages, since `conflict` checks it.
        """
        found: list[Node] = []
        run: list[Node] = []
        quoted = False
        for part in parts:
            is_mark = isinstance(part, CharClass)
            is_quote = _is_quote(part)
            alone = isinstance(part, CharClass) and part.members in _MARKS
            joins = quoted or (is_mark and not is_quote and not alone and bool(run))
            if not (self.whole and self._is_regular(part)):
                found += [*self._joined(run), part]
                run, quoted = [], False
                continue
            if joins:
                run.append(part)
            else:
                found += self._joined(run)
                run = [part]
            quoted ^= is_quote
            if not quoted and (is_quote or alone or not is_mark):
                found += self._joined(run)
                run = []
        return found + self._joined(run)

    def _is_regular(self, node: Node) -> bool:
        """Whether an expression consists of characters and of rules of characters only.

        Deeper expressions are parsed even if they are regular, so that equal brackets are equal
        lexemes everywhere.
        """
        if isinstance(node, CharClass):
            return True
        if isinstance(node, Repetition) and node.most != 1:
            return isinstance(node.body, CharClass)
        if isinstance(node, Ref):
            return node.name in self.leaves
        return all(self._is_regular(part) for part in parts_of(node))

    def _joined(self, run: list[Node]) -> list[Node]:
        return run if all(map(self._is_optional, run)) else [sequence(*run)]

    def _is_optional(self, part: Node) -> bool:
        if isinstance(part, Ref):
            return part.name in self.grammar.plain
        return isinstance(part, Repetition) and part.least == 0

    def _lexeme(self, node: Node) -> Node:
        if isinstance(node, Repetition) and node.least == 0:
            # A lexeme must not be empty.
            return Repetition(self._lexeme(Repetition(node.body, 1, node.most)), 0, 1)
        if isinstance(node, Ref) and node.name in self.grammar.plain:
            return Repetition(self._lexeme(Ref(self.grammar.plain[node.name])), 0, 1)
        if node in self.split:
            parts, at = parts_of(node), self.split[node]
            joined = self._joined(list(parts[:at])) + self._joined(list(parts[at:]))
            return sequence(*(self._lexeme(part) for part in joined))
        if node not in self.known:
            self.known[node] = f"lexeme-{len(self.known)}"
            self.made.names.append(self.known[node])
            self.made.lexed[self.known[node]] = node
        return Ref(self.known[node])


def _is_quote(part: Node) -> bool:
    return isinstance(part, CharClass) and part.members == _QUOTE


def _has_quote(node: Node) -> bool:
    return _is_quote(node) or any(_has_quote(part) for part in parts_of(node))


def conflict(lexemes: Lexemes) -> dict[str, int]:
    """Lexemes that a greedy lexer would continue although another may end and be followed.

    Returns:
        Lexeme → index of the part with which it continues, if it is a chain; 0 if it cannot be
        split before that part. Empty if and only if the lexer is proved to read the grammar
        exactly.
    """
    network = Network(most_count=1)

    @cache
    def of(name: str) -> Node:
        return flat(lexemes.lexed[name])

    def flat(node: Node) -> Node:
        return of(node.name) if isinstance(node, Ref) else mapped(node, flat)

    starts: dict[str, int] = {}
    ends: dict[int, list[str]] = {}
    owners: list[tuple[str, int]] = []
    quoted: list[str] = []
    for name in lexemes.names:
        if _is_quoted(lexemes.lexed[name], lexemes.quoted):
            quoted.append(name)
            starts[name] = starts.get(quoted[0], -1)
            if len(quoted) > 1:
                continue
        whole = _QUOTED if quoted[-1:] == [name] else of(name)
        node = starts[name] = network.node()
        for i, part in enumerate(whole.parts if isinstance(whole, Concat) else (whole,)):
            node = network.add_whole(part, node)
            owners += [(name, i)] * (len(network.bytes) - len(owners))
        ends[node] = quoted if whole is _QUOTED else [name]
    closures = Closures(network)
    firsts = {name: closures.first(start) for name, start in starts.items()}
    follows = _Follows(lexemes.parsed, firsts).run()
    pending = [closures.of(frozenset(starts.values()))]
    seen = set(pending)
    found: dict[str, int] = {}
    while pending:
        here = pending.pop()
        after = 0
        for node in here & ends.keys():
            for name in ends[node]:
                after |= follows[name]
        for members, targets in closures.moves(here):
            if members & after:
                found |= (owners[target] for target in targets)
                continue
            there = closures.of(targets)
            if there not in seen:
                seen.add(there)
                pending.append(there)
        if len(seen) > _MOST_SETS:
            return dict.fromkeys(lexemes.names, 0)
    return found


_QUOTED = Concat(
    (
        CharClass(_QUOTE),
        Repetition(
            Alternation(
                (CharClass(negate(_SPECIAL)), Concat((CharClass(_BACKSLASH), CharClass(ALL))))
            ),
            0,
            None,
        ),
        CharClass(_QUOTE),
    )
)


def _is_quoted(lexeme: Node, quoted: set[str]) -> bool:
    """Whether a lexeme is a JSON string, for which `_QUOTED` may stand.

    There may be hundreds of them, one for each key.
    """
    parts = lexeme.parts if isinstance(lexeme, Concat) else ()
    if len(parts) < 2 or not (_is_quote(parts[0]) and _is_quote(parts[-1])):
        return False
    inside = iter(parts[1:-1])
    for part in inside:
        token = part.body if isinstance(part, Repetition) else part
        if isinstance(token, Ref) and token.name in quoted:
            continue
        if not isinstance(part, CharClass):
            return False
        escapes = part.members == _BACKSLASH
        if (next(inside, None) is None) if escapes else intersect(part.members, _SPECIAL):
            return False
    return True


class _Follows:
    """FOLLOW sets in bytes. No rule is nullable, so neighbours alone decide them."""

    def __init__(self, rules: dict[str, Node], firsts: dict[str, Bytes]) -> None:
        self.rules = rules
        self.firsts = dict.fromkeys(rules, 0) | firsts
        self.follows = dict.fromkeys(self.firsts, 0)

    def run(self) -> dict[str, Bytes]:
        before: dict[str, Bytes] = {}
        while before != self.firsts:
            before = dict(self.firsts)
            for name, body in self.rules.items():
                self.firsts[name] |= self._first(body)[0]
        before = {}
        while before != self.follows:
            before = dict(self.follows)
            for name, body in self.rules.items():
                self._visit(body, self.follows[name])
        return self.follows

    def _first(self, node: Node) -> tuple[Bytes, bool]:
        """FIRST set in bytes, and whether the expression is nullable."""
        if isinstance(node, Ref):
            return self.firsts[node.name], False
        if isinstance(node, Repetition):
            found, empty = self._first(node.body)
            return found, empty or node.least == 0
        found, empty = 0, isinstance(node, Concat)
        for part in parts_of(node):
            first, may_be_empty = self._first(part)
            if isinstance(node, Concat):
                found |= first if empty else 0
                empty = empty and may_be_empty
            else:
                found, empty = found | first, empty or may_be_empty
        return found, empty

    def _visit(self, node: Node, after: Bytes) -> None:
        if isinstance(node, Ref):
            self.follows[node.name] |= after
        elif isinstance(node, Concat):
            for part in reversed(node.parts):
                self._visit(part, after)
                first, empty = self._first(part)
                after = first | (after if empty else 0)
        elif isinstance(node, Repetition):
            again = self._first(node.body)[0] if node.most != 1 else 0
            self._visit(node.body, after | again)
        else:
            for way in parts_of(node):
                self._visit(way, after)
