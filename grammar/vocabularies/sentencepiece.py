"""Tokens of a `sentencepiece.SentencePieceProcessor`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from overlap_spec.grammar.vocabularies import Tokens

SPACE = "▁"


def read(tokenizer: Any, as_text: Collection[str]) -> Tokens:
    """As `vocabularies.read`."""
    found = Tokens({})
    for token in range(tokenizer.get_piece_size()):
        piece = tokenizer.id_to_piece(token)
        found.texts[token] = piece_bytes(piece)
        is_text = not (tokenizer.is_control(token) or tokenizer.is_unknown(token))
        if tokenizer.is_unused(token) or not (is_text or piece in as_text):
            found.special.add(token)
    if tokenizer.eos_id() >= 0:
        found.stop = {tokenizer.eos_id()}
    return found


def piece_bytes(piece: str, space: str = SPACE) -> bytes:
    """The bytes of a piece, a byte such as `<0x0A>` or a text in which ``space`` is a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(space, " ").encode()
