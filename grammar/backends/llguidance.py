"""The llguidance backend: an Earley parser over lexemes, which are matched by derivatives.

Grammars are translated to Lark, split into lexemes so that the library's greedy lexer reads them
exactly. A regular grammar is a single lexeme. The library compiles within its parser limits and has
no serialised form: the Lark text is stored and sent instead.

Its calls release the GIL. A matcher stays in an error state, so it is never fed a token that its
mask forbids, and errors are checked after each call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from overlap_spec.errors import GrammarError, GrammarFailed
from overlap_spec.grammar import walk
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Links, Matcher, Row
from overlap_spec.grammar.dialects.lark import to_lark
from overlap_spec.grammar.lowering import lower
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
# Marks of the library's own limits in its errors.
OVER_LIMIT = ("too many", "too complex", "too large", "limit")


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
        return self.deserialize(grammar, to_lark(lower(grammar)).text.encode())

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:
        lark = data.decode()
        library = LLMatcher(self._tokenizer, lark, log_level=0, limits=LLParserLimits())
        if library.is_error():
            raise GrammarError(
                f"llguidance cannot compile this {grammar.kind} grammar: {_reason(library)}",
                grammar.kind,
            )
        return _Compiled(library, self.vocabulary, data)


class _Tokenizer:
    """The library's view of a vocabulary. It encodes only to force tokens, which is off."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_ids[0]
        self.tokens = list(vocabulary.text)
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("tokens are never forced")


class _Compiled(CompiledGrammar):
    backend = "llguidance"

    def __init__(self, library: LLMatcher, vocabulary: Vocabulary, lark: bytes) -> None:
        self._library = library
        self._vocabulary = vocabulary
        self._lark = lark

    @property
    def memory_bytes(self) -> int:
        # An estimate: the library does not say. Its lexer adds states in use, of 1-2 kB each.
        return 64 * 2**10 + 20 * len(self._lark)

    def matcher(self) -> Matcher:
        return _LLGuidanceMatcher(self._library, self._vocabulary, [], False)

    def serialize(self) -> bytes:
        return self._lark


class _LLGuidanceMatcher(Matcher):
    def __init__(
        self, fresh: LLMatcher, vocabulary: Vocabulary, history: list[int], terminated: bool
    ) -> None:
        self.vocabulary = vocabulary
        self._fresh = fresh
        self._library = fresh.deep_copy()
        self._history = history
        # Stop tokens are tracked here: the library accepts one without a change of state.
        self._terminated = terminated

    def accept(self, token_id: int) -> bool:
        if self._terminated or not 0 <= token_id < self.vocabulary.size:
            return False
        if token_id in self.vocabulary.stop_ids:
            self._terminated = accepted = self.is_complete
        elif self.vocabulary.text[token_id]:
            accepted = self._library.try_consume_tokens([token_id]) == 1
            self._check()
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
        self._library = self._again()

    def fill(self, row: Row) -> None:
        walk.check_row(row, self.vocabulary.words)
        if self._terminated:
            row.fill(0)
            return
        self._fill(row)

    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        walk.check_tree(tokens, first_child, next_sibling, rows, self.vocabulary.words)
        rows.fill(0)
        if self._terminated:
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
            if not walk.allowed(rows[parent], token) or token in self.vocabulary.stop_ids:
                continue
            # A copy costs as much as there is text. Behind a state's last child it is not needed
            # any more, unless it is the root's, so a chain takes one.
            last = sibling[node] == -1 and parent != 0
            own = library if last else library.deep_copy()
            if own.try_consume_tokens([token]) != 1:
                raise RuntimeError(f"token {token} is allowed by its mask row but was rejected")
            self._mask(own, rows[node])
            open_nodes.append((child[node], node, own))

    def forced_bytes(self, path: Sequence[int] = ()) -> bytes:
        if self._terminated:
            return b""
        library = self._library
        if path:
            library = library.deep_copy()
            if library.try_consume_tokens(list(path)) != len(path):
                raise RuntimeError(f"llguidance rejected legal tokens: {list(path)}")
        forced: bytes = library.compute_ff_bytes()
        return forced

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
        copy = _LLGuidanceMatcher(
            self._fresh, self.vocabulary, self._history.copy(), self._terminated
        )
        copy._library = self._library.deep_copy()
        return copy

    def _fill(self, row: Row) -> None:
        if not self._mask(self._library, row):
            self._library = self._again()

    def _mask(self, library: LLMatcher, row: Row) -> bool:
        """Write the mask of a state; False if the library is now in an error state, as it is if no
        token of the vocabulary is legal."""
        library.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if library.is_error():
            if not _reason(library).startswith("NoExtension"):
                raise _failure(library)
            row.fill(0)
            return False
        row &= self.vocabulary.text_row
        if library.is_accepting():
            row |= self.vocabulary.stop_row
        return True

    def _again(self) -> LLMatcher:
        """A library matcher at this position, rebuilt from the start.

        The library's own rollback is not exact: inside a lexeme, masks then differ from those of
        a matcher that only went forward. A copy costs 1.5 µs, and each token half of that.
        """
        library = self._fresh.deep_copy()
        if library.try_consume_tokens(self._history) != len(self._history):
            raise RuntimeError("llguidance rejected tokens that it had accepted before")
        return library

    def _check(self) -> None:
        if self._library.is_error():
            raise _failure(self._library)


def _failure(library: LLMatcher) -> Exception:
    """The error of a library matcher: its grammar's fault where it is over one of its limits."""
    reason = _reason(library)
    if any(mark in reason for mark in OVER_LIMIT):
        return GrammarFailed(
            f"the grammar is too much for llguidance: {reason}; simplify it (long repetitions are "
            "the usual cause)"
        )
    return RuntimeError(f"llguidance failed: {reason}")


def _reason(library: LLMatcher) -> str:
    return json.dumps(library.get_error().partition("\n")[0])[1:-1]


BACKEND = LLGuidanceBackend
