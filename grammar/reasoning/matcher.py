"""Matches free text up to a model's end-of-thinking marker, then a grammar.

Wraps any backend's matcher. Inside the thinking, a mask row is one copy: everything except stop and
special tokens is legal, apart from the few tokens that complete the marker and continue with what
the grammar forbids. Exact by bytes: the marker may be one token, several, or inside one.

Same language as the EBNF of `lowering.composite`, with two exceptions: line breaks after the marker
count as the gap first, even if the grammar could begin with one, and the thinking's bytes need not
be whole characters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import CompiledGrammar, Links, Matcher, Row
from overlap_spec.grammar.matching import walk
from overlap_spec.grammar.reasoning.reply import MOST_GAP
from overlap_spec.grammar.reasoning.tables import BREAK, Patch, marker_tokens
from overlap_spec.grammar.rows import tokens_of
from overlap_spec.grammar.spec import Grammar

# Phases of a matcher: undecided whether there is thinking, inside it, in the gap after it, inside
# the inner grammar.
_HEAD, _THINK, _GAP, _INNER = range(4)


def wrap(inner: CompiledGrammar, grammar: Grammar) -> CompiledGrammar:
    """Wrap a compiled grammar for a grammar of kind `after_thinking`.

    Takes about a millisecond, and some 60 ms for the first grammar with the same markers with a
    vocabulary of 131,072 (call `tables.marker_tokens` in advance if that matters).
    """
    source = json.loads(grammar.source)
    return ReasoningGrammar(inner, source["end"].encode(), (source["begin"] or "").encode())


class _Place(NamedTuple):
    """A phase, and the progress in a marker or the gap."""

    phase: int
    at: int


class ReasoningGrammar(CompiledGrammar):
    """A compiled grammar after thinking.

    Args:
        end: Bytes of the marker that ends the thinking.
        begin: Bytes of the marker that opens it, if thinking is optional; else empty.
    """

    def __init__(self, inner: CompiledGrammar, end: bytes, begin: bytes) -> None:
        self.inner = inner
        self.backend, self.reason = inner.backend, inner.reason
        start = inner.matcher()
        self.vocabulary = start.vocabulary
        self.tokens = marker_tokens(self.vocabulary, end, begin)
        self.may_be_empty = start.is_complete
        self._start_row = np.zeros(self.vocabulary.words, np.int32)
        start.fill(self._start_row)
        self._bytes = self._first_bytes()
        self._known: dict[bytes, bool] = {b"": True}
        self.think = [
            Patch.of((t, self._follows(0, rest)) for t, rest in found.items())
            for found in self.tokens.crossing
        ]
        self.closing = [self._closing_row(at) for at in range(len(end))]
        self.gap_rows = [self._gap_row(at) for at in range(MOST_GAP + 1)]
        self.head = [
            Patch.of((t, rest is None or self._thinks(rest)) for t, rest in found.items())
            for found in self.tokens.heads
        ]

    @property
    def memory_bytes(self) -> int:
        patches = sum(patch.nbytes for patch in (*self.think, *self.head))
        rows = sum(row.nbytes for row in (*self.gap_rows, *self.closing))
        return self.inner.memory_bytes + patches + rows

    def matcher(self) -> Matcher:
        return ReasoningMatcher(self)

    def enter(self, text: bytes) -> Matcher | None:
        """An inner matcher after `text`; None if the grammar cannot begin with it."""
        tokens = self.tokens.segment(text)
        matcher = self.inner.matcher()
        if tokens is None or not all(map(matcher.accept, tokens)):
            return None
        return matcher

    def gap(self, at: int, text: bytes) -> tuple[int, bytes]:
        """Line breaks of the gap used after `text`, and the rest of `text`."""
        rest = text.lstrip(BREAK)
        taken = min(len(text) - len(rest), MOST_GAP - at)
        return at + taken, text[taken:]

    def _first_bytes(self) -> set[int]:
        texts, legal = self.vocabulary.text, tokens_of(self._start_row).tolist()
        return {texts[token][0] for token in legal if texts[token]}

    def _begins(self, text: bytes) -> bool:
        """Whether the inner grammar can begin with a text."""
        if text not in self._known:
            self._known[text] = text[0] in self._bytes and self.enter(text) is not None
        return self._known[text]

    def _follows(self, at: int, text: bytes) -> bool:
        return self._begins(self.gap(at, text)[1])

    def _thinks(self, text: bytes) -> bool:
        _, rest = self.tokens.scan(0, text)
        return rest is None or self._follows(0, rest)

    def _closing_row(self, at: int) -> Row:
        """The tokens that go on with the end marker, of which so many bytes are read: the model's
        own token for the rest where there is one, else those that begin it too."""
        rest, texts = self.tokens.end[at:], self.vocabulary.text
        row = np.zeros(self.vocabulary.words, np.int32)
        legal: dict[int, bool] = {}
        if rest not in self.tokens.by_text:
            inside = (rest[:size] for size in range(1, len(rest)))
            parts = (self.tokens.by_text.get(part) for part in inside)
            legal = {part: True for part in parts if part is not None}
        for token, behind in self.tokens.crossing[at].items():
            if texts[token].startswith(rest):
                legal[token] = self._follows(0, behind)
        Patch.of(legal.items()).apply(row)
        row.flags.writeable = False
        return row

    def _gap_row(self, at: int) -> Row:
        row = self._start_row.copy()
        if at < MOST_GAP:
            texts = self.vocabulary.text
            legal = ((t, self._follows(at, texts[t])) for t in self.tokens.breaks)
            Patch.of(legal).apply(row)
        row.flags.writeable = False
        return row


class ReasoningMatcher(Matcher):
    """One request's position before, inside or after its thinking."""

    def __init__(self, compiled: ReasoningGrammar) -> None:
        self._compiled = compiled
        self._budget: int | None = None
        self.vocabulary = compiled.vocabulary
        self._place = _Place(_HEAD if compiled.head else _THINK, 0)
        # The place before each token, up to the one that entered the inner grammar.
        self._before: list[_Place] = []
        self._inner: Matcher | None = None
        self._entered = 0
        # The inner grammar from the very start, while there may be no thinking. It has accepted
        # the same tokens as this matcher, or has rejected one.
        self._direct = compiled.inner.matcher() if compiled.head else None

    def limit(self, budget: int) -> None:
        """Let the thinking have so many tokens; behind them comes the end marker.

        Raises:
            GrammarError: the vocabulary has no tokens for the marker.
        """
        if self._compiled.tokens.segment(self._compiled.tokens.end) is None:
            raise GrammarError("the vocabulary has no tokens for the end marker", "thinking_budget")
        self._budget = budget

    def accept(self, token_id: int) -> bool:
        if self._inner is not None:
            return self._inner.accept(token_id)
        if not 0 <= token_id < self.vocabulary.size:
            return False
        before, phase = self._place, self._place.phase
        text = self.vocabulary.text[token_id]
        if phase == _HEAD:
            accepted = self._accept_head(token_id, text)
        elif phase == _GAP:
            accepted = self._accept_gap(token_id, text)
        else:
            accepted = bool(text) and self._accept_thought(before.at, text)
        if accepted:
            self._before.append(before)
        return accepted

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self.accepted_tokens:
            raise ValueError(f"cannot roll back {count} of {self.accepted_tokens} tokens")
        if self._inner is not None:
            inside = min(count, self._inner.accepted_tokens - self._entered)
            self._inner.rollback(inside)
            count -= inside
        if count == 0:
            return
        self._place, self._inner = self._before[-count], None
        del self._before[-count:]
        if self._direct is not None:
            self._direct.rollback(max(self._direct.accepted_tokens - len(self._before), 0))

    @property
    def is_free(self) -> bool:
        return self._inner is None and self._place.phase == _THINK

    def fill(self, row: Row) -> None:
        if self._inner is not None:
            self._inner.fill(row)
            return
        walk.check_row(row, self.vocabulary.words)
        phase, at = self._place
        if phase == _THINK:
            if self._is_spent(0):
                row[:] = self._compiled.closing[at]
                return
            row[:] = self._compiled.tokens.free_row
            self._compiled.think[at].apply(row)
        elif phase == _GAP:
            row[:] = self._compiled.gap_rows[at]
        else:
            direct = self._alive()
            if direct is None:
                row.fill(0)
            else:
                direct.fill(row)
            self._compiled.head[at].apply(row)

    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        if self._inner is not None:
            self._inner.fill_tree(tokens, first_child, next_sibling, rows)
            return
        if self._place.phase == _THINK and not self._is_spent(len(tokens)):
            walk.check_tree(tokens, first_child, next_sibling, rows, self.vocabulary.words)
            states = self._thinking(tokens, first_child, next_sibling)
            if states is not None:
                rows.fill(0)
                rows[list(states)] = self._compiled.tokens.free_row
                for node, state in states.items():
                    self._compiled.think[state].apply(rows[node])
                return
        walk.fill_tree(self, tokens, first_child, next_sibling, rows)

    def forced_bytes(self, path: Sequence[int] = ()) -> bytes:
        """The inner grammar's, once it has begun; the text before it is free."""
        return b"" if self._inner is None else self._inner.forced_bytes(path)

    @property
    def is_terminated(self) -> bool:
        return self._inner is not None and self._inner.is_terminated

    @property
    def is_complete(self) -> bool:
        if self._inner is not None:
            return self._inner.is_complete
        if self._place.phase == _HEAD:
            direct = self._alive()
            return direct is not None and direct.is_complete
        return self._place.phase == _GAP and self._compiled.may_be_empty

    @property
    def accepted_tokens(self) -> int:
        inside = 0 if self._inner is None else self._inner.accepted_tokens - self._entered
        return len(self._before) + inside

    def fork(self) -> Matcher:
        twin = object.__new__(ReasoningMatcher)
        twin.__dict__.update(self.__dict__)
        twin._before = self._before.copy()
        twin._direct = None if self._direct is None else self._direct.fork()
        if self._inner is not None:
            twin._inner = twin._direct if self._inner is self._direct else self._inner.fork()
        return twin

    def _is_spent(self, more: int) -> bool:
        """Whether the thinking has had its tokens where it has so many more."""
        if self._budget is None:
            return False
        # Those of an opening marker come first, and are none of it.
        before = self._before
        heads = next((n for n, p in enumerate(before) if p.phase != _HEAD), len(before))
        return len(before) - heads + more >= self._budget

    def _accept_head(self, token_id: int, text: bytes) -> bool:
        tokens, at = self._compiled.tokens, self._place.at
        # Read before anything changes, whether or not this token may open the thinking.
        direct = self._alive()
        if token_id not in tokens.heads[at]:
            return direct is not None and direct.accept(token_id) and self._enter(direct)
        rest = tokens.heads[at][token_id]
        if rest is not None:
            return self._accept_thought(0, rest)
        if direct is not None:
            direct.accept(token_id)
        self._place = _Place(_HEAD, at + len(text))
        return True

    def _accept_thought(self, state: int, text: bytes) -> bool:
        state, rest = self._compiled.tokens.scan(state, text)
        if rest is not None:
            return self._accept_after(0, rest)
        self._place = _Place(_THINK, state)
        return True

    def _accept_gap(self, token_id: int, text: bytes) -> bool:
        if text.startswith(BREAK) and self._place.at < MOST_GAP:
            return self._accept_after(self._place.at, text)
        inner = self._compiled.inner.matcher()
        return inner.accept(token_id) and self._enter(inner)

    def _accept_after(self, at: int, text: bytes) -> bool:
        at, rest = self._compiled.gap(at, text)
        if not rest:
            self._place = _Place(_GAP, at)
            return True
        inner = self._compiled.enter(rest)
        return inner is not None and self._enter(inner)

    def _enter(self, inner: Matcher) -> bool:
        self._inner, self._entered = inner, inner.accepted_tokens
        self._place = _Place(_INNER, 0)
        return True

    def _alive(self) -> Matcher | None:
        direct = self._direct
        if direct is None or direct.accepted_tokens < len(self._before):
            return None
        return direct

    def _thinking(
        self, tokens: Links, first_child: Links, next_sibling: Links
    ) -> dict[int, int] | None:
        """The state of each node that the walk reaches; None if one ends the thinking."""
        texts, size, scan = self.vocabulary.text, self.vocabulary.size, self._compiled.tokens.scan
        states = {0: self._place.at}
        pending = [(int(first_child[0]), self._place.at)]
        while pending:
            node, state = pending.pop()
            while node != -1:
                token = int(tokens[node])
                text = texts[token] if 0 <= token < size else b""
                if text:
                    after, rest = scan(state, text)
                    if rest is not None:
                        return None
                    states[node] = after
                    pending.append((int(first_child[node]), after))
                node = int(next_sibling[node])
        return states
