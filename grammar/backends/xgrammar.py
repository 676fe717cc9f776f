"""The xgrammar backend: the library's Earley matcher and its C++ tree walk.

Schemas and regular expressions are lowered to EBNF by this project: the library's own converter
puts spaces after separators inside free-form values, ignores many keywords, and allows control
characters and unescaped quotes in strings with a length or a pattern.

Its calls take numpy arrays through DLPack and release the GIL. It ignores strides and DLPack
refuses read-only arrays, so arrays are checked or copied here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Links, Matcher, Row
from overlap_spec.grammar.dialects.gbnf import to_gbnf
from overlap_spec.grammar.ir.epsilon import EpsilonFree
from overlap_spec.grammar.isolation.import_stubs import awaiting, doing_without
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.matching import walk
from overlap_spec.grammar.parsing.ebnf import ForeignConstruct
from overlap_spec.grammar.rows import allowed
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.memory import trim

with awaiting("transformers"), doing_without("torch"), doing_without("transformers"):
    import xgrammar as xgr

# A grammar that compiles faster than this is serialised as its text: writing and reading its
# compiled form may take longer, 5 s of one that compiles in 0.1. The library releases the GIL while
# it compiles.
QUICK_COMPILE_S = 0.25
SOURCE = b"ebnf\n"
# Reading a compiled form takes ten times its bytes for a moment, which the allocator would keep.
LARGE_FORM = 2**20
# The library's walk along forced bytes has no bound: some 14 ms and 8 MiB for as many.
MOST_FORCED = 2**15


class XGrammarBackend(Backend):
    """Compiles EBNF with xgrammar for the exact bytes of a vocabulary."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        # The library treats an empty token as special: never legal inside a grammar.
        self._info = xgr.TokenizerInfo(
            list(vocabulary.text),
            xgr.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.stop_ids),
            add_prefix_space=False,
        )
        threads = max(1, min(8, (os.cpu_count() or 1) // 2))
        self._compiler = xgr.GrammarCompiler(self._info, max_threads=threads, cache_enabled=False)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            syntax = lower(grammar)
        except ForeignConstruct:
            if grammar.kind != "ebnf":
                raise
            return self._compile(grammar, grammar.source)
        if grammar.kind == "ebnf":
            # The library crashes the process if a rule is nullable and left-recursive.
            syntax = EpsilonFree(syntax).syntax
        return self._compile(grammar, to_gbnf(syntax))

    def _compile(self, grammar: Grammar, text: str) -> CompiledGrammar:
        start = time.perf_counter()
        try:
            compiled = self._compiler.compile_grammar(text)
        except RuntimeError as error:
            raise GrammarError(
                f"{grammar.kind} grammar cannot be compiled: {_reason(error)}", grammar.kind
            ) from error
        again = text if time.perf_counter() - start < QUICK_COMPILE_S else None
        return _Compiled(compiled, self.vocabulary, again)

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:
        if data.startswith(SOURCE):
            return self._compile(grammar, data.removeprefix(SOURCE).decode())
        try:
            compiled = xgr.CompiledGrammar.deserialize_json(data.decode(), self._info)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(
                f"not a {grammar.kind} grammar that this xgrammar serialised: {_reason(error)}",
                grammar.kind,
            ) from error
        if len(data) > LARGE_FORM:
            trim()
        return _Compiled(compiled, self.vocabulary, None)


class _Compiled(CompiledGrammar):
    """``again``: the source text if compiling it is fast enough to replace the serialised form."""

    backend = "xgrammar"

    def __init__(
        self, compiled: xgr.CompiledGrammar, vocabulary: Vocabulary, again: str | None
    ) -> None:
        self._compiled, self._again, self.vocabulary = compiled, again, vocabulary
        self._memory_bytes = int(compiled.memory_size_bytes)

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    def matcher(self) -> Matcher:
        return _XGrammarMatcher(self, xgr.GrammarMatcher(self._compiled))

    def serialize(self) -> bytes:
        if self._again is not None:
            return SOURCE + self._again.encode()
        text: str = self._compiled.serialize_json()
        return text.encode()


class _XGrammarMatcher(Matcher):
    def __init__(self, compiled: _Compiled, library: xgr.GrammarMatcher) -> None:
        self._compiled, self._library, self.vocabulary = compiled, library, compiled.vocabulary
        self._history: list[int] = []
        self._size = 0

    def accept(self, token_id: int) -> bool:
        # The library rejects these too, but prints a warning for each.
        if self.is_terminated or not allowed(self.vocabulary.text_row, token_id):
            return False
        accepted = bool(self._library.accept_token(token_id))
        if accepted:
            self._history.append(token_id)
            self._size += len(self.vocabulary.text[token_id])
        return accepted

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._history):
            raise ValueError(f"cannot roll back {count} of {len(self._history)} tokens")
        if count:
            self._library.rollback(count)
            self._size -= self._bytes_of(self._history[-count:])
            del self._history[-count:]

    def fill(self, row: Row) -> None:
        walk.check_row(row, self.vocabulary.words)
        if self.is_terminated:
            row.fill(0)
            return
        self._library.fill_next_token_bitmask(row)
        row &= self.vocabulary.text_row

    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= self.vocabulary.size:
            walk.fill_tree(self, tokens, first_child, next_sibling, rows)
            return
        walk.check_tree(tokens, first_child, next_sibling, rows, self.vocabulary.words)
        rows.fill(0)
        if self.is_terminated:
            return
        try:
            self._library.traverse_draft_tree(
                _exportable(first_child), _exportable(next_sibling), _exportable(tokens), rows
            )
        except BaseException:
            rows.fill(0)
            self._replay()
            raise
        rows &= self.vocabulary.text_row

    def forced_bytes(self, path: Sequence[int] = ()) -> bytes:
        if self.is_terminated:
            return b""
        size, reach = self._size + self._bytes_of(path), self._compiled.reach
        if reach is None or reach.longest(size) > MOST_FORCED:
            return walk.forced_bytes(self, path)
        accepted = 0
        try:
            for token in path:
                if not self._library.accept_token(token):
                    raise RuntimeError(f"xgrammar rejected the legal token {token}")
                accepted += 1
            return str(self._library.find_jump_forward_string()).encode()
        except UnicodeDecodeError as inside:
            # The library makes text of them, which bytes inside a character are not.
            return bytes(inside.object)
        finally:
            if accepted:
                self._library.rollback(accepted)

    @property
    def is_terminated(self) -> bool:
        return bool(self._library.is_terminated())

    @property
    def is_complete(self) -> bool:
        return bool(self._library.is_completed())

    @property
    def accepted_tokens(self) -> int:
        return len(self._history)

    def fork(self) -> Matcher:
        copy = _XGrammarMatcher(self._compiled, self._library.fork())
        copy._history, copy._size = self._history.copy(), self._size
        return copy

    def _bytes_of(self, tokens: Sequence[int]) -> int:
        return sum(len(self.vocabulary.text[token]) for token in tokens)

    def _replay(self) -> None:
        # The library's depth in the tree when it raised is unknown.
        self._library.reset()
        for token in self._history:
            if not self._library.accept_token(token):
                raise RuntimeError(f"xgrammar rejected token {token} that it had accepted before")


def _exportable(links: Links) -> Links:
    return np.require(links, np.int64, ("C", "W"))


def _reason(error: Exception) -> str:
    text = str(error).strip()
    head, mark, tail = text.partition(": ")
    return tail if mark and head.startswith("[") else text


BACKEND = XGrammarBackend
