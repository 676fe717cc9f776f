"""Tokens of `mistral_common`'s tokenizers: tekken, or SentencePiece's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from overlap_spec.grammar.vocabularies import Tokens
from overlap_spec.grammar.vocabularies.sentencepiece import piece_bytes


def read(tokenizer: Any, as_text: Collection[str]) -> Tokens:
    """As `vocabularies.read`; of a `MistralTokenizer` or of the tokenizer in it."""
    if hasattr(tokenizer, "instruct_tokenizer"):
        tokenizer = tokenizer.instruct_tokenizer.tokenizer
    tells_bytes = hasattr(tokenizer, "id_to_byte_piece")
    found = Tokens({}, stop={tokenizer.eos_id})
    for token in range(tokenizer.n_words):
        if tokenizer.is_special(token):
            text = tokenizer.id_to_piece(token)
            found.texts[token] = text.encode()
            if text not in as_text:
                found.special.add(token)
        elif tells_bytes:
            found.texts[token] = tokenizer.id_to_byte_piece(token)
        else:
            found.texts[token] = piece_bytes(tokenizer.id_to_piece(token))
    return found
