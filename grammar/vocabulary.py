"""The vocabulary of masks: the exact bytes of every token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import CheckpointError
from overlap_spec.grammar import vocabularies
from overlap_spec.grammar.rows import row_of
from overlap_spec.grammar.vocabularies import Tokens


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
        return _fixed([*legal, *self.stop_ids], self.words)

    @cached_property
    def stop_row(self) -> npt.NDArray[np.int32]:
        """int32 `(words,)`: the bits of the stop tokens; read-only."""
        return _fixed(self.stop_ids, self.words)

    @cached_property
    def byte_tokens(self) -> npt.NDArray[np.int64]:
        """int64 `(256,)`: a token whose text is that one byte, the first of them; -1 if none."""
        found = np.full(256, -1, np.int64)
        single = [token for token, text in enumerate(self.text) if len(text) == 1]
        for token in reversed(single):
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
        from overlap_spec.grammar.vocabularies import tokenizers

        try:
            spec = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a readable tokenizer.json: {error}") from error
        found = tokenizers.from_spec(spec, path, _as_text(markers))
        return cls._made(found, vocab_size, stop_ids)

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        size: int | None = None,
        stop_ids: int | Iterable[int] | None = None,
        markers: Iterable[str] | None = None,
    ) -> Vocabulary:
        """The vocabulary of another library's tokenizer.

        Args:
            tokenizer: Of `transformers`, `tokenizers`, `tiktoken`, `mistral_common` or
                `sentencepiece`, or a `llama_cpp.Llama`.
            size: Rows of the model's output layer, where it is larger than the tokenizer
                (`model.config.vocab_size`); ids beyond it are left out. None: the tokenizer's.
            stop_ids: Ids that end the output (`model.generation_config.eos_token_id`). None: the
                end-of-text token that the tokenizer names; those of `tokenizers` name none.
            markers: As for `from_tokenizer_json`.

        Raises:
            CheckpointError: tokens whose bytes it does not tell.
            TypeError: a tokenizer of another library.
            ValueError: as the class, and it names no stop token.
        """
        found = vocabularies.read(tokenizer, _as_text(markers))
        if stop_ids is None:
            if not found.stop:
                name = type(tokenizer).__name__
                raise ValueError(f"{name} does not tell what ends an output: pass stop_ids")
            stop_ids = sorted(found.stop)
        elif isinstance(stop_ids, int):
            stop_ids = [stop_ids]
        return cls._made(found, max(found.texts) + 1 if size is None else size, stop_ids)

    @classmethod
    def _made(cls, found: Tokens, size: int, stop_ids: Iterable[int]) -> Vocabulary:
        tokens = [b""] * size
        for token, text in found.texts.items():
            if token < size:
                tokens[token] = text
        special = frozenset(token for token in found.special if token < size)
        return cls(tuple(tokens), size, tuple(stop_ids), special)


def _as_text(markers: Iterable[str] | None) -> frozenset[str]:
    if markers is not None:
        return frozenset(markers)
    # Only who reads a tokenizer needs all the formats that have markers.
    from overlap_spec.grammar.reasoning.markers import known_markers

    return known_markers()


def _fixed(tokens: Iterable[int], words: int) -> npt.NDArray[np.int32]:
    row = row_of(tokens, words)
    row.flags.writeable = False
    return row
