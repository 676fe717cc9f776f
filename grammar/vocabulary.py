"""The vocabulary of masks: the exact bytes of every token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import CheckpointError
from overlap_spec.grammar.reasoning.markers import known_markers


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Token bytes in id order, and which tokens are not text.

    Two vocabularies are equal if their fingerprints are.

    Args:
        tokens: Bytes of each token; `b""` for a token that is not text. May be shorter than `size`.
        size: Rows of the model's output layer, padding included; ids from `len(tokens)` on are
            padding and never legal.
        stop_ids: Tokens that end the output; legal exactly if the grammar may end.
        special_ids: Tokens that are not text (`<bos>`, `<pad>` …), never legal inside a grammar,
            whatever their bytes. Stop tokens need not be listed. Markers that grammars and
            parsers treat as text (`<tool_call>`, `</think>` …) must not be listed.

    Raises:
        ValueError: no stop token, an id outside the vocabulary, more tokens than `size`.
    """

    tokens: tuple[bytes, ...]
    size: int
    stop_ids: tuple[int, ...]
    special_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.stop_ids:
            raise ValueError("a vocabulary needs at least one stop token to end a grammar with")
        if len(self.tokens) > self.size:
            raise ValueError(f"{len(self.tokens)} tokens do not fit a vocabulary of {self.size}")
        for token in (*self.stop_ids, *self.special_ids):
            if not 0 <= token < self.size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.size}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Leaves out cached properties: another thread may be adding one.
        return Vocabulary, (self.tokens, self.size, self.stop_ids, self.special_ids)

    @property
    def words(self) -> int:
        """int32 words of a mask row: `ceil(size / 32)`."""
        return (self.size + 31) // 32

    @cached_property
    def text(self) -> tuple[bytes, ...]:
        """`(size,)` bytes of each token, empty for special, stop and padding ids."""
        blank = self.special_ids.union(self.stop_ids)
        padded = (*self.tokens, *(b"",) * (self.size - len(self.tokens)))
        return tuple(b"" if i in blank else token for i, token in enumerate(padded))

    @cached_property
    def text_row(self) -> npt.NDArray[np.int32]:
        """int32 `(words,)`: all bits that a grammar can allow; read-only."""
        legal = [i for i, token in enumerate(self.text) if token]
        return _row([*legal, *self.stop_ids], self.words)

    @cached_property
    def stop_row(self) -> npt.NDArray[np.int32]:
        """int32 `(words,)`: the bits of the stop tokens; read-only."""
        return _row(self.stop_ids, self.words)

    @cached_property
    def byte_tokens(self) -> npt.NDArray[np.int64]:
        """int64 `(256,)`: a token whose text is that one byte, the first of them; -1 if none."""
        found = np.full(256, -1, np.int64)
        for token in reversed(range(len(self.tokens))):
            if len(self.text[token]) == 1:
                found[self.text[token][0]] = token
        return found

    @cached_property
    def by_text(self) -> tuple[list[bytes], list[int]]:
        """The texts of tokens in ascending order, each once, and a token of each."""
        tokens = {text: token for token, text in reversed(list(enumerate(self.text))) if text}
        ordered = sorted(tokens)
        return ordered, [tokens[text] for text in ordered]

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 of everything that affects masks."""
        digest = hashlib.sha256(f"{self.size};{sorted(set(self.stop_ids))};".encode())
        for token in self.text:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @classmethod
    def from_tokenizer_json(
        cls,
        path: str | Path,
        vocab_size: int,
        stop_ids: Iterable[int],
        markers: Iterable[str] | None = None,
    ) -> Vocabulary:
        """Read a Hugging Face `tokenizer.json`: byte-level BPE, or byte fallback with `▁`.

        Args:
            path: The file.
            vocab_size: Rows of the model's output layer; larger ids are left out.
            stop_ids: Ids that end the output.
            markers: Special tokens with one of these contents count as text, so that a grammar
                with the marker allows the single token. None means the markers of all tool
                formats and reasoning parsers.

        Raises:
            CheckpointError: the file is not such a tokenizer.
        """
        try:
            spec = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a readable tokenizer.json: {error}") from error
        tokens = [b""] * vocab_size
        for token, text in _model_tokens(spec, path):
            if token < vocab_size:
                tokens[token] = text
        special, as_text = set(), known_markers() if markers is None else set(markers)
        for added in spec.get("added_tokens") or []:
            if added["id"] >= vocab_size:
                continue
            tokens[added["id"]] = added["content"].encode()
            if added["special"] and added["content"] not in as_text:
                special.add(added["id"])
        return cls(tuple(tokens), vocab_size, tuple(stop_ids), frozenset(special))


def _row(ids: Iterable[int], words: int) -> npt.NDArray[np.int32]:
    bits = np.zeros(words * 32, np.uint8)
    bits[list(ids)] = 1
    row = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    row.flags.writeable = False
    return row


def _components(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for nested in part.get("decoders") or part.get("pretokenizers") or []:
            yield from _components(nested)


def _model_tokens(spec: dict[str, Any], path: str | Path) -> Iterator[tuple[int, bytes]]:
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
    return (
        (i, b"" if i in unknown else _from_byte_fallback(text, space or "▁")) for i, text in pairs
    )


def _space_mark(decoders: list[dict[str, Any]]) -> str | None:
    for part in decoders:
        if part.get("type") == "Metaspace":
            return str(part.get("replacement", "▁"))
        if part.get("type") == "Replace" and part.get("content") == " ":
            return str(part["pattern"].get("String"))
    return None


def _byte_level_alphabet() -> list[str]:
    """The printable character for each byte in GPT-2's byte-level BPE."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256))
    return [chr(byte) if byte in kept else chr(256 + next(substitutes)) for byte in range(256)]


def _from_byte_level(text: str, table: dict[str, int], path: str | Path) -> bytes:
    try:
        return bytes(table[char] for char in text)
    except KeyError as error:
        # The model's vocabulary also lists added tokens, as plain text.
        if len(text) > 1:
            return text.encode()
        raise CheckpointError(f"{path}: {error} is not in the byte-level alphabet") from error


def _from_byte_fallback(text: str, space: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(space, " ").encode()
