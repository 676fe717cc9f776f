"""Tokens of `transformers`' tokenizers, as the libraries under them tell."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.grammar import vocabularies
from overlap_spec.grammar.vocabularies import Tokens


def read(tokenizer: Any, as_text: Collection[str]) -> Tokens:
    """As `vocabularies.read`.

    Raises:
        CheckpointError: a slow tokenizer, whose ids need not be those of the file under it.
    """
    # A fast one's, Mistral's own, or a processor's.
    under = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "tokenizer", None)
    if under is None:
        raise CheckpointError(
            f"{type(tokenizer).__name__} does not tell its tokens' bytes: load a fast tokenizer"
        )
    found = vocabularies.read(under, as_text)
    end = getattr(tokenizer, "eos_token_id", None)
    if end is not None:
        found.stop = {end}
    return found
