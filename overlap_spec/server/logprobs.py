"""Log-probabilities in OpenAI's two shapes, and in SGLang's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import TokenLogprobs

# JSON has no infinity.
LOWEST = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """``choice.logprobs`` of a chat."""
    return {
        "content": [
            {
                **_token(tokenizer, token, entry.logprob),
                "top_logprobs": [_token(tokenizer, each, value) for each, value in entry.top],
            }
            for token, entry in zip(ids, logprobs, strict=False)
        ],
        "refusal": None,
    }


def text_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
) -> dict[str, Any]:
    """``choice.logprobs`` of a text completion; ``offset``: characters before the first token."""
    tokens, offsets = [], []
    for token in ids[: len(logprobs)]:
        text = tokenizer.decode([token])
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            {tokenizer.decode([each]): _finite(value) for each, value in entry.top}
            for entry in logprobs
        ],
        "text_offset": offsets,
    }


def sglang_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    with_text: bool,
) -> dict[str, Any]:
    """The entries of ``meta_info`` in SGLang's shape: (logprob, token id, text or None)."""

    def entry(token: int, value: float) -> tuple[float, int, str | None]:
        return _finite(value), token, tokenizer.decode([token]) if with_text else None

    pairs = list(zip(ids, logprobs, strict=False))
    return {
        "output_token_logprobs": [entry(token, each.logprob) for token, each in pairs],
        "output_top_logprobs": [
            [entry(other, value) for other, value in each.top] for _, each in pairs
        ],
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.vocabulary.text[token]
    return {
        "token": raw.decode("utf-8", errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(raw),
    }


def _finite(value: float) -> float:
    return max(value, LOWEST)
