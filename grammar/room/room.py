"""What is known of the rests of one grammar."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.ir.reach import ENDLESS, Reach
from overlap_spec.grammar.room.chart import Chart, Place
from overlap_spec.grammar.room.rules import RoomRules
from overlap_spec.grammar.room.trie import token_trie
from overlap_spec.grammar.vocabulary import Vocabulary

# A chart with more places is left to those who use it.
MOST_PLACES = 20_000
# Where items or keys must differ, a rest is found that takes at most twice what the rules tell, and
# so many tokens more.
APART_TOKENS = 8
# A text may begin before its grammar's rules are read if it has room to spare for so many tokens,
# of so many bytes each, and a tree of so many levels behind them. So long before they are needed
# they are asked for.
AHEAD_TOKENS, AHEAD_BYTES, AHEAD_DEPTH = 64, 4, 16


class Room:
    """What is known of the rests of one grammar; shared by its requests.

    Its rules over bytes are made when they are first asked for: far from the end of the room its
    reach is enough.

    Args:
        apart: Whether items or keys must differ, which the rules do not tell.
        make: Starts to make the rules.

    Attributes:
        spells: Whether the vocabulary has a token for every byte.
    """

    def __init__(
        self,
        reach: Reach,
        vocabulary: Vocabulary,
        apart: bool,
        make: Callable[[], Future[RoomRules]],
    ) -> None:
        self.reach, self.apart = reach, apart
        self.trie = token_trie(vocabulary)
        self._begun = self.trie.most_of(reach.begins)
        self.spells = bool((vocabulary.byte_tokens >= 0).all())
        self._make = make
        self._rules: Future[RoomRules] | None = None
        self._chart: Chart | None = None
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes."""
        chart = self._chart
        return 0 if chart is None else chart.nbytes

    def ask(self, again: bool = False) -> Future[RoomRules]:
        """Have the rules made, once; the future raises GrammarError where they cannot be.

        Args:
            again: Also where that has failed, unless they were refused.
        """
        with self._lock:
            made = self._rules
            failed = made is not None and made.done() and (made.cancelled() or made.exception())
            if made is not None and not (again and failed and type(failed) is not GrammarError):
                return made
            made = self._rules = self._make()
        # Where they are brought, that no mask waits for it.
        made.add_done_callback(lambda _: self._prepare())
        return made

    def _prepare(self) -> None:
        chart = self.chart()
        if chart is not None:
            chart.prepare()

    def chart(self) -> Chart | None:
        """Its places; those of one that has grown large are begun anew. None: its rules are not
        there, or it is too large to be followed."""
        made = self.ask()
        if not made.done() or made.cancelled() or made.exception() is not None:
            return None
        with self._lock:
            if self._chart is None or len(self._chart.places) > MOST_PLACES:
                try:
                    self._chart = Chart(made.result(), self.trie)
                except GrammarError:
                    return None
            return self._chart

    def needed(self, tokens: int) -> int:
        """Tokens that are surely enough for a rest that takes so many by the rules."""
        return 2 * tokens + APART_TOKENS if self.apart else tokens

    def ample_tokens(self, most: int, tokens: int, begun: int) -> int:
        """So many tokens the text may have, and any rest fits behind any token behind them.

        Args:
            most: Tokens that the text may have.
            tokens, begun: Tokens that it has, and bytes in them that :class:`Reach` counts.
        """
        _, fixed, each, _ = self.reach
        if not self.spells:
            return -1
        # With `n` more tokens a rest takes `needed(first + n * more)`, and has `room - n`.
        first, more = fixed + each * (begun + self._begun + 1), each * self._begun
        room = most - tokens - 1 - self.needed(first)
        return tokens + room // (1 + self.needed(more) - self.needed(0))

    def has_room(self, place: Place, room: int) -> bool:
        """Whether any rest behind any token at a place fits into so many tokens."""
        _, fixed, each, _ = self.reach
        longest = place.most + fixed + each * (self._begun + 1)
        return self.spells and self.needed(longest) <= room

    def is_early(self, most: int) -> bool:
        """Whether a text may begin before the rules are there."""
        ample = self.ample_tokens(most, AHEAD_TOKENS, AHEAD_TOKENS * AHEAD_BYTES)
        return self.needed(self.reach.least) <= most and ample >= AHEAD_TOKENS + AHEAD_DEPTH

    def least(self, most: int) -> int | None:
        """Tokens that are enough for a whole text by the rules; if these are more than ``most``,
        the fewest that are known to be. None where that cannot be told."""
        if self.spells and self.needed(self.reach.least) <= most:
            return self.reach.least
        chart = self.chart()
        found = ENDLESS if chart is None else chart.tokens(chart.start)
        return found if found < ENDLESS else None
