"""The llguidance backend: an Earley parser over lexemes, which are matched by derivatives.

Grammars are translated to Lark, split into lexemes so that the library's greedy lexer reads them
exactly. A regular grammar is a single lexeme. The library compiles within its parser limits and has
no serialised form: the Lark text is stored and sent instead.

Its calls release the GIL. A matcher stays in an error state, so it is never fed a token that its
mask forbids, and errors are checked after each call.

All matchers of a grammar share a lexer, which keeps each state that a text has led to. One that is
full, or whose step took too long, fails all of them: so the states are a cache here. A short
grammar's lexer starts small, and one with more room takes a full one's place, where its matchers
read their texts anew.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from overlap_spec.errors import GrammarError, GrammarFailed
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Links, Matcher, Row
from overlap_spec.grammar.dialects.lark import to_lark
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.matching import walk
from overlap_spec.grammar.rows import allowed
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary

_LETTERS = "[A-Za-z]"
_WORDS = r"[A-Za-z0-9 \x80-\u2027\u202a-\U0010ffff]"
# A pattern's dot does not match the two line ends of Unicode.
_INSIDE = r'[^"\\\x00-\x1f\x7f\u2028\u2029]'
# The library allows all tokens of a slice at once if it can show that the lexeme continues with any
# of them, and walks the others. A token belongs to the first slice that it matches: narrow classes
# serve names, patterns and keys, and short texts serve the last characters of a count. Each slice
# costs a large vocabulary 30 ms when it is read, and is a trie that shares no walk with the others.
_SLICES = [
    f"{_LETTERS}{{1,16}}",
    f"{_WORDS}{{1,16}}",
    *(f"{_INSIDE}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 12, 16)),
    f"{_INSIDE}+",
]
# Marks of the library's own limits in its errors, and of those of a lexer.
OVER_LIMIT = ("too many", "too complex", "too large", "limit")
OF_LEXER, OF_STATES = "lexer error", "too many states"
# States of a grammar's lexer: of four schemas in five the first are enough, of one in a hundred the
# second are not. A longer Lark text begins with the second: half of those fill the first, and to be
# read anew within a step takes up to 0.2 s.
STATES = (512, 4096, 32_768)
STATE_BYTES, SHORT_BYTES = 768, 4096
# The library reads names and groups inside one another by recursion. On a stack of 8 MiB, which
# threads have, 3,900 are read, and 4,800 end the process.
MOST_NESTED = 3_100
# The library walks along what is forced until its lexer fails: some 4 ms for as many bytes.
MOST_FORCED = 2**12
T = TypeVar("T")


class LLGuidanceBackend(Backend):
    """Compiles Lark with llguidance for the exact bytes of a vocabulary."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        wrapper = TokenizerWrapper(_Tokenizer(vocabulary))
        self._tokenizer = LLTokenizer(
            wrapper,
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.stop_ids),
            slices=_SLICES if self.makes_masks else [],
        )

    def warm(self) -> None:
        # The library's first mask of all takes milliseconds longer.
        row = np.zeros(self.vocabulary.words, np.int32)
        self.compile(Grammar.json_schema({"type": "string"})).matcher().fill(row)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        lark = to_lark(lower(grammar))
        if lark.depth > MOST_NESTED:
            raise GrammarError(
                f"llguidance cannot compile this {grammar.kind} grammar: {lark.depth} of its names "
                f"and groups stand inside one another, at most {MOST_NESTED} may (a pattern that "
                "may begin anywhere, beside a large maxLength, has three a character)",
                grammar.kind,
            )
        return self.deserialize(grammar, lark.text.encode())

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:
        return _Compiled(self._tokenizer, self.vocabulary, grammar.kind, data)


class _Tokenizer:
    """The library's view of a vocabulary. It encodes only to force tokens, which is off."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_ids[0]
        self.tokens = list(vocabulary.text)
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("tokens are never forced")


class _LexerFailed(Exception):
    """A lexer is full, or its step took too long: it is of no use to any matcher any more."""


class _Compiled(CompiledGrammar):
    backend = "llguidance"

    def __init__(
        self, tokenizer: LLTokenizer, vocabulary: Vocabulary, kind: str, lark: bytes
    ) -> None:
        self.vocabulary = vocabulary
        self._tokenizer, self._kind, self._lark = tokenizer, kind, lark
        self._lock = threading.Lock()
        self._size = int(len(lark) > SHORT_BYTES)
        self._library = self._read()

    @property
    def memory_bytes(self) -> int:
        # The library does not say: what its lexer has room for.
        return 64 * 2**10 + 20 * len(self._lark) + STATES[self._size] * STATE_BYTES

    def matcher(self) -> Matcher:
        return _LLGuidanceMatcher(self, [], False)

    def serialize(self) -> bytes:
        return self._lark

    def fresh(self, instead: LLMatcher | None = None) -> LLMatcher:
        """The library's matcher at the start, to be copied.

        Args:
            instead: One whose lexer failed.
        """
        with self._lock:
            if self._library is instead:
                self._size = min(self._size + 1, len(STATES) - 1)
                self._library = self._read()
            return self._library

    def _read(self) -> LLMatcher:
        """Read the grammar, with as much room as its first state needs."""
        while True:
            limits = LLParserLimits(max_lexer_states=STATES[self._size])
            found = LLMatcher(self._tokenizer, self._lark.decode(), log_level=0, limits=limits)
            if not found.is_error():
                return found
            if OF_STATES not in _reason(found) or self._size == len(STATES) - 1:
                raise GrammarError(
                    f"llguidance cannot compile this {self._kind} grammar: {_reason(found)}",
                    self._kind,
                )
            self._size += 1


class _LLGuidanceMatcher(Matcher):
    def __init__(self, compiled: _Compiled, history: list[int], terminated: bool) -> None:
        self.vocabulary = compiled.vocabulary
        self._compiled = compiled
        self._fresh = compiled.fresh()
        self._library = self._fresh.deep_copy()
        self._history = history
        # Stop tokens are tracked here: the library accepts one without a change of state.
        self._terminated = terminated

    def accept(self, token_id: int) -> bool:
        if self._terminated or not 0 <= token_id < self.vocabulary.size:
            return False
        if token_id in self.vocabulary.stop_ids:
            self._terminated = accepted = self.is_complete
        elif self.vocabulary.text[token_id]:
            accepted = self._retried(lambda: self._consume(self._library, [token_id]))
        else:
            accepted = False
        if accepted:
            self._history.append(token_id)
        return accepted

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._history):
            raise ValueError(f"cannot roll back {count} of {len(self._history)} tokens")
        if not count:
            return
        self._terminated = False
        del self._history[-count:]
        self._retried(self._restart)

    def fill(self, row: Row) -> None:
        walk.check_row(row, self.vocabulary.words)
        if self._terminated:
            row.fill(0)
            return
        self._retried(lambda: self._fill(row))

    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        walk.check_tree(tokens, first_child, next_sibling, rows, self.vocabulary.words)
        rows.fill(0)
        if self._terminated:
            return

        def fill() -> None:
            if self._fill_chain(tokens, first_child, next_sibling, rows):
                return
            self._fill(rows[0])
            drafted, child, sibling = tokens.tolist(), first_child.tolist(), next_sibling.tolist()
            open_nodes = [(child[0], 0, self._library)]
            while open_nodes:
                node, parent, library = open_nodes.pop()
                if node == -1:
                    continue
                open_nodes.append((sibling[node], parent, library))
                token = drafted[node]
                if not allowed(rows[parent], token) or token in self.vocabulary.stop_ids:
                    continue
                # A copy costs as much as there is text. Behind a state's last child it is not
                # needed any more, unless it is the root's, so a chain takes one.
                last = sibling[node] == -1 and parent != 0
                own = library if last else library.deep_copy()
                if not self._consume(own, [token]):
                    raise RuntimeError(f"token {token} is allowed by its mask row but was rejected")
                self._mask(own, rows[node])
                open_nodes.append((child[node], node, own))

        self._retried(fill)

    def _fill_chain(
        self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row
    ) -> bool:
        """The masks of a chain in one call, beside which other threads run: between calls each
        waits for the interpreter. False where it is no chain, or the library fails: node by node it
        is told why.

        Args:
            rows: All zero, and so again where it fails.
        """
        if next_sibling.max() >= 0 or np.count_nonzero(first_child < 0) > 1:
            return False
        text_row, stops = self.vocabulary.text_row, self.vocabulary.stop_ids
        of_text = lambda token: allowed(text_row, token) and token not in stops  # noqa: E731
        drafts = list(takewhile(of_text, tokens[1:].tolist()))
        if not drafts:
            return False
        ahead = self._library.deep_copy()
        ahead.unsafe_compute_mask_ptr_with_draft_token(rows.ctypes.data, rows[0].nbytes, drafts)
        if ahead.is_error():
            rows.fill(0)
            return False
        rows &= text_row
        return True

    def forced_bytes(self, path: Sequence[int] = ()) -> bytes:
        if self._terminated:
            return b""
        reach, text = self._compiled.reach, self.vocabulary.text
        tokens = (*self._history, *path) if reach and reach.each else ()
        size = sum(len(text[token]) for token in tokens)
        if reach is None or reach.longest(size) > MOST_FORCED:
            return walk.forced_bytes(self, path)

        def forced() -> bytes:
            library = self._library
            if path:
                library = library.deep_copy()
                if not self._consume(library, path):
                    raise RuntimeError(f"llguidance rejected legal tokens: {list(path)}")
            found: bytes = library.compute_ff_bytes()
            return found

        return self._retried(forced)

    @property
    def is_terminated(self) -> bool:
        return self._terminated

    @property
    def is_complete(self) -> bool:
        return self._terminated or bool(self._library.is_accepting())

    @property
    def accepted_tokens(self) -> int:
        return len(self._history)

    def fork(self) -> Matcher:
        copy = _LLGuidanceMatcher(self._compiled, self._history.copy(), self._terminated)
        copy._fresh, copy._library = self._fresh, self._library.deep_copy()
        return copy

    def _retried(self, call: Callable[[], T]) -> T:
        """The result of a call; if the lexer fails, of one with an empty lexer.

        Raises:
            GrammarFailed: an empty one with the most room failed too.
        """
        try:
            return call()
        except _LexerFailed as first:
            failure = first
        for _ in STATES:
            self._fresh = self._compiled.fresh(instead=self._fresh)
            try:
                self._restart()
                return call()
            except _LexerFailed as again:
                failure = again
        raise _over_limit(str(failure))

    def _fill(self, row: Row) -> None:
        if not self._mask(self._library, row):
            self._restart()

    def _mask(self, library: LLMatcher, row: Row) -> bool:
        """Write a state's mask; False if the library has an error now: no token is legal."""
        library.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if library.is_error():
            if not _reason(library).startswith("NoExtension"):
                raise _failure(_reason(library))
            row.fill(0)
            return False
        row &= self.vocabulary.text_row
        if library.is_accepting():
            row |= self.vocabulary.stop_row
        return True

    def _restart(self) -> None:
        """Rebuild the library's matcher at this position, from the start.

        The library's own rollback is not exact: inside a lexeme, masks then differ from those of
        a matcher that only went forward. A copy costs 1.5 µs, and each token half of that.
        """
        library = self._fresh.deep_copy()
        if not self._consume(library, self._history):
            raise RuntimeError("llguidance rejected tokens that it had accepted before")
        self._library = library

    def _consume(self, library: LLMatcher, tokens: Sequence[int]) -> bool:
        """Feed a library's matcher tokens; False if one is not legal."""
        if library.try_consume_tokens(list(tokens)) == len(tokens):
            return True
        if not library.is_error():
            # With a lexer that has failed nothing is legal: a mask tells.
            row = np.zeros(self.vocabulary.words, np.int32)
            self._mask(library.deep_copy(), row)
            return False
        raise _failure(_reason(library))


def _failure(reason: str) -> Exception:
    """The error of a library's matcher: its grammar's fault where it is over one of its limits."""
    if OF_LEXER in reason:
        return _LexerFailed(reason)
    if any(mark in reason for mark in OVER_LIMIT):
        return _over_limit(reason)
    return RuntimeError(f"llguidance failed: {reason}")


def _over_limit(reason: str) -> GrammarFailed:
    return GrammarFailed(
        f"the grammar is too much for llguidance: {reason}; simplify it (long repetitions are the "
        "usual cause)"
    )


def _reason(library: LLMatcher) -> str:
    return json.dumps(library.get_error().partition("\n")[0])[1:-1]


BACKEND = LLGuidanceBackend
