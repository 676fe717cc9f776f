"""Tokens of a `llama_cpp.Llama`, which has a GGUF file's tokenizer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from overlap_spec.grammar.vocabularies import Tokens


def read(tokenizer: Any, as_text: Collection[str]) -> Tokens:
    """As `vocabularies.read`; tokens of over 32 bytes, which are not told, are not allowed."""
    # llama.cpp's own, also where the model was given another.
    own = tokenizer.tokenizer()
    found = Tokens({}, stop={tokenizer.token_eos()})
    for token in range(tokenizer.n_vocab()):
        text = own.detokenize([token])
        if not text:
            # A control token, which may be a marker.
            text = own.detokenize([token], special=True)
            if text.decode(errors="replace") not in as_text:
                found.special.add(token)
        found.texts[token] = text
    return found
