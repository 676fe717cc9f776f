"""Tokens of Hugging Face's `tokenizers`: byte-level BPE, or byte fallback with `▁`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.grammar.vocabularies import Tokens
from overlap_spec.grammar.vocabularies.sentencepiece import SPACE, piece_bytes


def read(tokenizer: Any, as_text: Collection[str]) -> Tokens:
    """As `vocabularies.read`; such a tokenizer does not tell what ends an output."""
    return from_spec(json.loads(tokenizer.to_str()), "this tokenizer", as_text)


def from_spec(spec: dict[str, Any], path: object, as_text: Collection[str]) -> Tokens:
    """The tokens of what `tokenizer.json` holds; ``path`` names it in errors.

    Raises:
        CheckpointError: it is neither byte-level nor byte-fallback.
    """
    found = Tokens(dict(_model_tokens(spec, path)))
    for added in spec.get("added_tokens") or []:
        found.texts[added["id"]] = added["content"].encode()
        if added["special"] and added["content"] not in as_text:
            found.special.add(added["id"])
    return found


def _components(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for nested in part.get("decoders") or part.get("pretokenizers") or []:
            yield from _components(nested)


def _model_tokens(spec: dict[str, Any], path: object) -> Iterator[tuple[int, bytes]]:
    model = spec.get("model") or {}
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        pairs = [(int(token), text) for text, token in vocab.items()]
    elif isinstance(vocab, list):
        pairs = [(i, entry[0]) for i, entry in enumerate(vocab)]
    else:
        raise CheckpointError(f"{path} has no model.vocab")
    decoders = list(_components(spec.get("decoder")))
    kinds = {part.get("type") for part in decoders}
    if "ByteLevel" in kinds:
        table = {char: byte for byte, char in enumerate(_byte_level_alphabet())}
        return ((i, _from_byte_level(text, table, path)) for i, text in pairs)
    space = _space_mark(decoders)
    if space is None and "ByteFallback" not in kinds:
        raise CheckpointError(
            f"{path} is neither byte-level nor byte-fallback (decoder: {sorted(map(str, kinds))})"
        )
    unknown = {model.get("unk_id")} if isinstance(vocab, list) else set()
    return ((i, b"" if i in unknown else piece_bytes(text, space or SPACE)) for i, text in pairs)


def _space_mark(decoders: list[dict[str, Any]]) -> str | None:
    for part in decoders:
        if part.get("type") == "Metaspace":
            return str(part.get("replacement", SPACE))
        if part.get("type") == "Replace" and part.get("content") == " ":
            return str(part["pattern"].get("String"))
    return None


def _byte_level_alphabet() -> list[str]:
    """The printable character for each byte in GPT-2's byte-level BPE."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256))
    return [chr(byte) if byte in kept else chr(256 + next(substitutes)) for byte in range(256)]


def _from_byte_level(text: str, table: dict[str, int], path: object) -> bytes:
    try:
        return bytes(table[char] for char in text)
    except KeyError as error:
        # The model's vocabulary also lists added tokens, as plain text.
        if len(text) > 1:
            return text.encode()
        raise CheckpointError(f"{path}: {error} is not in the byte-level alphabet") from error
