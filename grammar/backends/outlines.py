"""The outlines-core backend: a precomputed table of states by tokens.

The library compiles one regular expression, so grammars that nest without bound are refused. Three
of its peculiarities are handled here. It drops later alternatives once an earlier one matches
(`a|ab` never matches "ab") unless the expression ends in `\\z`. With that, it has no start state
for nullable expressions, so the empty text is removed and handled separately. And it supports one
stop token.

Its guide raises on an illegal token and must reserve memory for rollback, so states are kept here.
The library lists allowed tokens one by one; each state's row is made once and cached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import outlines_core

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex_ast import Node, Ref, Repetition, parts_of
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher, Row
from overlap_spec.grammar.dialects.rust import to_regex
from overlap_spec.grammar.ir.epsilon import EpsilonFree
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.matching.states import Automaton, StateMatcher
from overlap_spec.grammar.rows import row_of
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary

# With more, the table takes minutes and gigabytes to build.
_MOST_CLASSES = 5_000
_ROW_CACHE_BYTES = 32 * 2**20


class OutlinesBackend(Backend):
    """Compiles regular grammars with outlines-core for the exact bytes of a vocabulary."""

    name = "outlines"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(vocabulary.text):
            if text:
                ids.setdefault(text, []).append(token)
        self._table = outlines_core.Vocabulary(vocabulary.stop_ids[0], ids)

    @bounded_depth()
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        syntax = lower(grammar).plain
        plain = EpsilonFree(syntax)
        refusal = _refusal(syntax, plain)
        if refusal:
            raise GrammarError(
                f"outlines cannot read this {grammar.kind} grammar: {refusal}", grammar.kind
            )
        try:
            index = outlines_core.Index(_whole(plain), self._table)
        except ValueError as error:
            raise GrammarError(
                f"outlines cannot compile this {grammar.kind} grammar: {error}", grammar.kind
            ) from error
        return _Compiled(index, self.vocabulary, plain.root_nullable)

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:
        try:
            index = outlines_core.Index.from_binary(data[1:])
        except (TypeError, ValueError) as error:
            raise GrammarError(
                f"not a {grammar.kind} grammar that this outlines-core serialised: {error}",
                grammar.kind,
            ) from error
        return _Compiled(index, self.vocabulary, bool(data[0]))


def _refusal(syntax: Syntax, plain: EpsilonFree) -> str | None:
    if "root" in syntax.recursive:
        return "it nests without bound, and the library supports regular expressions only"
    if "root" not in plain.rules:
        return "it allows the empty text only"
    counts: dict[str, int] = {}

    def classes(node: Node) -> int:
        if isinstance(node, Ref):
            name = node.name
            if name not in counts:
                counts[name] = classes(syntax.rules[name])
            return counts[name]
        inner = sum(classes(part) for part in parts_of(node))
        if isinstance(node, Repetition):
            return inner * max(1, node.least, node.most or 0)
        return inner if parts_of(node) else 1

    if classes(syntax.rules["root"]) > _MOST_CLASSES:
        return f"with repetitions expanded it has more than {_MOST_CLASSES} characters"
    return None


def _whole(grammar: EpsilonFree) -> str:
    known: dict[str, str] = {}

    def rule(name: str) -> str:
        if name not in known:
            known[name] = to_regex(grammar.rules[name], rule)
        return known[name]

    return f"(?:{rule('root')})\\z"


class _Compiled(CompiledGrammar, Automaton[int]):
    backend = "outlines"
    # Before the first token. The library's own start state may recur later, where the empty text
    # is not accepted.
    start = -1

    def __init__(
        self, index: outlines_core.Index, vocabulary: Vocabulary, may_be_empty: bool
    ) -> None:
        self.vocabulary = vocabulary
        self._index = index
        self._data: bytes = bytes([may_be_empty]) + index.__reduce__()[1][0]
        self._first: int = index.get_initial_state()
        self._may_be_empty = may_be_empty
        self._lock = threading.Lock()
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._most_rows = max(16, _ROW_CACHE_BYTES // (4 * vocabulary.words))

    @property
    def memory_bytes(self) -> int:
        return 6 * len(self._data) + _ROW_CACHE_BYTES

    def matcher(self) -> Matcher:
        return StateMatcher(self)

    def serialize(self) -> bytes:
        return self._data

    def after(self, state: int, token: int) -> int | None:
        found: int | None = self._index.get_next_state(self._own(state), token)
        return found

    def is_final(self, state: int) -> bool:
        may_be_empty = state == self.start and self._may_be_empty
        return may_be_empty or bool(self._index.is_final_state(self._own(state)))

    def row(self, state: int) -> Row:
        with self._lock:
            if state in self._rows:
                self._rows.move_to_end(state)
                return self._rows[state]
        legal = self._index.get_allowed_tokens(self._own(state)) or ()
        row = row_of(legal, self.vocabulary.words) & ~self.vocabulary.stop_row
        with self._lock:
            self._rows[state] = row
            if len(self._rows) > self._most_rows:
                self._rows.popitem(last=False)
        return row

    def _own(self, state: int) -> int:
        return self._first if state == self.start else state


BACKEND = OutlinesBackend
