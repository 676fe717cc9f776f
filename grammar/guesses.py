"""How one request's model cuts forced text into tokens, and how well that is guessed.

Of the request alone: so drafts depend on nobody else's text, and on no order in which requests run.
"""

from __future__ import annotations

# Kinds of guesses: 0: the tokenizer's cut of a text that has not come yet; 1: what was chosen where
# it came last; 2: what was chosen the last two times.
KINDS = 3
NEVER = -1, 0
# Share of right guesses at first, weight of a new one, and the drafter's guesses of which half were
# right that are assumed at first.
HOPE, WEIGHT = 0.8, 0.2
ASSUMED = 8
# Bytes of a text by which it is known again.
KEY_BYTES = 64


class Guesses:
    """What a request's model chose before, and shares of right guesses, its drafter's included."""

    def __init__(self) -> None:
        self._chosen: dict[bytes, tuple[int, int]] = {}
        self._right = [HOPE] * KINDS
        self._own_right, self._own = ASSUMED / 2, float(ASSUMED)

    def find(self, text: bytes) -> tuple[int, int]:
        """The token that was chosen before a forced text, and the kind of guess that it is."""
        return self._chosen.get(text[:KEY_BYTES], NEVER)

    def trusts(self, kind: int) -> bool:
        """Whether guesses of a kind are right as often as those of the drafter by itself."""
        return self._right[kind] * self._own >= self._own_right

    def note(self, text: bytes, token: int, canonical: int | None) -> None:
        """Enter a choice, and what a guess would have been worth, made or not.

        Args:
            text: The forced bytes.
            token: What was chosen.
            canonical: The tokenizer's first token, if it has one.
        """
        before, kind = self.find(text)
        guess = before if kind else canonical
        if guess is not None:
            self._right[kind] += WEIGHT * ((guess == token) - self._right[kind])
        self._chosen[text[:KEY_BYTES]] = token, 2 if before == token else 1

    def judge(self, right: int, wrong: int) -> None:
        """Enter guesses of the drafter's own."""
        self._own_right, self._own = self._own_right + right, self._own + right + wrong
