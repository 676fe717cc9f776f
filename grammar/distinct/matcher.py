"""Refuses repeated items of arrays and repeated keys of objects, which no grammar's rules can.

Wraps any backend's matcher of a schema's EBNF. It follows the text's JSON (`text.py`), and
takes out of a mask row the tokens that complete an item or key a second time, and those after which
nothing but a repeated item could follow. Both are exact for tokens of any length: a token is cut
into its bytes.

Few tokens can do either: those that continue the text of an earlier item or key, and those with a
comma or a closing bracket outside of strings; where only keys must differ, of these those that hold
a whole key. Only these are looked at.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache

import msgspec
import numpy as np

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import CompiledGrammar, Matcher, Row
from overlap_spec.grammar.distinct.text import (
    AFTER,
    BLANK,
    ENDS,
    KEY,
    KEY_START,
    STRING,
    WORD,
    Frame,
    Node,
    Place,
    Reader,
    item_start,
    watched,
)
from overlap_spec.grammar.matching.around import Around
from overlap_spec.grammar.rows import BITS, allowed, packed, tokens_of, which_allowed
from overlap_spec.grammar.vocabulary import Vocabulary

_PUNCTUATION = frozenset(b",]}")
_START = Place()


def wrap(compiled: CompiledGrammar, plan: bytes) -> CompiledGrammar:
    """Wrap what was compiled of a grammar with `apart`.

    Raises:
        GrammarError: items must differ, and the vocabulary has no token for some byte.
    """
    return DistinctGrammar(compiled, plan) if plan else compiled


class DistinctGrammar(CompiledGrammar):
    """A compiled grammar whose arrays and objects are looked at."""

    def __init__(self, inner: CompiledGrammar, plan: bytes) -> None:
        self.inner, self._packed = inner, plan
        self.backend, self.reason = inner.backend, inner.reason
        blanks, nodes = msgspec.msgpack.decode(plan, type=tuple[bool, list[Node]])
        self.reader = Reader(nodes, blanks)
        self.has_items = any(node.distinct_items for node in self.reader.nodes)
        vocabulary = inner.matcher().vocabulary
        if self.has_items and (vocabulary.byte_tokens < 0).any():
            raise GrammarError(
                "uniqueItems needs a vocabulary with a token for every byte", "schema"
            )
        self.tokens = _token_sets(vocabulary)

    @property
    def memory_bytes(self) -> int:
        return self.inner.memory_bytes + 40 * len(self._packed)

    def matcher(self) -> Matcher:
        return DistinctMatcher(self, self.inner.matcher())


class TokenSets:
    """Tokens of a vocabulary by what they may complete, as int32 `(words,)` bit rows.

    Attributes:
        outside: Those with a comma or a closing bracket, or with white space.
        inside: Those that do so after a quote, for texts that stand in a string.
        fresh: Those that may open an array or object and repeat something in it.
        keyed: Those that may begin and end a key behind a comma or white space.
        escaped: Those with a quote and a backslash, which may spell a key in another way.
        words: The texts of all tokens, sorted.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        flags = np.zeros((6, vocabulary.words * 32), np.bool_)
        outside, inside, fresh, keyed, quoted, escaped = flags
        found = sorted((text, token) for token, text in enumerate(vocabulary.text) if text)
        self.words = [text for text, _ in found]
        self.ids = [token for _, token in found]
        for text, token in found:
            if _has(text, _PUNCTUATION | BLANK):
                outside[token] = True
                if b'"' in text and _has(text[text.index(b'"') :], _PUNCTUATION | BLANK):
                    inside[token] = True
            opened = min((text.index(mark) for mark in b"[{" if mark in text), default=None)
            if opened is not None and b"," in text[opened:]:
                fresh[token] = True
            if b'"' in text:
                quoted[token] = True
                if b"\\" in text:
                    escaped[token] = True
                behind = text if text[0] in BLANK else text.partition(b",")[2]
                if behind.count(b'"') > 1:
                    keyed[token] = True
        self.outside, self.inside, self.fresh, self.keyed, self.quoted, self.escaped = (
            packed(each, vocabulary.words) for each in flags
        )

    def beginning(self, text: bytes) -> Iterator[int]:
        """Tokens that begin with a text."""
        at = bisect_left(self.words, text)
        while at < len(self.words) and self.words[at].startswith(text):
            yield self.ids[at]
            at += 1

    def within(self, text: bytes) -> Iterator[int]:
        """Tokens that are a true beginning of a text."""
        for length in range(1, len(text)):
            at = bisect_left(self.words, text[:length])
            if at == len(self.words) or not self.words[at].startswith(text[:length]):
                return
            while at < len(self.words) and self.words[at] == text[:length]:
                yield self.ids[at]
                at += 1


_token_sets = lru_cache(4)(TokenSets)


def _has(text: bytes, marks: frozenset[int]) -> bool:
    return not marks.isdisjoint(text)


class DistinctMatcher(Around):
    """A position in the inner grammar, and in the JSON of its text."""

    def __init__(self, compiled: DistinctGrammar, inner: Matcher) -> None:
        super().__init__(inner)
        self._compiled, self._reader = compiled, compiled.reader
        # After each token, the start first: where the text stood, and its bytes.
        self._text, self._places, self._lengths = bytearray(), [_START], [0]

    def accept(self, token_id: int) -> bool:
        if not self.inner.accept(token_id):
            return False
        place: Place | None = self._places[-1]
        if not self.inner.is_terminated:
            place = self._after(token_id)
            if place is not None and self._is_dead(place, ()):
                place = None
        if place is None:
            del self._text[self._lengths[-1] :]
            self.inner.rollback(1)
            return False
        self._places.append(place)
        self._lengths.append(len(self._text))
        return True

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)
        if count:
            del self._places[-count:], self._lengths[-count:]
            del self._text[self._lengths[-1] :]

    def fill(self, row: Row) -> None:
        self.inner.fill(row)
        if self.inner.is_terminated:
            return
        for token in self._suspects(row):
            place = self._after(token)
            if place is None or self._is_dead(place, (token,)):
                row[token >> 5] &= ~BITS[token & 31]
            del self._text[self._lengths[-1] :]

    def fork(self) -> Matcher:
        twin = DistinctMatcher(self._compiled, self.inner.fork())
        twin._text, twin._places = self._text.copy(), self._places.copy()
        twin._lengths = self._lengths.copy()
        return twin

    def _after(self, token: int) -> Place | None:
        """The place after one more token, whose bytes are appended; None if it repeats an item or
        a key. The token is one that the inner grammar allows."""
        place: Place | None = self._places[-1]
        at = len(self._text)
        self._text += self.vocabulary.text[token]
        while place is not None and at < len(self._text):
            place = self._reader.step(place, self._text, at)
            at += 1
        return place

    def _suspects(self, row: Row) -> set[int]:
        """The tokens of a row that may repeat something, or leave nothing but a repetition."""
        place, tokens = self._places[-1], self._compiled.tokens
        frame, has_items = watched(place), self._compiled.has_items
        found = set(tokens_of(row & (tokens.fresh if has_items else tokens.keyed)).tolist())
        if frame is None:
            return found
        if has_items:
            in_text = place.mode in (STRING, KEY)
            found.update(tokens_of(row & (tokens.inside if in_text else tokens.outside)).tolist())
        if place.mode in (KEY, KEY_START) and place.frame is frame and frame.seen:
            is_escaped = place.mode == KEY and b"\\" in self._text[place.start :]
            found.update(
                tokens_of(row & (tokens.quoted if is_escaped else tokens.escaped)).tolist()
            )
        for text, is_whole in self._ahead(place, frame):
            found.update(t for t in tokens.beginning(text) if allowed(row, t))
            if not is_whole:
                found.update(t for t in tokens.within(text) if allowed(row, t))
        return found

    def _ahead(self, place: Place, frame: Frame) -> Iterator[tuple[bytes, bool]]:
        """The rests of the items or keys so far that begin as the text goes on, and whether these
        can be left at any place before their end."""
        if not frame.is_array:
            if place.frame is frame and place.mode in (KEY, KEY_START):
                read = bytes(self._text[place.start :]) if place.mode == KEY else b""
                for key in frame.seen or ():
                    text = json.dumps(key, ensure_ascii=False).encode()
                    if text.startswith(read):
                        yield text[len(read) :], True
            return
        if place.frame is frame and place.mode == AFTER:
            return
        read = self._read(place, frame)
        endless = self._reader.nodes[frame.node].endless
        for text in frame.texts:
            if text.startswith(read) and len(text) > len(read):
                yield text[len(read) :], text[0] in endless

    def _read(self, place: Place, frame: Frame) -> bytes:
        """The item of an array as far as it is read."""
        start = item_start(place, frame, len(self._text))
        return self._reader.spelled(bytes(self._text[start:]))

    def _is_dead(self, place: Place, ahead: tuple[int, ...]) -> bool:
        """Whether nothing but a repeated item can follow.

        Args:
            ahead: Tokens at the end of the text that the inner matcher has not accepted.
        """
        frame = watched(place)
        if frame is None or not frame.is_array or not frame.texts:
            return False
        if place.frame is frame and place.mode == AFTER:
            return False
        node, read = self._reader.nodes[frame.node], self._read(place, frame)
        if read[0] in node.endless if read else not node.exhaustible:
            return False
        if not any(text.startswith(read) for text in frame.texts):
            return False
        return not self._goes_on(place, frame, read, ahead)

    def _goes_on(self, place: Place, frame: Frame, read: bytes, ahead: tuple[int, ...]) -> bool:
        """Whether an item that begins as `read` can become one that is new."""
        text, byte_tokens = self._text, self.vocabulary.byte_tokens
        nexts = {t[len(read)] for t in frame.texts if t.startswith(read) and len(t) > len(read)}
        in_word = place.mode == WORD and place.frame is frame
        deeper: list[int] = []
        for byte in self._legal(place, frame, read, ahead):
            if in_word and byte in ENDS:
                text.append(byte)
                ended = self._reader.step(place, text, len(text) - 1)
                del text[-1:]
                if ended is not None:
                    return True
            elif byte in BLANK and place.mode not in (STRING, KEY):
                if not self._reader.blanks and not read:
                    # The layout's own space before an item.
                    deeper.append(byte)
                elif not self._reader.blanks:
                    return True
            elif byte not in nexts:
                return True
            else:
                deeper.append(byte)
        for byte in deeper:
            text.append(byte)
            try:
                after = self._reader.step(place, text, len(text) - 1)
                if after is None:
                    continue
                if after.mode == AFTER and _is(after.frame, frame):
                    return True
                more = self._read(after, frame)
                if self._goes_on(after, frame, more, (*ahead, int(byte_tokens[byte]))):
                    return True
            finally:
                del text[-1:]
        return False

    def _legal(self, place: Place, frame: Frame, read: bytes, ahead: tuple[int, ...]) -> bytes:
        """The bytes that the inner grammar allows next inside an item."""
        assert frame.legal is not None
        legal, count = frame.legal, len(self._reader.nodes[frame.node].items)
        # White space, which is not in the text as read, ends a number.
        key = (min(frame.done, count), read, place.mode == WORD)
        if key not in legal or not read:
            row = np.zeros(self.vocabulary.words, np.int32)
            accepted = 0
            try:
                for token in ahead:
                    if not self.inner.accept(token):
                        raise RuntimeError(
                            f"token {token} is allowed by its mask row but was rejected"
                        )
                    accepted += 1
                self.inner.fill(row)
            finally:
                self.inner.rollback(accepted)
            tokens = self.vocabulary.byte_tokens
            legal[key] = bytes(np.flatnonzero(which_allowed(row, tokens)).astype(np.uint8))
        return legal[key]


def _is(one: Frame | None, other: Frame) -> bool:
    """Whether two frames are of one array."""
    return one is not None and one.start == other.start
