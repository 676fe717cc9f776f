"""The tokenizer's own tokens of a text that stands inside another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlap_spec.grammar.vocabulary import Vocabulary

# What is encoded in front of a text where a tokenizer puts a space before every text.
FRONT = "\n"


class TextTokens:
    """Cuts texts into tokens as the tokenizer does, and answers for their bytes.

    Args:
        encode: Text → tokens, without special ones.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> None:
        self._text, self._encode = vocabulary.text, encode
        self._front = list(encode(FRONT))

    def __call__(self, text: str) -> list[int]:
        """The tokens of ``text``, whose bytes are the text's; none if there are no such."""
        found, wanted, front = list(self._encode(text)), text.encode(), self._front
        if self._bytes(found) == wanted:
            return found
        found = list(self._encode(FRONT + text))
        inside = found[len(front) :]
        return inside if found[: len(front)] == front and self._bytes(inside) == wanted else []

    def _bytes(self, tokens: Sequence[int]) -> bytes | None:
        size = len(self._text)
        if any(token >= size for token in tokens):
            return None
        return b"".join(self._text[token] for token in tokens)
