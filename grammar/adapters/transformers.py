"""A grammar in `transformers`' `generate`, as a logits processor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import LogitsProcessor

from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.matching.follow import Follower


class GrammarLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Holds the outputs of one call of `generate` to grammars.

    It reads what follows the prompts, which may be padded on the left. Greedy decoding, sampling
    and beams are held, with any number of outputs a prompt; assisted decoding is not, whose drafts
    a processor is asked about whether or not they are allowed. One object serves one call, in one
    thread; the compiled grammars are shared by any.

    Args:
        grammars: One for all prompts, or one for each.
        num_beams: That of the call.
    """

    def __init__(
        self, grammars: CompiledGrammar | Sequence[CompiledGrammar], num_beams: int = 1
    ) -> None:
        self._grammars = [grammars] if isinstance(grammars, CompiledGrammar) else list(grammars)
        self._num_beams = num_beams
        self._prompts = torch.empty(0)
        self._followers: list[Follower] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """`scores` with -inf for each token that the grammar of its row forbids.

        Args:
            input_ids: `(rows, length)`: prompts, and what was generated behind them.
            scores: `(rows, vocabulary)`, on any device.

        Raises:
            GrammarError: the vocabulary lacks what the grammar asks for.
            ValueError: another call's rows, another vocabulary's scores, or a token that the
                grammar forbids was chosen all the same.
        """
        if not self._followers:
            self._begin(input_ids, scores)
        start = self._prompts.shape[1]
        if not torch.equal(input_ids[:, :start], self._prompts):
            raise ValueError("one processor serves one call of generate: make a new one for each")
        allowed = np.zeros((len(input_ids), scores.shape[1]), np.bool_)
        for row, (follower, tokens) in enumerate(
            zip(self._followers, input_ids[:, start:].tolist(), strict=True)
        ):
            if follower.follow(tokens):
                allowed[row, : follower.vocabulary.size] = follower.allowed()
            elif self._num_beams == 1:
                raise ValueError(
                    f"row {row} has tokens that its grammar forbids: another processor chose them, "
                    "decoding is assisted, or num_beams is not that of generate"
                )
            # Of beams, one that no legal token was left for: it goes no further.
        forbidden = torch.from_numpy(~allowed).to(scores.device)
        return scores.masked_fill(forbidden, -torch.inf)

    def _begin(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> None:
        rows, grammars = len(input_ids), self._grammars
        if not grammars or rows % len(grammars):
            raise ValueError(f"{len(grammars)} grammars do not go with {rows} rows")
        # Outputs and beams of a prompt stand one after the other.
        each = rows // len(grammars)
        self._followers = [Follower(grammar) for grammar in grammars for _ in range(each)]
        most = max(follower.vocabulary.size for follower in self._followers)
        if most > scores.shape[1]:
            raise ValueError(
                f"scores have {scores.shape[1]} tokens, the grammar's vocabulary {most}: make it "
                "with size=model.config.vocab_size"
            )
        self._prompts = input_ids.clone()
