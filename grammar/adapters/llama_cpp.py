"""A grammar in llama-cpp-python's generation, as a logits processor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.matching.follow import Follower


class GrammarLogitsProcessor:
    """Holds the output of one call of a `llama_cpp.Llama` to a grammar.

    Goes into `logits_processor=LogitsProcessorList([...])` of the call. One object serves one call,
    in one thread; the compiled grammar is shared by any.

    Args:
        grammar: Compiled for `Vocabulary.of(llama)`.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._follower = Follower(grammar)
        self._prompt: npt.NDArray[np.intc] | None = None

    def __call__(
        self, input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        """A copy of `scores` with -inf for each token that the grammar forbids.

        Args:
            input_ids: `(length,)`: the prompt, and what was generated behind it.
            scores: `(vocabulary,)`.

        Raises:
            GrammarError: the vocabulary lacks what the grammar asks for.
            ValueError: another call's prompt, another vocabulary's scores, or a token that the
                grammar forbids was chosen all the same.
        """
        if self._prompt is None:
            self._prompt = input_ids.copy()
        start, size = len(self._prompt), self._follower.vocabulary.size
        if not np.array_equal(input_ids[:start], self._prompt):
            raise ValueError("one processor serves one call of a model: make a new one for each")
        if scores.shape != (size,):
            raise ValueError(f"scores have shape {scores.shape}, the vocabulary has {size} tokens")
        if not self._follower.follow(input_ids[start:].tolist()):
            raise ValueError("a token that the grammar forbids was chosen: by another processor?")
        return np.where(self._follower.allowed(), scores, np.single(-np.inf))
