"""How one request's model cuts forced text into tokens, and how well that is guessed.

Of the request alone: so drafts depend on nobody else's text, and on no order in which requests run.
"""

from __future__ import annotations

from overlap_spec.grammar.drafting.state_table import Standing

# Kinds of guesses: 0: the tokenizer's cut of a text that has not come yet; 1: what was chosen where
# it came last; 2: what was chosen the last two times.
KINDS = 3
NEVER = -1, 0
# Share of right guesses at first, that of the drafter's own if it is not told what is forced, and
# weight of a new one. A run is longer than a draft: it may be so much worse.
HOPE, BLIND, WEIGHT = 0.8, 0.5, 0.2
MARGIN = 0.05
# Bytes of a text by which it is known again.
KEY_BYTES = 64


class Guesses:
    """What a request's model chose before, and shares of right guesses, its drafter's included.

    Args:
        weighed: Whether the drafter keeps to what is forced by itself.

    Attributes:
        told: The run behind the root of the request's next tree.
        standing: Where its text stands in what drafts read of its grammar.
    """

    def __init__(self, weighed: bool = False) -> None:
        self._chosen: dict[bytes, tuple[int, int]] = {}
        self._right = [HOPE] * KINDS
        self._own = HOPE if weighed else BLIND
        self.told: list[int] = []
        self.standing = Standing()

    def find(self, text: bytes) -> tuple[int, int]:
        """The token that was chosen before a forced text, and the kind of guess that it is."""
        return self._chosen.get(text[:KEY_BYTES], NEVER)

    def trusts(self, kind: int) -> bool:
        """Whether guesses of a kind are right as often as those of the drafter by itself."""
        return self._right[kind] + MARGIN >= self._own

    def note(self, text: bytes, token: int, canonical: int | None) -> None:
        """Enter a choice, and what a guess would have been worth, made or not.

        Args:
            canonical: The tokenizer's first token, if it has one.
        """
        before, kind = self.find(text)
        guess = before if kind else canonical
        if guess is not None:
            self._right[kind] += WEIGHT * ((guess == token) - self._right[kind])
        self._chosen[text[:KEY_BYTES]] = token, 2 if before == token else 1

    def judge(self, right: bool) -> None:
        """Enter a guess of forced text that was the drafter's own."""
        self._own += WEIGHT * (right - self._own)
