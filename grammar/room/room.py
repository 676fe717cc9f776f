"""What is known of the rests of one grammar."""

from __future__ import annotations

from threading import Lock

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.room.chart import Chart
from overlap_spec.grammar.room.rules import ENDLESS, RoomRules
from overlap_spec.grammar.room.trie import token_trie
from overlap_spec.grammar.vocabulary import Vocabulary

# A chart with more places is left to those who use it.
MOST_PLACES = 20_000


class Room:
    """What is known of the rests of one grammar; shared by its requests.

    Args:
        rules: Of the grammar.
        vocabulary: Of its matchers.

    Attributes:
        spells: Whether the vocabulary has a token for every byte.
        apart: Whether items or keys must differ, which the rules do not tell.
    """

    def __init__(self, rules: RoomRules, vocabulary: Vocabulary) -> None:
        self.rules, self.vocabulary, self.apart = rules, vocabulary, False
        self.spells = bool((vocabulary.byte_tokens >= 0).all())
        self._chart: Chart | None = None
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes."""
        places = 0 if self._chart is None else len(self._chart.places)
        return 8 * sum(part.nbytes for part in self.rules) + 2000 * places

    def chart(self) -> Chart:
        """Its places; those of one that has grown large are begun anew.

        Raises:
            GrammarError: the grammar is too large to be followed.
        """
        with self._lock:
            if self._chart is None or len(self._chart.places) > MOST_PLACES:
                self._chart = Chart(self.rules, token_trie(self.vocabulary))
            return self._chart

    def least(self, most: int) -> int | None:
        """Tokens that are enough for a whole text; if these are more than ``most``, the fewest that
        are known to be. None where that cannot be told."""
        try:
            chart = self.chart()
        except GrammarError:
            return None
        shortest = chart.start.rest
        if self.spells and shortest <= most:
            return shortest
        found = chart.tokens(chart.start)
        return found if found < ENDLESS else None
