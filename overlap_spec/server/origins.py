"""How the tokens of a stream came: the project's own addition to a chunk."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta


class TokenOrigins:
    """Tells, piece by piece, the text and the origin of each token of one output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._eos_ids, self._decoder = tokenizer.eos_ids, tokenizer.detokenizer()

    def chunk_fields(self, delta: Delta) -> dict[str, Any]:
        """Fields of the chunk that carries ``delta``, which is one step's; none without tokens.

        ``tokens``: text (empty for a stop token or part of a character) and origin of each;
        ``tier``: what the step drafted.
        """
        if not delta.origins or delta.tier is None:
            return {}
        tokens = [
            {"text": "" if token in self._eos_ids else self._decoder.push(token), "origin": origin}
            for token, origin in zip(delta.token_ids, delta.origins, strict=True)
        ]
        accepted = max(len(tokens) - 1, 0)
        return {
            "overlap_spec": {"tokens": tokens, "tier": asdict(delta.tier), "accepted": accepted}
        }
