"""Splits a grammar into lexemes, for parsers that read text through a lexer.

Such a lexer is greedy: it ends a lexeme only if no lexeme can continue. It reads the grammar
exactly if, wherever a lexeme may end, no byte both starts what may follow and continues a lexeme.
`cut` makes lexemes as long as possible and proves this, splitting those that violate it. If that
fails, every lexeme is a single character, and none of those is a prefix of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from overlap_spec.grammar.automata.charset import ALL, negate
from overlap_spec.grammar.parsing.exclusions import structure_key
from overlap_spec.grammar.parsing.expressions import (
    Chain,
    Chars,
    Either,
    Expression,
    Ref,
    Repeat,
    parts_of,
    references,
)
from overlap_spec.grammar.parsing.network import Bytes, Closures, Network
from overlap_spec.grammar.parsing.regular import EpsilonFree, chain

_MOST_SETS = 5_000
"""Beyond this many sets of states, the proof is given up and lexemes are characters."""
_MOST_ROUNDS = 16
_QUOTE = ((0x22, 0x22),)
_MARKS = [((ord(mark), ord(mark)),) for mark in "{}[],:"]


@dataclass
class Lexemes:
    """A grammar over lexemes.

    Attributes:
        parsed: Rules over lexemes and each other; empty if `root` itself is one lexeme.
        lexed: Lexemes and the rules that they refer to; none is recursive.
        names: The lexemes among `lexed`.
        by_characters: Whether every lexeme is a single character.
    """

    parsed: dict[str, Expression] = field(default_factory=dict)
    lexed: dict[str, Expression] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    by_characters: bool = False


def cut(grammar: EpsilonFree, recursive: frozenset[str]) -> Lexemes:
    """Split a grammar into the longest lexemes that a greedy lexer reads exactly.

    Args:
        grammar: Has a rule `root`.
        recursive: Rules that reach a cycle of rules.

    Raises:
        GrammarError: the grammar is too large.
    """
    if "root" not in recursive:
        return Lexemes({}, dict(grammar.rules), ["root"])
    split: dict[object, int] = {}
    for _ in range(_MOST_ROUNDS):
        made = _Cutter(grammar, recursive, True, split).cut()
        against = conflict(made)
        if not against:
            return made
        shapes: dict[object, int] = {}
        for name, at in against.items():
            if at and isinstance(made.lexed[name], Chain):
                shapes[structure_key(made.lexed[name])] = at
        if not shapes:
            break
        split |= shapes
    return _Cutter(grammar, recursive, False, {}).cut()


class _Cutter:
    def __init__(
        self, grammar: EpsilonFree, recursive: frozenset[str], whole: bool, split: dict[object, int]
    ) -> None:
        self.grammar = grammar
        self.recursive = recursive
        self.whole = whole
        self.split = split
        # A rule with quotes of its own is more than one JSON token.
        self.leaves = {
            name
            for name, body in grammar.rules.items()
            if not references(body) and not _has_quote(body)
        }
        self.made = Lexemes(by_characters=not whole)
        self.known: dict[object, str] = {}

    def cut(self) -> Lexemes:
        for name, body in self.grammar.rules.items():
            if self.whole and name in self.leaves:
                self.made.lexed[name] = body
            elif name not in self.grammar.plain:
                self.made.parsed[name] = self._parsed(body)
        return self.made

    def _parsed(self, expression: Expression) -> Expression:
        if isinstance(expression, Chars):
            return self._lexeme(expression)
        if isinstance(expression, Chain):
            return self._chain(expression)
        if isinstance(expression, Ref):
            if self.whole and expression.name in self.leaves:
                return self._lexeme(expression)
            plain = self.grammar.plain.get(expression.name)
            return Repeat(Ref(plain), 0, 1) if plain else expression
        if isinstance(expression, Repeat):
            if self.whole and self._is_regular(expression):
                return self._lexeme(expression)
            return Repeat(self._parsed(expression.body), expression.least, expression.most)
        return Either(tuple(self._parsed(way) for way in expression.ways))

    def _chain(self, expression: Chain) -> Expression:
        runs = self._runs(expression.parts)
        made = [
            self._lexeme(run) if self.whole and self._is_regular(run) else self._parsed(run)
            for run in runs
        ]
        return chain(made)

    def _runs(self, parts: tuple[Expression, ...]) -> list[Expression]:
        """Join neighbours as JSON tokens are: quoted strings, and punctuation between values.

        A heuristic: right for JSON, harmless for other languages, since `conflict` checks it.
        """
        found: list[Expression] = []
        run: list[Expression] = []
        quoted = False
        for part in parts:
            is_mark = isinstance(part, Chars)
            is_quote = _is_quote(part)
            alone = isinstance(part, Chars) and part.members in _MARKS
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

    def _is_regular(self, expression: Expression) -> bool:
        """Whether an expression consists of characters and of rules of characters only.

        Deeper expressions are parsed even if they are regular, so that equal brackets are equal
        lexemes everywhere.
        """
        if isinstance(expression, Repeat) and expression.most != 1:
            return isinstance(expression.body, Chars)
        if isinstance(expression, Ref):
            return expression.name in self.leaves
        return all(self._is_regular(part) for part in parts_of(expression))

    def _joined(self, run: list[Expression]) -> list[Expression]:
        return run if all(map(self._is_optional, run)) else [chain(run)]

    def _is_optional(self, part: Expression) -> bool:
        if isinstance(part, Ref):
            return part.name in self.grammar.plain
        return isinstance(part, Repeat) and part.least == 0

    def _lexeme(self, expression: Expression) -> Expression:
        if isinstance(expression, Repeat) and expression.least == 0:
            # A lexeme must not be empty.
            return Repeat(self._lexeme(Repeat(expression.body, 1, expression.most)), 0, 1)
        if isinstance(expression, Ref) and expression.name in self.grammar.plain:
            return Repeat(self._lexeme(Ref(self.grammar.plain[expression.name])), 0, 1)
        key = structure_key(expression)
        if key in self.split:
            parts, at = parts_of(expression), self.split[key]
            joined = self._joined(list(parts[:at])) + self._joined(list(parts[at:]))
            return chain([self._lexeme(part) for part in joined])
        if key not in self.known:
            self.known[key] = f"lexeme-{len(self.known)}"
            self.made.names.append(self.known[key])
            self.made.lexed[self.known[key]] = expression
        return Ref(self.known[key])


def _is_quote(part: Expression) -> bool:
    return isinstance(part, Chars) and part.members == _QUOTE


def _has_quote(expression: Expression) -> bool:
    return _is_quote(expression) or any(_has_quote(part) for part in parts_of(expression))


def conflict(lexemes: Lexemes) -> dict[str, int]:
    """Lexemes that a greedy lexer would continue although another may end and be followed.

    Returns:
        Lexeme → index of the part with which it continues, if it is a chain; 0 if it cannot be
        split before that part. Empty if and only if the lexer is proved to read the grammar
        exactly.
    """
    network = Network(loops=True)
    flat = _Flat(lexemes.lexed)
    starts: dict[str, int] = {}
    ends: dict[int, list[str]] = {}
    owners: list[tuple[str, int]] = []
    quoted: list[str] = []
    for name in lexemes.names:
        whole = flat.of(name)
        if _is_quoted(whole):
            quoted.append(name)
            starts[name] = starts.get(quoted[0], -1)
            if len(quoted) > 1:
                continue
            whole = _QUOTED
        node = starts[name] = network.node()
        for i, part in enumerate(whole.parts if isinstance(whole, Chain) else (whole,)):
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


_QUOTED = Chain(
    (
        Chars(_QUOTE),
        Repeat(
            Either(
                (
                    Chars(negate(((0x22, 0x22), (0x5C, 0x5C)))),
                    Chain((Chars(((0x5C, 0x5C),)), Chars(ALL))),
                )
            ),
            0,
            None,
        ),
        Chars(_QUOTE),
    )
)


def _is_quoted(expression: Expression) -> bool:
    """Whether `_QUOTED` matches everything that an expression does, and may replace it.

    There may be hundreds of such lexemes, one for the keys of each object.
    """
    parts = expression.parts if isinstance(expression, Chain) else ()
    if len(parts) < 2 or not (_is_quote(parts[0]) and _is_quote(parts[-1])):
        return False
    network = Network(loops=True)
    start = network.node()
    end = network.add(Chain(parts[1:-1]), start)
    seen = {(start, False)}
    pending = [(start, False)]
    while pending:
        node, escaped = pending.pop()
        if node == end and escaped:
            return False
        found = [(target, escaped) for target in network.steps[node]]
        for low, high, target in network.bytes[node]:
            if not escaped and (low <= 0x22 <= high or (low <= 0x5C <= high and low < high)):
                return False
            if escaped and high > 0x7F:
                return False
            found.append((target, not escaped and low == 0x5C))
        pending += [place for place in found if place not in seen]
        seen.update(found)
    return True


class _Flat:
    """Inlines references."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        self.rules = rules
        self.done: dict[str, Expression] = {}

    def of(self, name: str) -> Expression:
        if name not in self.done:
            self.done[name] = self._flat(self.rules[name])
        return self.done[name]

    def _flat(self, expression: Expression) -> Expression:
        if isinstance(expression, Ref):
            return self.of(expression.name)
        if isinstance(expression, Repeat):
            return Repeat(self._flat(expression.body), expression.least, expression.most)
        if isinstance(expression, Chars):
            return expression
        inner = tuple(self._flat(part) for part in parts_of(expression))
        return Chain(inner) if isinstance(expression, Chain) else Either(inner)


class _Follows:
    """FOLLOW sets in bytes. No rule is nullable, so neighbours alone decide them."""

    def __init__(self, rules: dict[str, Expression], firsts: dict[str, Bytes]) -> None:
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

    def _first(self, expression: Expression) -> tuple[Bytes, bool]:
        """FIRST set in bytes, and whether the expression is nullable."""
        if isinstance(expression, Ref):
            return self.firsts[expression.name], False
        if isinstance(expression, Repeat):
            found, empty = self._first(expression.body)
            return found, empty or expression.least == 0
        found, empty = 0, isinstance(expression, Chain)
        for part in parts_of(expression):
            first, may_be_empty = self._first(part)
            if isinstance(expression, Chain):
                found |= first if empty else 0
                empty = empty and may_be_empty
            else:
                found, empty = found | first, empty or may_be_empty
        return found, empty

    def _visit(self, expression: Expression, after: Bytes) -> None:
        if isinstance(expression, Ref):
            self.follows[expression.name] |= after
        elif isinstance(expression, Chain):
            for part in reversed(expression.parts):
                self._visit(part, after)
                first, empty = self._first(part)
                after = first | (after if empty else 0)
        elif isinstance(expression, Repeat):
            again = self._first(expression.body)[0] if expression.most != 1 else 0
            self._visit(expression.body, after | again)
        else:
            for way in parts_of(expression):
                self._visit(way, after)
