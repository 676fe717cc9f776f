"""A matcher that follows a text which others write: the whole text so far comes in at each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.rows import flags_of


class Follower:
    """One text's matcher; what was accepted and is no longer in the text is rolled back."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._matcher = compiled.matcher()
        self.vocabulary = self._matcher.vocabulary
        self._row = np.zeros(self.vocabulary.words, np.int32)
        self._accepted: list[int] = []

    def follow(self, tokens: Sequence[int]) -> bool:
        """Stand behind ``tokens``; False if the grammar forbids one of them, behind which it then
        does not stand. What comes after a stop token does not matter."""
        same = 0
        if list(tokens[: len(self._accepted)]) == self._accepted:
            same = len(self._accepted)
        else:
            while same < len(tokens) and tokens[same] == self._accepted[same]:
                same += 1
            self._matcher.rollback(len(self._accepted) - same)
            del self._accepted[same:]
        for token in tokens[same:]:
            if self._matcher.is_terminated:
                return True
            if not self._matcher.accept(token):
                return False
            self._accepted.append(token)
        return True

    def allowed(self) -> npt.NDArray[np.bool_]:
        """bool `(size,)`: the tokens that may come next; after a stop token stop tokens alone.

        Raises:
            GrammarError: none may: the vocabulary lacks what the grammar asks for.
        """
        row = self._row
        self._matcher.fill(row)
        if self._matcher.is_terminated:
            row = self.vocabulary.stop_row
        elif not row.any():
            reason = f"no token goes on after the {len(self._accepted)} tokens so far"
            raise GrammarError(f"{reason}: the vocabulary lacks what the grammar asks for")
        return flags_of(row)[: self.vocabulary.size]
