"""The ``overlap_spec`` field of a chunk: how each of its tokens came, and what became of drafts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta, DraftTree


class TokenOrigins:
    """Describes the tokens of one output, piece by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._decoder = tokenizer, tokenizer.detokenizer()

    def chunk_fields(self, delta: Delta) -> dict[str, Any]:
        """The fields to add to the chunk of ``delta``; none if the delta has no origins.

        ``tokens``: text (empty for a stop token or part of a character) and origin of each.
        ``tier``: the step's draft budget. ``accepted``: accepted drafts. ``draft``: the step's
        drafts, if the delta has them.
        """
        if not delta.origins or delta.tier is None:
            return {}
        stops = self._tokenizer.eos_ids
        tokens = [
            {"text": "" if token in stops else self._decoder.push((token,)), "origin": origin}
            for token, origin in zip(delta.token_ids, delta.origins, strict=True)
        ]
        accepted = max(len(tokens) - 1, 0)
        told = {"tokens": tokens, "tier": asdict(delta.tier), "accepted": accepted}
        if delta.tree is not None:
            told["draft"] = self._draft(delta.tree)
        return {"overlap_spec": told}

    def _draft(self, tree: DraftTree) -> dict[str, Any]:
        """``step``: as in ``/timeline``. ``nodes``: the text of each draft (empty for a stop
        token), its parent's index (-1: the token before the step) and its fate. ``left_out``:
        how many there are besides."""
        nodes = [
            {"text": self._tokenizer.decode([token]), "parent": parent, "fate": fate}
            for token, parent, fate in zip(tree.tokens, tree.parents, tree.fates, strict=True)
        ]
        return {"step": tree.step, "nodes": nodes, "left_out": tree.left_out}
