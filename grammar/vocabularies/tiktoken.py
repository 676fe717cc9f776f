"""Tokens of a `tiktoken.Encoding`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from overlap_spec.grammar.vocabularies import Tokens

END = "<|endoftext|>"


def read(tokenizer: Any, as_text: Collection[str]) -> Tokens:
    """As `vocabularies.read`."""
    special = {text: tokenizer.encode_single_token(text) for text in tokenizer.special_tokens_set}
    found = Tokens({}, {token for text, token in special.items() if text not in as_text})
    for token in range(tokenizer.n_vocab):
        try:
            found.texts[token] = tokenizer.decode_single_token_bytes(token)
        except KeyError:
            # Ids between the texts and the special tokens may be free.
            continue
    if END in special:
        found.stop = {special[END]}
    return found
