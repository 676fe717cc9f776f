"""The ``overlap_spec`` field of a chunk: how each of its tokens was generated."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta


class TokenOrigins:
    """Describes the tokens of one output, piece by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._eos_ids, self._decoder = tokenizer.eos_ids, tokenizer.detokenizer()

    def chunk_fields(self, delta: Delta) -> dict[str, Any]:
        """The fields to add to the chunk of ``delta``; none if the delta has no origins.

        ``tokens``: text (empty for a stop token or part of a character) and origin of each.
        ``tier``: the step's draft budget. ``accepted``: accepted drafts.
        """
        if not delta.origins or delta.tier is None:
            return {}
        tokens = [
            {
                "text": "" if token in self._eos_ids else self._decoder.push((token,)),
                "origin": origin,
            }
            for token, origin in zip(delta.token_ids, delta.origins, strict=True)
        ]
        accepted = max(len(tokens) - 1, 0)
        return {
            "overlap_spec": {"tokens": tokens, "tier": asdict(delta.tier), "accepted": accepted}
        }
