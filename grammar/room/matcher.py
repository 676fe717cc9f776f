"""Narrows masks near the end of the room, so that the text comes to its end within it.

Wraps any matcher. Where the longest rest that any text of this length can have fits, masks are the
inner matcher's, untouched. Nearer the end the place in the grammar's rules tells what the shortest
rest behind each token is, and a token stays if that fits into the tokens behind it.

The rules tell all but that items and keys must differ (`distinct.matcher`). Under such a grammar a
token with little to spare stays only if the inner matcher takes a rest behind it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.contract import CompiledGrammar, Links, Matcher, Row
from overlap_spec.grammar.matching import walk
from overlap_spec.grammar.matching.around import Around
from overlap_spec.grammar.room.chart import Chart, Place, Step
from overlap_spec.grammar.room.room import AHEAD_TOKENS, APART_TOKENS, Room
from overlap_spec.grammar.rows import BITS

# Where items or keys must differ: how many tokens are tried, how many steps they may take together,
# since each asks for a mask of its own, and how many ways go on from each; and by how many tokens
# more than the rules tell the shortest text is looked for.
TRIED, TRIED_STEPS, TRIED_WAYS, MOST_MORE = 48, 96, 4, 64


def least_tokens(compiled: CompiledGrammar, most: int) -> int | None:
    """Tokens that are enough for a whole text of a grammar; if these are more than ``most``, the
    fewest that are known to be. None where that cannot be told."""
    room = compiled.room
    found = None if room is None else room.least(most)
    if room is None or found is None or not room.apart or room.needed(found) <= most:
        return found
    return RoomMatcher(compiled.matcher(), room, most).least(found)


class RoomMatcher(Around):
    """One request's position, and how much room it has left.

    Args:
        room: Of its grammar; where its rules are not there, the text must have time
            (:meth:`Room.is_early`).
        most_tokens: That the text may have; :func:`least_tokens` must fit.

    Attributes:
        chart: Of the grammar's places, once the end of the room is looked at.
    """

    def __init__(self, inner: Matcher, room: Room, most_tokens: int) -> None:
        super().__init__(inner)
        self._room, self._most = room, most_tokens
        self.chart: Chart | None = None
        self._tokens: list[int] = []
        # Behind each token, the start first, as far as it was asked for; None: nowhere.
        self._places: list[Place | None] = []
        # Bytes that `Reach` counts in as many of the first tokens, as far as it was asked for.
        self._begun = [0]
        # With as many tokens as this, those of a tree too, any rest fits, whatever comes behind the
        # first so many.
        self._ample, self._ample_at = -1, 0
        # The tokens whose mask was narrowed; and of the last tree, behind how many tokens at which
        # places it was.
        self._narrowed: list[int] = []
        self._tight: set[tuple[int, int]] = set()

    def accept(self, token_id: int) -> bool:
        if not self.inner.accept(token_id):
            return False
        if self._tight:
            at = len(self._tokens)
            place = self._place(at)
            if place is not None and (at, place.number) in self._tight:
                self._narrowed.append(at)
        self._tokens.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)
        if len(self._tokens) - count < self._ample_at:
            self._ample, self._ample_at = -1, 0
        if count:
            del self._tokens[-count:]
            while self._narrowed and self._narrowed[-1] >= len(self._tokens):
                self._narrowed.pop()
            del self._places[len(self._tokens) + 1 :], self._begun[len(self._tokens) + 1 :]

    def fill(self, row: Row) -> None:
        self.inner.fill(row)
        self._narrow(row)

    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        # Far from the end this is all that is asked, and no mask was narrowed.
        if len(self._tokens) + len(tokens) > self._ample:
            self._tight.clear()
            if not self._is_ample(len(tokens)) and self._chart_now() is not None:
                walk.fill_tree(self, tokens, first_child, next_sibling, rows)
                return
        self.inner.fill_tree(tokens, first_child, next_sibling, rows)

    @property
    def narrowed(self) -> int:
        return len(self._narrowed)

    @property
    def is_led(self) -> bool:
        if not self._narrowed or not self.inner.is_complete:
            return False
        # Free text may end behind any character, which may be several tokens.
        texts, last = self.vocabulary.text, 1
        while last < len(self._tokens) and b"\x80" <= texts[self._tokens[-last]][:1] < b"\xc0":
            last += 1
        before = self._place(len(self._tokens) - last)
        return before is None or before.rest > 0

    def fork(self) -> Matcher:
        twin = object.__new__(RoomMatcher)
        twin.__dict__.update(self.__dict__)
        twin.inner = self.inner.fork()
        twin._tokens, twin._places = self._tokens.copy(), self._places.copy()
        twin._narrowed, twin._tight = self._narrowed.copy(), self._tight.copy()
        twin._begun = self._begun.copy()
        return twin

    def least(self, tokens: int) -> int | None:
        """Tokens that are enough from the start for a text that the inner matcher takes to its end;
        None: not found."""
        chart = self._chart_now()
        assert chart is not None
        for more in range(MOST_MORE):
            if self._ends(chart, chart.start, tokens + more, [TRIED_STEPS]):
                return tokens + more
        return None

    def _is_ample(self, depth: int) -> bool:
        """Whether any rest fits behind any token at nodes of so many tokens more."""
        tokens = len(self._tokens)
        if tokens + depth <= self._ample:
            return True
        room = self._room
        while len(self._begun) <= tokens:
            text = self.vocabulary.text[self._tokens[len(self._begun) - 1]]
            kept = text.translate(None, room.reach.begins)
            self._begun.append(self._begun[-1] + len(text) - len(kept))
        self._ample = room.ample_tokens(self._most, tokens, self._begun[tokens])
        self._ample_at = tokens
        if tokens + AHEAD_TOKENS <= self._ample:
            # It is looked at again in time.
            self._ample -= AHEAD_TOKENS
        elif self.chart is None:
            room.ask()
        return tokens + depth <= self._ample

    def _chart_now(self) -> Chart | None:
        """The grammar's places; None where they are not told, or not yet."""
        if self.chart is None:
            self.chart = self._room.chart()
            self.is_untold = self.chart is None
            if self.chart is not None:
                self._places = [self.chart.start]
        return self.chart

    def _place(self, at: int) -> Place | None:
        """The place behind the first ``at`` tokens; None where the rules do not lead to it."""
        chart, texts = self.chart, self.vocabulary.text
        if chart is None:
            return None
        places = self._places
        while len(places) <= at:
            here = places[-1]
            text = texts[self._tokens[len(places) - 1]]
            places.append(here and chart.after(here, text))
        return places[at]

    def _narrow(self, row: Row) -> None:
        """Take out of a row the tokens behind which no rest is known to fit."""
        room = self._most - len(self._tokens) - 1
        # What comes behind the last token is cut.
        if room < 0 or self.inner.is_terminated or self._is_ample(0):
            return
        chart, apart = self._chart_now(), self._room.apart
        place = self._place(len(self._tokens))
        if chart is None or place is None or self._room.has_room(place, room):
            return
        step = chart.step(place, row)
        # Twice as long as the rules tell, a rest is found where items must differ.
        fits = self._fitting(chart, step, (room - APART_TOKENS) // 2 if apart else room)
        if fits.all():
            return
        kept = step.row(fits, row)
        if apart:
            self._try(chart, row, kept, step, room)
        if self.inner.is_complete:
            kept |= row & self.vocabulary.stop_row
        if not kept.any():
            self.is_untold = True
        elif not np.array_equal(kept, row):
            row[:] = kept
            self._tight.add((len(self._tokens), place.number))

    def _fitting(self, chart: Chart, step: Step, room: int) -> npt.NDArray[np.bool_]:
        """bool `(places,)`: those whose rest takes at most so many tokens."""

        def fits(place: Place) -> bool:
            if self._room.spells and place.rest <= room:
                return True
            # The longest token is a bound from below.
            return place.rest <= room * chart.trie.longest and chart.tokens(place) <= room

        return np.array([fits(place) for place in step.places], np.bool_)

    def _try(self, chart: Chart, row: Row, kept: Row, step: Step, room: int) -> None:
        """Add tokens with little to spare behind which the inner matcher takes a rest that fits."""
        needs = np.array([chart.tokens(place) for place in step.places], np.int64)
        asked = step.row(needs <= room, row) & ~kept
        left = [TRIED_STEPS]
        for token, place in step.nearest(asked, needs, TRIED):
            if left[0] > 0 and self.inner.accept(token):
                if self._ends(chart, place, room, left):
                    kept[token >> 5] |= BITS[token & 31]
                self.inner.rollback(1)

    def _ends(self, chart: Chart, place: Place, room: int, left: list[int]) -> bool:
        """Whether the inner matcher comes to an end within so many tokens, tried in few ways."""
        if self.inner.is_complete:
            return True
        left[0] -= 1
        if left[0] < 0 or room <= 0:
            return False
        row = np.zeros(self.vocabulary.words, np.int32)
        self.inner.fill(row)
        step = chart.step(place, row)
        needs = np.array([chart.tokens(after) for after in step.places], np.int64)
        ways = step.row(needs < room, row)
        for token, after in step.nearest(ways, needs, TRIED_WAYS):
            if self.inner.accept(token):
                ends = self._ends(chart, after, room - 1, left)
                self.inner.rollback(1)
                if ends:
                    return True
        return False
