"""How probable the tokens of prompts are, by the target's rows of a chunk: the model's own
log-probabilities, without mask, bias, penalties or temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overlap_spec.steps import Int64s
from overlap_spec.types import Delta, Output, PromptLogprobs, Request
from overlap_spec.worker.batch import uploaded
from overlap_spec.worker.extras.base import Ask, Extra, Runner, Surroundings
from overlap_spec.worker.sampler import BLOCK_ENTRIES

# Log-probabilities that one piece has at most.
PIECE_VALUES = 2**12


class Asked(NamedTuple):
    """Rows of a chunk, from its row ``first`` on, that are asked how probable the tokens behind
    them are, int64 ``(n,)``, and which ``top`` tokens are the most probable."""

    first: int
    tokens: Int64s
    top: int


class PromptScores(Extra):
    """Tells how probable each token of the prompt is."""

    def __init__(self, request: Request, engine: Surroundings) -> None:
        super().__init__(request, engine)
        self._prompt, self._top = request.prompt_ids, request.sampling.prompt_logprobs or 0
        # Nothing stands before a prompt's first token.
        self._told: list[PromptLogprobs | None] = [None]
        self._asked = self._pushed = 0

    def reusable(self, tokens: int) -> int:
        """A row that has still to tell of the prompt is computed."""
        return min(tokens, self._asked)

    def ask(self, start: int, end: int) -> Asked | None:
        first = max(start, self._asked)
        behind = self._prompt[first + 1 : end + 1]
        self._asked += len(behind)
        return Asked(first - start, np.array(behind, np.int64), self._top) if behind else None

    @staticmethod
    def compute(runner: Runner, hidden: Tensor, asked: Sequence[Ask]) -> tuple[Tensor, ...]:
        """Of each row asked, its token's log-probability float32 ``(P,)`` and rank int64 ``(P,)``;
        the best log-probabilities float32 ``(P, n)``, descending, and their ids int64 ``(P, n)``,
        for the largest n that a chunk asks for."""
        rows = [ask.first + ask.what.first + np.arange(len(ask.what.tokens)) for ask in asked]
        numbers = np.concatenate([*rows, *(ask.what.tokens for ask in asked)])
        target = runner.target
        index, tokens = uploaded(torch.from_numpy(numbers), hidden.device).chunk(2)
        top = min(max(ask.what.top for ask in asked), target.config.vocab_size)
        size = max(1, BLOCK_ENTRIES // target.config.vocab_size)
        blocks = [
            _score(target.logits(hidden[some]), theirs, top)
            for some, theirs in zip(index.split(size), tokens.split(size), strict=True)
        ]
        return tuple(torch.cat(parts) for parts in zip(*blocks, strict=True))

    @staticmethod
    def read(found: Sequence[Tensor], asked: Sequence[Asked]) -> list[tuple[PromptLogprobs, ...]]:
        sizes = [len(ask.tokens) for ask in asked]
        each = zip(asked, *(part.split(sizes) for part in found), strict=True)
        told = []
        for ask, own, rank, best, ids in each:
            tops = zip(ids[:, : ask.top].tolist(), best[:, : ask.top].tolist(), strict=True)
            told.append(
                tuple(
                    PromptLogprobs(value, tuple(zip(*top, strict=True)), place)
                    for value, place, top in zip(own.tolist(), rank.tolist(), tops, strict=True)
                )
            )
        return told

    def hear(self, told: Sequence[PromptLogprobs]) -> None:
        self._told += told

    def pieces(self) -> Iterator[Delta]:
        """What is new, in pieces of bounded size."""
        entries = max(1, PIECE_VALUES // (1 + self._top))
        for start in range(self._pushed, len(self._told), entries):
            yield Delta("", (), prompt_logprobs=tuple(self._told[start : start + entries]))
        self._pushed = len(self._told)

    def complete(self, last: Delta, output: Output) -> tuple[Delta, Output]:
        return last, replace(output, prompt_logprobs=tuple(self._told))


def _score(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:meth:`PromptScores.compute` of one block: logits ``(B, V)``, tokens ``(B,)``."""
    found = logits.float().log_softmax(-1)
    own = found.gather(1, tokens[:, None])
    rank = (found > own).sum(1) + 1
    return own[:, 0], rank, *found.topk(top)
